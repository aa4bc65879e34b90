"""Memory of devices and of their hosts, beside what the memory model says."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.plans.plan import Plan, Precision
from tests.accelerator.needs import Case, Taken, shape, taken_by
from tests.harness import Workers

GRID = "node=2,world=2"
PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "amsp", "zeropp", "lean", "infinity")
EXACT, MIXED = Precision(), Precision(compute="bfloat16")
WITHIN = 0.1
ROUNDED_TO = 512
"""The smallest piece of memory that allocators of devices hand out."""


def _preset(name: str, precision: Precision = EXACT) -> Plan:
    return sw.presets.PRESETS[name](precision=precision)


def _on(plan: Plan, tier: str, *states: str) -> Plan:
    return replace(plan, **{state: replace(getattr(plan, state), tier=tier) for state in states})


def _check(pool: Workers, cases: list[Case]) -> None:
    for rank in pool.run(taken_by, cases):
        for taken in rank:
            _check_one(taken)


def _check_one(taken: Taken) -> None:
    predicted, name = taken.predicted, taken.name
    # Numbers of the optimizer and the like: a few for each parameter. Padding has no states.
    small = 3 * ROUNDED_TO * (12 * shape().num_layers + 5)
    states = predicted.params + predicted.optim
    assert taken.at_rest_bytes == pytest.approx(states, abs=small), name
    assert taken.buffers_bytes <= 1.01 * (predicted.wires + predicted.staging), name
    assert taken.peak_bytes == pytest.approx(predicted.total, rel=WITHIN), name
    assert not taken.races, name
    if taken.pinned_peak_bytes is not None:
        pinned = predicted.cpu - taken.unpinned_bytes
        assert taken.pinned_peak_bytes == pytest.approx(pinned, rel=WITHIN), name


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_what_is_predicted(sim_four: Workers, name: str) -> None:
    """Alone and accumulating, in float32 and in bfloat16."""
    ways = [(EXACT, 1), (MIXED, 3)]
    if name == "zero2":
        ways += [(EXACT, 3), (MIXED, 1)]
    _check(
        sim_four,
        [
            Case(f"{name} in {precision.compute}, {count}", _preset(name, precision), GRID, count)
            for precision, count in ways
        ],
    )


def _tiers() -> Iterator[tuple[str, str, tuple[str, ...], Precision]]:
    for tier in ("cpu", "nvme"):
        yield "zero3", tier, ("params",), EXACT
        yield "zero3", tier, ("grads",), MIXED
        yield "zero3", tier, ("optim",), EXACT
        yield "zero3", tier, ("optim",), MIXED
        yield "amsp", tier, ("params", "grads", "optim"), MIXED


@pytest.mark.parametrize(("name", "tier", "states", "precision"), list(_tiers()))
def test_tiers_take_what_is_predicted(
    sim_four: Workers, name: str, tier: str, states: tuple[str, ...], precision: Precision
) -> None:
    plan = _on(_preset(name, precision), tier, *states)
    _check(sim_four, [Case(f"{name} on {tier}", plan, GRID)])


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("setting", ["keep", "recompute", "cpu", "nvme"])
def test_activations_take_what_is_predicted(sim_four: Workers, setting: str, batch: int) -> None:
    precision = EXACT if batch == 8 else MIXED
    plan = replace(_preset("zero3", precision), activations=setting)
    _check(sim_four, [Case(f"{setting}, {batch}", plan, GRID, batch=batch)])


@pytest.mark.parametrize("setting", ["keep", "recompute"])
def test_logits_take_what_is_predicted(sim_four: Workers, setting: str) -> None:
    """They are the largest activations of models with many tokens."""
    cases = [
        Case(
            f"{setting} in {precision.compute}, many tokens",
            replace(_preset("zero3", precision), activations=setting),
            GRID,
            batch=4,
            vocab=8 * shape().vocab,
        )
        for precision in (EXACT, MIXED)
    ]
    _check(sim_four, cases)
