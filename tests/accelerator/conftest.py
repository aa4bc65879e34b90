"""Fixtures: pools of ranks that each have a device of their own."""

import pytest

from tests.accelerator.accelerators import chosen, prepare
from tests.harness import Workers

collect_ignore = ["device"]
"""Importing the simulated device makes it the accelerator of the process; only ranks do that."""


def _pool(world: int):
    if reason := chosen().unavailable(world):
        pytest.skip(reason)
    pool = Workers(world, prepare)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def sim_one():
    yield from _pool(1)


@pytest.fixture(scope="module")
def sim_two():
    yield from _pool(2)


@pytest.fixture(scope="module")
def sim_four():
    yield from _pool(4)


@pytest.fixture(scope="session")
def simulation():
    """For tests of the simulation itself: skips where it cannot be built, or is not asked for."""
    if chosen().type != "sim":
        pytest.skip("a test of the simulated device, and another one is asked for")
    if reason := chosen().unavailable(1):
        pytest.skip(reason)
