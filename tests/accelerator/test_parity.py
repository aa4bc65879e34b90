"""Every preset, tier and kind of activations on an accelerator: the numbers of one plain process.

On the simulated device also: no race, whatever is late, and no wait of the host for a unit.
"""

import pytest

import shardwise as sw
from tests.accelerator.training import Case, train
from tests.models import TinyGPT

PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "amsp", "infinity")


def _check(outcomes, *, tolerance: float = 1e-9) -> None:
    for outcome in outcomes:
        assert outcome.loss_difference <= tolerance
        assert outcome.parameter_difference <= tolerance
        assert outcome.norm_difference <= tolerance
        assert outcome.extra_gathers == 0
        assert not outcome.seen.races


@pytest.mark.parametrize("delay", ["none", "random"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_train_as_one_plain_process_without_a_race(sim_four, name: str, delay: str) -> None:
    plan = sw.presets.PRESETS[name]()
    _check(sim_four.run(train, Case(name, plan, "node=2,world=2", TinyGPT, delay=delay)))
