"""The control: what is known to be right is found right, without a race, and its figures are sane.

Tests of shardwise's own plans compare theirs with ``fsdp2_figures`` in the same processes. ``zero3``
is compared here.
"""

from functools import cache

import pytest
import torch

from tests.accelerator.accelerators import chosen
from tests.accelerator.figures import (
    SETTINGS,
    WARM_STEPS,
    Figures,
    Setting,
    fsdp2_figures,
    zero3_beside_fsdp2,
)
from tests.harness import Workers
from tests.models import UntiedGPT, make, train_plain

STEPS = 3
ROUNDED_TO = 512
"""The smallest piece of memory that allocators of devices hand out."""


def _train(delay: str, dtype: torch.dtype) -> Figures:
    accelerator = chosen()
    accelerator.delay(delay)
    try:
        return fsdp2_figures(UntiedGPT, dtype, steps=STEPS)
    finally:
        accelerator.delay("none")


@cache
def _plain_losses(dtype: torch.dtype) -> list[float]:
    return train_plain(make(UntiedGPT, dtype), WARM_STEPS + STEPS)


@pytest.mark.parametrize("delay", ["none", "main", "side", "random"])
def test_fsdp2_trains_as_one_plain_process_without_a_race(sim_two: Workers, delay: str) -> None:
    for figures in sim_two.run(_train, delay, torch.float64):
        assert figures.losses == pytest.approx(_plain_losses(torch.float64), rel=1e-9)
        assert not figures.races


def test_fsdp2s_memory_and_launches(sim_two: Workers) -> None:
    model = make(UntiedGPT, torch.float32)
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    tensors = 4 * len(list(model.parameters()))  # a parameter, two states and its count of steps
    states = 3 * 4 * sum(p.numel() for p in model.parameters())
    for figures in sim_two.run(_train, "none", torch.float32):
        assert states / 2 <= figures.at_rest_bytes <= states / 2 + tensors * ROUNDED_TO
        assert figures.peak_bytes >= figures.at_rest_bytes + block
        assert figures.launches > 0
        assert not figures.races
        if figures.host_waits is None:
            continue  # real devices count kernels of their own names, and no waits
        assert sum(figures.host_waits.values()) == 0
        # Blocks are gathered for forward and for backward, what is outside of them once.
        assert figures.launches_by_name["simccl all_gather"] == 2 * len(model.blocks) + 1
        assert figures.launches_by_name["simccl reduce_scatter"] == len(model.blocks) + 1
        assert figures.launches_by_name["aten::_fused_adamw_"] == 1


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_zero3_takes_no_more_than_fsdp2(sim_two: Workers, setting: Setting) -> None:
    """Memory at rest and at peak, launches and waits of the host, for the same training."""
    for ours, theirs in sim_two.run(zero3_beside_fsdp2, setting):
        assert ours.losses == pytest.approx(theirs.losses, rel=2e-2 if setting.mixed else 1e-5)
        assert ours.at_rest_bytes <= theirs.at_rest_bytes
        assert ours.peak_bytes <= theirs.peak_bytes
        if ours.host_waits is None:
            continue  # profilers name a real device's launches, and count no waits
        assert ours.launches <= theirs.launches
        assert not ours.races
        assert sum(theirs.host_waits.values()) == 0
        # The norm is a number of the host's; FSDP2's stays on the device.
        assert sum(ours.host_waits.values()) <= setting.clips
