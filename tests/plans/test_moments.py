"""The order of an expected pass is the one that a first pass records."""

from dataclasses import replace
from itertools import product

import pytest

from shardwise.core.topology import Topology
from shardwise.plans import presets
from shardwise.plans.builtin import builtin
from shardwise.plans.expected import Training
from shardwise.plans.ops import Phase
from shardwise.plans.presets import PRESETS
from shardwise.plans.validate import violations

GRID = Topology.parse("node=2,world=2")
FACTS = builtin("gpt:layers=3,width=96,heads=4")


def orders(training: Training) -> dict[str, list[int]]:
    return {kind: walk.order or [] for kind, walk in training._issuer.walks.items()}


def recorded(training: Training) -> dict[str, list[int]]:
    """All ranks agree on every first use, one by one."""
    for walk in training._issuer.walks.values():
        walk.forget()
    for phase in (Phase.EVAL, Phase.ONLY):
        training.run(phase)
    return orders(training)


@pytest.mark.parametrize(("tile", "prefetch"), product((0, 10_000), (0, 1, 3)))
@pytest.mark.parametrize("name", PRESETS)
def test_what_a_first_pass_would_record(name: str, tile: int, prefetch: int) -> None:
    made = PRESETS[name]()
    plans = [
        replace(
            made, prefetch=prefetch, keep=keep, activations=activations,
            tiling=replace(made.tiling, numel=tile),
            tiers=replace(made.tiers, path="/disk"),
        )
        for keep, activations in product((made.keep, "node", "full"), ("keep", "recompute"))
    ]  # fmt: skip
    for plan in plans:
        if violations(plan, GRID):
            continue
        spec = FACTS.spec(plan, GRID)
        training = Training(plan, spec, GRID)
        first = orders(training)
        for phase in Phase:
            training.run(phase)
        if plan.keep == "full" and spec.used_again:
            continue  # tied tiles are used twice, and recorded as used once
        assert first == orders(training) == recorded(training)


def test_tiles_of_a_recomputed_block_are_gathered_for_that_and_for_themselves() -> None:
    plan = presets.zero3()
    plan = replace(plan, tiling=replace(plan.tiling, numel=10_000))
    spec = FACTS.spec(plan, GRID)
    tiles = [unit.name for unit in spec.units if unit.name.startswith("blocks.1/")]
    assert len(tiles) > 4
    gathers = {}
    for activations in ("keep", "recompute"):
        events = Training(replace(plan, activations=activations), spec, GRID).run(Phase.ONLY)
        gathers[activations] = [
            op.unit
            for event in events
            for op in event.ops
            if op.kind == "gather" and op.unit in tiles and not event.trigger.in_forward
        ]
    assert gathers["keep"] == tiles[::-1]
    # The last one is there when recomputation begins, and serves both uses of the one before it.
    assert gathers["recompute"] == [tiles[-1], *tiles[:-1], *tiles[-3::-1]]
