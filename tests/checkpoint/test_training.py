"""Training checkpoints: a resumed run goes on with the same bits, and nothing is half written."""

import errno
import json
import os
import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.checkpoint.training import contents
from shardwise.checkpoint.training.write import Appender
from tests.checkpoint.runs import HALF, PURE, Model, Run, assert_equal, plan_of
from tests.checkpoint.test_export import refusal
from tests.harness import Workers
from tests.models import TinyGPT, adamw
from tests.runtime.support import sgd, small

EXACT = ["zero1", "zero3", "hsdp", "amsp", "zeropp", "lean", "infinity", "tiled", "feedback"]


# --- the same plan and world ------------------------------------------------------------------


def goes_on(root: str, name: str, **changes) -> None:
    """Saved after two steps and loaded into a fresh model: the next steps have the same bits."""
    plan = plan_of(name, root)
    settings = {"precision": plan.precision, **changes}
    dtype = torch.float32 if "precision" in changes else torch.float64
    kind = settings.pop("optimizer", adamw)
    plan = small(plan, **settings)
    run = Run(plan, dtype=dtype, optimizer=kind)
    run.steps(0, 1)
    folder = Path(root) / f"{name}-2"
    run.save(folder, step=2, extra={"at": (1, 2)})
    random_numbers = random.random(), np.random.rand()
    values, losses = run.values(), run.steps(2, 3)
    run.end()
    again = Run(plan, seed=1, dtype=dtype, optimizer=kind)
    again.step(7)
    found = again.load(folder)
    assert (random.random(), np.random.rand()) == random_numbers
    assert (found.step, found.extra, found.notes) == (2, {"at": (1, 2)}, ())
    assert found.world == dist.get_world_size()
    assert_equal(again.values(), values, name)
    assert again.steps(2, 3) == losses, name
    again.end()


def go_on(root: str, names: list[str]) -> None:
    for name in names:
        goes_on(root, name)


class TestSamePlan:
    def test_one_rank(self, one: Workers, tmp_path: Path) -> None:
        one.run(go_on, str(tmp_path), ["zero3", "infinity", "tiled infinity"])

    def test_two_ranks(self, two: Workers, tmp_path: Path) -> None:
        two.run(go_on, str(tmp_path), ["zero1", "optim on disk", "ddp"])

    def test_four_ranks(self, four: Workers, tmp_path: Path) -> None:
        four.run(go_on, str(tmp_path), EXACT)

    def test_precisions(self, two: Workers, tmp_path: Path) -> None:
        for name in ("zero3", "lean", "infinity"):
            for number, precision in enumerate((HALF, PURE)):
                folder = tmp_path / str(number)
                folder.mkdir(exist_ok=True)
                two.run(goes_on, str(folder), name, precision=precision)

    def test_another_optimizer(self, two: Workers, tmp_path: Path) -> None:
        two.run(goes_on, str(tmp_path), "amsp", optimizer=sgd)
