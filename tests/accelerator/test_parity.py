"""Every kind of plan on an accelerator: the numbers of one plain process.

On the simulated device also: no race, whatever is late, and no wait of the host where a plan needs
none. Each two choices (a plan and a tier, a tier and a kind of activations, and so on) are made
together in at least one way to train; all combinations would be millions.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations, cycle
from random import Random
from typing import Any

import pytest

from tests.accelerator import parity
from tests.accelerator.parity import PLANS, TIERS, Way
from tests.harness import Workers

KINDS: dict[str, tuple[str, ...]] = {
    "alone": ("alone",),
    "parts": ("zero3", "fsdp keep=full"),
    "until step": ("keep=full until step",),
    "whole": ("ddp", "zero1", "zero2"),
    "two levels": ("zero3 keep=node", "keep=node until step"),
    "partly": ("amsp", "hsdp"),
}
"""Plans that differ little where a tier or the kind of activations matters; they take turns."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "tiers": tuple(TIERS),
    "activations": ("keep", "recompute", "cpu", "nvme"),
    "dtype": ("float64", "float32", "mixed"),
    "rounds": ("one", "no_sync", "reduced"),
    "clip": (False, True),
    "tiled": (False, True),
    "deferred": (False, True),
    "checkpoint": ("none", "reentrant", "plain"),
    "update": ("step", "backward"),
    "optimizer": ("adamw", "groups", "two"),
    "frozen": (False, True),
    "delay": ("none", "main", "side", "random"),
}
LOSSES = {"float64": 1e-9, "float32": 1e-5, "mixed": 2e-3}
NORMS = {**LOSSES, "mixed": 1e-2}
"""How far losses and norms may be from the plain process's, relative. In float32 sums have another
order, and in bfloat16 an element whose sum differs in the last bit may be rounded the other way."""
PARAMETERS = 1e-9
"""The same for parameters in float64, absolute. In float32 AdamW makes steps of full length of
gradients that are rounding noise (a key's bias), so there only losses and norms are compared."""


def possible(way: Mapping[str, Any]) -> bool:
    """Whether choices go together; those that are not made yet are absent."""

    def chosen(name: str, *values: Any) -> bool:
        return way.get(name) in values

    if chosen("update", "backward"):
        streams = "tiers" not in way or any(t != "device" for t in TIERS[way["tiers"]][1:])
        if not streams or chosen("clip", True) or chosen("rounds", "reduced"):
            return False  # nothing to stream, or the step's gradients come later
    if chosen("tiled", True) and chosen("kind", "whole"):
        return False  # layers that every rank has whole are not cut
    # The model's own checkpoints keep inputs where they are, which the runtime warns of.
    return not chosen("checkpoint", "reentrant", "plain") or not chosen(
        "activations", "cpu", "nvme"
    )


def covering(choices: Mapping[str, tuple[Any, ...]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Combinations that have every possible pair of choices at least once; greedily few."""
    random = Random(seed)
    left = {
        frozenset({(one, a), (other, b)})
        for one, other in combinations(choices, 2)
        for a in choices[one]
        for b in choices[other]
        if possible({one: a, other: b})
    }
    while left:
        pair = min(left, key=lambda each: sorted(map(str, each)))
        tries = [_filled(dict(pair), choices, random) for _ in range(30)]
        best = max(tries, key=lambda way: sum(each in left for each in _pairs(way)))
        left.difference_update(_pairs(best))
        yield best


def _filled(way: dict[str, Any], choices: Mapping[str, tuple[Any, ...]], random: Random) -> dict:
    for name in random.sample(list(choices), len(choices)):
        if name not in way:
            options = [v for v in choices[name] if possible({**way, name: v})]
            way[name] = random.choice(options)
    return way


def _pairs(way: Mapping[str, Any]) -> Iterator[frozenset[tuple[str, Any]]]:
    return (frozenset(pair) for pair in combinations(way.items(), 2))


def ways() -> Iterator[Way]:
    turns = {kind: cycle(plans) for kind, plans in KINDS.items()}
    for choices in covering(CHOICES):
        yield Way(plan=next(turns[choices.pop("kind")]), **choices)


WAYS = list(ways())


def test_every_plan_and_every_tier_is_among_the_ways() -> None:
    assert {way.plan for way in WAYS} == set(PLANS)
    alone = {way.tiers for way in WAYS if way.plan == "alone"}
    assert alone == set(TIERS)  # a single rank reads from a disk in a way of its own
    assert {way.tiers for way in WAYS if way.dtype == "float32"} == set(TIERS)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, way: Way) -> Workers:
    pool: Workers = request.getfixturevalue({1: "sim_one", 2: "sim_two", 4: "sim_four"}[way.world])
    return pool


@pytest.mark.parametrize("way", sorted(WAYS, key=lambda way: way.world), ids=str)
def test_training_is_that_of_one_plain_process(ranks: Workers, tmp_path, way: Way) -> None:
    for outcome in ranks.run(parity.train, way, str(tmp_path)):
        assert outcome.loss_difference <= LOSSES[way.dtype]
        assert outcome.norm_difference <= NORMS[way.dtype]
        if way.dtype == "float64":
            assert outcome.parameter_difference <= PARAMETERS
        assert outcome.extra_gathers == 0
        assert (outcome.offloaded_bytes > 0) == (way.activations in ("cpu", "nvme"))
        assert not outcome.seen.races
