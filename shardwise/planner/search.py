"""The search for the best plan: every legal plan gets a lower bound, few are simulated.

Every plan has a lower bound of its step time (see ``bound.py``), so the search may end once the
bounds of all remaining plans are above the best step found, less a tolerance. Plans are simulated
in the order of a guess: the bound plus a little of all other work.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

from shardwise.core.cluster import Cluster
from shardwise.core.topology import Topology
from shardwise.planner.bound import Bound
from shardwise.planner.families import TOLERANCE, Family, Seen, presets_first
from shardwise.planner.figures import Figures
from shardwise.planner.request import NEAR, Result, evaluate, overflows, rank

# Named here for auto.py, which shall import them from where they are.
from shardwise.planner.request import Candidate as Candidate
from shardwise.planner.request import Request as Request
from shardwise.planner.request import lacks as lacks
from shardwise.planner.space import (
    STATES,
    Batch,
    Placement,
    activation_settings,
    moved_further,
    partitionings,
    placed,
    placements,
    wirings,
)
from shardwise.plans.memory import Memory
from shardwise.plans.plan import Plan

RANKED = 10
"""Number of alternatives that are simulated in full and reported."""
LEAST_FULL = 3
"""At least this many are simulated in full, as short models are not exact."""
PATIENCE = 24
"""The search also ends after this many families without improvement; then nothing is proven."""
HIDDEN = 0.85
"""The share of the work beside the busiest resource's that is assumed to be hidden. It decides only
the order in which families are simulated."""
TILE_NUMEL = 1 << 26
"""Tile size if nothing fits without tiles; see ``presets.infinity``."""


def search(
    request: Request, *, count: int = RANKED, progress: Callable[[int], None] = lambda _: None
) -> Result:
    """The fastest plans that fit."""
    return Search(request, progress).run(count)


class Search:
    """A search that remembers what it simulated: other memory limits cost little more."""

    def __init__(self, request: Request, progress: Callable[[int], None] = lambda _: None) -> None:
        self._request = request
        self._whole = Space(request, tile_numel=0, progress=progress)
        self._tiled = Space(request, tile_numel=TILE_NUMEL, progress=progress)

    def with_other_speeds(self, cluster: Cluster) -> "Search":
        """The same search on a cluster with other speeds; it begins with the best found so far."""
        other = Search(replace(self._request, cluster=cluster))
        other._whole.follow(self._whole)
        other._tiled.follow(self._tiled)
        return other

    def quickly(self, plan: Plan, batch: Batch) -> Candidate:
        """One plan, simulated on a short model as in the search."""
        space = self._tiled if plan.tiling.numel else self._whole
        return space.candidate(plan, batch)

    def fits(self) -> bool:
        """Whether any plan fits; nothing is simulated."""
        limit = self._request.limit
        return self._whole.fits(limit) or self._tiled.fits(limit)

    def run(
        self,
        count: int = RANKED,
        *,
        limit: int | None = None,
        tiles: bool = True,
        patience: int = PATIENCE,
    ) -> Result:
        """The fastest plans that fit a device's memory; layers in tiles only if nothing else fits.

        With less ``patience`` fewer families are simulated besides those that led before.
        """
        within = self._request.limit if limit is None else limit
        result = self._whole.run(count, within, patience)
        if result.best is None and tiles:
            tiled = self._tiled.run(count, within, patience)
            if tiled.best is not None or self._excess(tiled, within) < self._excess(result, within):
                return tiled
        return result

    def _excess(self, result: Result, limit: int) -> float:
        """If nothing fits: how many times too large the nearest plan is."""
        if result.smallest is None:
            return math.inf
        lacking = overflows(result.smallest.estimate.memory, self._request, limit)
        return max((lack.times for lack in lacking), default=0.0)


class Space:
    """All plans with layers as they are, or all plans with layers in tiles."""

    def __init__(
        self, request: Request, *, tile_numel: int, progress: Callable[[int], None]
    ) -> None:
        self._request, self._progress = request, progress
        self._topology: Topology = request.cluster.topology
        self._figures = Figures(request)
        self._bound = Bound(request, self._figures)
        self._tile_numel = tile_numel
        self._bases: list[tuple[Plan, Batch]] = []
        self._placed: dict[tuple[int, Placement], tuple[Plan, Memory]] = {}
        """By the index of a base: the plan with its states on tiers, and the memory it needs."""
        self._known: dict[tuple[int, Placement], Family] = {}
        self._leaders: list[tuple[Plan, Batch]] = []
        """The best of the last run, here or in a space that this one follows."""
        self._num_plans = 0
        self._smallest: tuple[float, Plan, Batch] | None = None
        """What comes nearest to fitting: how many times too large, which plan, which batch."""

    def follow(self, other: "Space") -> None:
        """Share with another space what does not depend on speeds, and begin with its best."""
        self._figures.follow(other._figures)
        self._bound.follow(other._bound)
        self._bases, self._placed = other._bases, other._placed
        self._leaders = other._leaders

    def run(self, count: int, limit: int, patience: int) -> Result:
        """Simulate families, the likeliest first, until none can be better; then the best's
        neighbours."""
        self._num_plans, self._smallest = 0, None
        families = sorted(self.families(limit), key=lambda f: f.likely_s)
        families = self._leading(presets_first(families))
        # For each family, the lowest bound of it and all that follow.
        bounds = list(accumulate((family.bound_s for family in reversed(families)), min))[::-1]
        seen = Seen()
        for family, bound in zip(families, bounds, strict=True):
            # The table also needs some plans behind the winner.
            ended = bound >= (1 - TOLERANCE) * seen.fastest or seen.idle >= patience
            if ended and (len(seen.best) >= count or bound > 2 * seen.fastest):
                break
            self._look(family, seen, limit)
        while (beside := next(filter(seen.is_beside, families), None)) is not None:
            self._look(beside, seen, limit)
        self._leaders = seen.leaders()
        left_s = min((f.bound_s for f in families if id(f) not in seen.ids), default=math.inf)
        found = sorted(seen.best.values(), key=lambda candidate: candidate.step_s)
        found = found[: max(count, LEAST_FULL)]
        full = rank([evaluate(self._request, c.plan, c.batch) for c in found])[:count]
        # Compared with full simulations: the order came from short models, which are not exact.
        proven = not full or left_s >= (1 - TOLERANCE) * full[0].step_s
        smallest = None
        if not full and self._smallest is not None:
            smallest = evaluate(self._request, *self._smallest[1:])
        return Result(tuple(full), smallest, self._num_plans, self._figures.num_simulated, proven)

    def fits(self, limit: int) -> bool:
        return next(self.families(limit), None) is not None

    def _leading(self, families: list[Family]) -> list[Family]:
        """Put those that led before first, then those already simulated, which cost nothing."""
        leaders = set(self._leaders)

        def rank(family: Family) -> int:
            if (family.plan, family.batch) in leaders:
                return 0
            return 1 if self._figures.is_simulated(family.plan, family.batch) else 2

        return sorted(families, key=rank)

    def _look(self, family: Family, seen: Seen, limit: int) -> None:
        """Simulate a family; wires take memory, so some of its members may not fit."""
        fitting = (
            candidate
            for candidate in self._members(family)
            if not any(overflows(candidate.estimate.memory, self._request, limit))
        )
        known = self._figures.num_simulated
        is_faster = seen.add(family, fitting)
        # Families simulated before do not count.
        seen.idle = 0 if is_faster else seen.idle + (self._figures.num_simulated > known)
        self._progress(self._figures.num_simulated)

    def families(self, limit: int) -> Iterator[Family]:
        """The families that fit, except those that move more than another of their partitioning."""
        if not self._bases:
            self._bases += self._all_bases()
        choices = placements(self._request.cluster, self._request.path)
        for index, (_, batch) in enumerate(self._bases):
            taken: list[Placement] = []
            for placement in choices:
                if any(moved_further(placement, other) for other in taken):
                    continue
                key = (index, placement)
                if key not in self._placed:
                    self._placed[key] = self._place(index, placement)
                plan, needed = self._placed[key]
                self._num_plans += 1
                lacking = list(overflows(needed, self._request, limit))
                if not lacking:
                    taken.append(placement)
                    if key not in self._known:
                        self._known[key] = self._family(plan, batch)
                    yield self._known[key]
                    continue
                excess = max(lack.times for lack in lacking)
                if self._smallest is None or excess < self._smallest[0]:
                    self._smallest = (excess, plan, batch)

    def _all_bases(self) -> Iterator[tuple[Plan, Batch]]:
        """Every partitioning with every setting of activations and division of the batch."""
        request = self._request
        for batch in request.cuts:
            accumulates = batch.accumulate > 1
            for partitioning in partitionings(self._topology, accumulates=accumulates):
                base = replace(
                    partitioning,
                    precision=request.precision,
                    separate_memory=request.cluster.device.is_accelerator,
                )
                for plan in self._kept_until(base, accumulates=accumulates):
                    for setting in activation_settings(request.cluster, request.path):
                        yield replace(plan, activations=setting), batch

    def _place(self, index: int, placement: Placement) -> tuple[Plan, Memory]:
        base, batch = self._bases[index]
        plan = placed(base, placement, self._request.path)
        if self._tile_numel:
            plan = replace(plan, tiling=replace(plan.tiling, numel=self._tile_numel))
        return plan, self._figures.memory(plan, batch)

    def _family(self, plan: Plan, batch: Batch) -> Family:
        busy = self._bound.busy(plan, batch)
        longest = max(busy)
        likely = longest + (1 - HIDDEN) * (sum(busy) - longest)
        return Family(plan, batch, longest, likely)

    def _kept_until(self, plan: Plan, *, accumulates: bool) -> list[Plan]:
        if accumulates and plan.keep != "none":
            return [plan, replace(plan, keep_until="step")]
        return [plan]

    def _members(self, family: Family) -> Iterator[Candidate]:
        """The wirings of a family, simulated on short models: raw hops, the leanest, the others.

        Where raw hops leave almost nothing exposed, fewer bytes gain nothing; where the leanest do
        not help, neither do those in between.
        """
        raw, *lossy = wirings(family.plan, self._topology, self._request.loss)
        first = self.candidate(raw, family.batch)
        yield first
        uses = ("gather", "reduce", "refresh")
        exposed = sum(first.estimate.exposed[use] for use in uses)
        if not lossy or exposed < NEAR * first.step_s:
            return
        leanest = self.candidate(lossy[-1], family.batch)
        yield leanest
        if leanest.step_s < (1 - NEAR) * first.step_s:
            # One state's wire at a time: its gain hardly depends on the others.
            for plan in lossy[:-1]:
                if sum(_wire(plan, state) != _wire(lossy[-1], state) for state in STATES) == 1:
                    yield self.candidate(plan, family.batch)

    def candidate(self, plan: Plan, batch: Batch) -> Candidate:
        return Candidate(plan, batch, self._figures.estimate(plan, batch))


def _wire(plan: Plan, state: str) -> str:
    wire: str = getattr(plan, state).wire
    return wire
