"""Families of plans, which differ in wires only: which to look at first, and which were seen."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.planner.request import NEAR, Candidate, rank
from shardwise.planner.space import Batch
from shardwise.plans.plan import Plan
from shardwise.plans.presets import PRESETS

TOLERANCE = 0.02
"""No family that was not looked at is faster than the winner by more than this share of a step."""
LEADERS = 6
"""Families that a search in other circumstances looks at first."""


@dataclass(frozen=True)
class Family:
    """Plans that differ in wires only."""

    plan: Plan
    batch: Batch
    bound_s: float
    """No step of any of them is shorter."""
    likely_s: float
    """A guess that says which to look at first."""

    @property
    def choices(self) -> tuple[object, ...]:
        """What it is made of; what depends on each other together."""
        plan = self.plan
        return (
            (plan.params.spread, plan.keep, plan.keep_until),
            (plan.grads.spread, plan.optim.spread),
            (plan.params.tier, plan.grads.tier, plan.optim.tier),
            plan.activations,
            self.batch,
        )


class Seen:
    """The families that were looked at."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.best: dict[tuple[str, ...], Candidate] = {}
        """Of each partitioning."""
        self.fastest = math.inf
        self.idle = 0
        """Families that were simulated since the last one that was faster."""
        self._centre: Family | None = None
        self._steps: list[tuple[float, Plan, Batch]] = []
        """The fastest of each family, in the order of looking."""

    def add(self, family: Family, members: Iterator[Candidate]) -> bool:
        """Whether something in the family is clearly faster than all before."""
        self.ids.add(id(family))
        before = self.fastest
        fastest = math.inf
        for candidate in members:
            fastest = min(fastest, candidate.step_s)
            key, best = _partitioning(candidate.plan), self.best
            best[key] = rank([candidate, best[key]])[0] if key in best else candidate
            if candidate.step_s < self.fastest:
                self.fastest, self._centre = candidate.step_s, family
        self._steps.append((fastest, family.plan, family.batch))
        return fastest < (1 - NEAR) * before

    def leaders(self) -> list[tuple[Plan, Batch]]:
        """The families that were fastest."""
        first = sorted(self._steps, key=lambda step: step[0])[:LEADERS]
        return [(plan, batch) for _, plan, batch in first]

    def is_beside(self, family: Family) -> bool:
        """Whether it differs from the fastest in one choice, could be faster, and is new."""
        if self._centre is None or id(family) in self.ids:
            return False
        if family.bound_s >= (1 - TOLERANCE) * self.fastest:
            return False
        pairs = zip(family.choices, self._centre.choices, strict=True)
        return sum(mine != its for mine, its in pairs) == 1


def presets_first(families: list[Family]) -> list[Family]:
    """The likeliest family of each preset's spreads leads, so that no search overlooks it.

    Without accumulation gradients never rest, and only one of their spreads is in the space.
    """
    known = [make() for make in PRESETS.values()]
    resting = {_spreads(plan, rests=True) for plan in known}
    passing = {_spreads(plan, rests=False) for plan in known}
    first: dict[tuple[str, ...], Family] = {}
    for family in families:
        rests = family.batch.accumulate > 1
        spreads = _spreads(family.plan, rests=rests)
        if spreads in (resting if rests else passing):
            first.setdefault(spreads, family)
    leading = {id(family) for family in first.values()}
    return [*first.values(), *(family for family in families if id(family) not in leading)]


def _spreads(plan: Plan, *, rests: bool) -> tuple[str, ...]:
    grads = (plan.grads.spread,) if rests else ()
    return (plan.params.spread, *grads, plan.optim.spread, plan.keep)


def _partitioning(plan: Plan) -> tuple[str, ...]:
    return (
        plan.params.spread,
        plan.optim.spread,
        plan.keep,
        plan.params.tier,
        plan.grads.tier,
        plan.optim.tier,
    )
