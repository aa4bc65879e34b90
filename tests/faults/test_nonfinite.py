"""NaN and Inf: where the first one was, alike on all ranks; updates that are left out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.models import Block
from tests.runtime.support import PLANS, small
from tests.train.test_train_loop import job, run

WIDTH = 16


class Poison(torch.autograd.Function):
    """Right in forward, NaN in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given * math.nan


def where(plan: str, place: str, world: int) -> tuple[bool, str]:
    """What is found of a value that rank 1 puts somewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(4))).double()
    if place == "parameter":
        with torch.no_grad():
            model[2].up.weight[3, 1] = math.inf
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.shard(model, optimizer, small(PLANS[plan]), levels=f"world={world}")
    bad = dist.get_rank() == 1
    if place == "output":
        model[1].up.register_forward_hook(lambda m, a, out: out * math.nan if bad else out)
    if place == "gradient":
        model[1].register_forward_hook(lambda m, a, out: Poison.apply(out) if bad else out)
    batch = torch.ones(2, 3, WIDTH, dtype=torch.float64)
    model(batch).square().mean().backward()
    norm = sw.clip_grad_norm_(model, 1.0)
    found = sw.find_nonfinite(model, lambda: model(batch))
    optimizer.zero_grad()
    sw.unshard(model)
    return bool(norm.isfinite()), str(found)


EXPECTED = {
    "parameter": "Inf in the parameter '2.up.weight' (unit '2'), first on rank",
    "output": "NaN in the output of '1.up' (unit '1'), first on rank 1",
    "gradient": "NaN in the gradient of '1.",
    "nowhere": "None",
}


@pytest.mark.parametrize("plan", ["zero3", "zero1"])
@pytest.mark.parametrize("place", EXPECTED)
def test_the_first_place_is_named_alike_on_all_ranks(place, plan, two):
    (first, said), (second, same) = two.run(where, plan, place, 2)
    assert first is second is (place == "nowhere")
    assert said == same
    assert said.startswith(EXPECTED[place]), said


def test_an_update_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = {
        "optim.lr": 1e30,
        "optim.warmup_steps": 0,
        "train.on_nonfinite": "skip",
        "workers": 1,
    }
    _, records = run(job(tmp_path, **changes))
    assert not all(math.isfinite(record["loss"] or math.nan) for record in records)
    assert "skipped: the loss is nan at step " in capfd.readouterr().err
