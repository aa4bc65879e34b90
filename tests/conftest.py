"""Fixtures: pools of worker processes, one a session and world size."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal

import pytest
from hypothesis import settings

from tests.harness import Workers

# How long an example takes depends on what else the machine does.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# A shell that starts the suite in the background has it ignore Ctrl-C, and processes of tests would
# inherit that; those that are sent one must feel it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _pool(world: int):
    pool = Workers(world)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two():
    yield from _pool(2)


@pytest.fixture(scope="session")
def four():
    yield from _pool(4)


@pytest.fixture(scope="session")
def one():
    yield from _pool(1)
