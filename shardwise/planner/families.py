"""Families of plans that differ in wires only: which to simulate first, and which have been."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.planner.request import NEAR, Candidate, rank
from shardwise.planner.space import Batch
from shardwise.plans.plan import Plan
from shardwise.plans.presets import PRESETS

TOLERANCE = 0.02
"""The search is proven if no family left out can be faster by more than this share of a step."""
LEADERS = 6
"""Number of families that a search under other conditions simulates first."""


@dataclass(frozen=True)
class Family:
    """Plans that differ in wires only."""

    plan: Plan
    batch: Batch
    bound_s: float
    """A lower bound of the step time of all of them."""
    likely_s: float
    """A guess of the step time; orders the families."""

    @property
    def choices(self) -> tuple[object, ...]:
        """Its choices; those that depend on each other count as one."""
        plan = self.plan
        return (
            (plan.params.spread, plan.keep, plan.keep_until),
            (plan.grads.spread, plan.optim.spread),
            (plan.params.tier, plan.grads.tier, plan.optim.tier),
            plan.activations,
            self.batch,
        )


class Seen:
    """The families that have been simulated."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.best: dict[tuple[str, ...], Candidate] = {}
        """The fastest candidate by partitioning."""
        self.fastest = math.inf
        self.idle = 0
        """Number of families simulated since the last improvement."""
        self._centre: Family | None = None
        self._steps: list[tuple[float, Plan, Batch]] = []
        """The fastest step of each family, in the order in which they were simulated."""

    def add(self, family: Family, members: Iterator[Candidate]) -> bool:
        """Add a family; returns whether it has a plan clearly faster than all before."""
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
        """The plans of the fastest families."""
        first = sorted(self._steps, key=lambda step: step[0])[:LEADERS]
        return [(plan, batch) for _, plan, batch in first]

    def is_beside(self, family: Family) -> bool:
        """Whether it differs from the fastest family in one choice, could be faster, and is new."""
        if self._centre is None or id(family) in self.ids:
            return False
        if family.bound_s >= (1 - TOLERANCE) * self.fastest:
            return False
        pairs = zip(family.choices, self._centre.choices, strict=True)
        return sum(mine != its for mine, its in pairs) == 1


def presets_first(families: list[Family]) -> list[Family]:
    """Put the likeliest family with each preset's spreads first, so that no search omits it.

    Without accumulation gradients never rest, so the space has only one of their spreads.
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
