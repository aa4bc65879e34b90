"""The best plan for a model on a cluster: every legal plan is priced from below, few are simulated.

Every plan has a lower bound of its step time (nothing overlaps better than perfectly), so that the
search may end as soon as the bounds of all that are left are above the best that was found, less a
tolerance. The bound counts the bytes of the leanest wires and no codec, and takes the busiest
resource. Plans are looked at in the order of a guess: the bound, and a little of all other work.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from shardwise.core.cluster import Cluster
from shardwise.core.layout import DTYPE_BYTES, UnitSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.cost.engine import Stage
from shardwise.cost.price import Prices
from shardwise.cost.simulate import Estimate, simulate
from shardwise.plan.facts import Facts
from shardwise.plan.memory import Memory, with_activations
from shardwise.plan.plan import Plan, Precision, resolve
from shardwise.plan.presets import PRESETS
from shardwise.plan.schedule import Hop, Kind, Op, Phase, Trigger, unit_ops
from shardwise.plan.traffic import step_phases
from shardwise.planner.alike import SHORT, Alike
from shardwise.planner.space import (
    STATES,
    Batch,
    Loss,
    Placement,
    activation_settings,
    batches,
    leanest,
    moved_further,
    partitionings,
    placed,
    placements,
    wirings,
)

ROOT = "root"
Seconds = defaultdict[str, float]
"""By resource."""
RANKED = 10
"""Alternatives that are run in full and reported."""
LEAST_FULL = 3
"""So many are run in full where only the best is asked for: short models are not exact."""
TOLERANCE = 0.02
"""No family that was not looked at is faster than the winner by more than this share of a step."""
PATIENCE = 24
"""So many families without anything better end the walk as well; then nothing is proven."""
HIDDEN = 0.85
"""The share of all but the busiest resource's work that is taken to be hidden, for the order in
which families are looked at; nothing else depends on it."""
NEAR = 0.01
"""Plans whose steps differ by less are taken to be equally fast: then what loses nothing wins, and
what needs less memory."""
TILE_NUMEL = 1 << 26
"""Tiles of layers, where nothing fits without; see ``presets.infinity``."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be trained, and where."""

    facts: Facts
    cluster: Cluster
    global_batch: int
    seq: int
    precision: Precision = field(default_factory=Precision)
    loss: Loss = Loss.SAFE
    path: str = ""
    """A folder on the disk; without one nothing is put there."""
    memory_bytes: int | None = None
    """Of one rank's device; None: what the cluster says."""
    batch: Batch | None = None
    """How the global batch is cut, where that is settled."""

    @property
    def cuts(self) -> list[Batch]:
        """The ways to cut the global batch."""
        every = batches(self.global_batch, self.cluster.world)
        return every if self.batch is None else [self.batch]

    @property
    def limit(self) -> int:
        given = self.memory_bytes
        return given if given is not None else self.cluster.device.memory_bytes


@dataclass(frozen=True)
class Candidate:
    """A plan with the batch that it goes with, and what a step of it takes."""

    plan: Plan
    batch: Batch
    estimate: Estimate

    @property
    def step_s(self) -> float:
        return self.estimate.step_s

    def fits(self, request: Request) -> bool:
        return not list(overflows(self.estimate.memory, request))


@dataclass(frozen=True)
class Result:
    """What a search found."""

    ranked: tuple[Candidate, ...]
    """The fastest plan of every partitioning that came near, best first; empty: nothing fits."""
    smallest: Candidate | None
    """Where nothing fits: what needs least."""
    num_plans: int
    """How many plans there were to choose from."""
    num_simulated: int
    proven: bool
    """Whether no family that was not looked at can be faster than the best by more than TOLERANCE.
    Of families that were, only the likely wirings were simulated."""

    @property
    def best(self) -> Candidate | None:
        return self.ranked[0] if self.ranked else None


@dataclass(frozen=True, order=True)
class Overflow:
    """A tier that has too little."""

    tier: str
    needed: int
    available: int


def overflows(needed: Memory, request: Request, limit: int | None = None) -> Iterator[Overflow]:
    """The tiers of one rank that are too small for what is needed."""
    cluster = request.cluster
    share = cluster.ranks_per_node
    device = request.limit if limit is None else limit
    if needed.total > device:
        yield Overflow("device", needed.total, device)
    if cluster.host is not None and needed.cpu > cluster.host.memory_bytes // share:
        yield Overflow("cpu", needed.cpu, cluster.host.memory_bytes // share)
    if needed.nvme and cluster.disk is not None and needed.nvme > cluster.disk.size_bytes // share:
        yield Overflow("nvme", needed.nvme, cluster.disk.size_bytes // share)


def search(
    request: Request, *, count: int = RANKED, progress: Callable[[int], None] = lambda _: None
) -> Result:
    """The fastest plans that fit."""
    return Search(request, progress).run(count)


class Search:
    """A search that remembers what it priced: other memory limits cost little more."""

    def __init__(self, request: Request, progress: Callable[[int], None] = lambda _: None) -> None:
        self._request = request
        self._whole = _Space(request, tile_numel=0, progress=progress)
        self._tiled = _Space(request, tile_numel=TILE_NUMEL, progress=progress)

    def with_other_speeds(self, cluster: Cluster) -> "Search":
        """The same search on a cluster that differs in speeds only."""
        other = Search(replace(self._request, cluster=cluster))
        other._whole.take_sizes(self._whole)
        other._tiled.take_sizes(self._tiled)
        return other

    def run(self, count: int = RANKED, *, limit: int | None = None, tiles: bool = True) -> Result:
        """The fastest plans that fit a device's memory; layers in tiles only where nothing does."""
        within = self._request.limit if limit is None else limit
        result = self._whole.run(count, within)
        if result.best is None and tiles:
            tiled = self._tiled.run(count, within)
            if tiled.best is not None or _need(tiled) < _need(result):
                return tiled
        return result


def evaluate(request: Request, plan: Plan, batch: Batch) -> Candidate:
    """One plan, run in full, whether it fits or not."""
    topology = request.cluster.topology
    work = request.facts.work(batch.micro, request.seq, plan, topology)
    estimate = simulate(
        plan,
        request.facts.spec(plan, topology),
        work,
        request.cluster,
        accumulate=batch.accumulate,
    )
    return Candidate(plan, batch, estimate)


def _need(result: Result) -> int:
    return result.smallest.estimate.memory.total if result.smallest else 1 << 62


@dataclass(frozen=True)
class _Family:
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


class _Space:
    """All plans with layers as they are, or with layers in tiles."""

    def __init__(
        self, request: Request, *, tile_numel: int, progress: Callable[[int], None]
    ) -> None:
        self._request, self._progress = request, progress
        self._topology: Topology = request.cluster.topology
        self._prices = Prices(request.cluster)
        self._tile_numel = tile_numel
        self._works: dict[tuple[int, str, bool], Work] = {}
        self._alike: dict[bool, Alike] = {}
        self._links: dict[tuple[Plan, Phase], Seconds] = {}
        self._memories: dict[tuple[Plan, bool], Memory] = {}
        self._leanest: dict[Plan, Plan] = {}
        self._exposed: dict[Plan, float] = {}
        self._num_plans = 0
        self._estimates: dict[tuple[Plan, Batch], Estimate] = {}
        self._smallest: tuple[int, Plan, Batch] | None = None

    def take_sizes(self, other: "_Space") -> None:
        """Shares with another space what does not depend on speeds."""
        self._works, self._alike = other._works, other._alike
        self._memories, self._leanest = other._memories, other._leanest

    def run(self, count: int, limit: int) -> Result:
        """Families, the likeliest first, until none can be better; then those beside the best."""
        self._num_plans = 0
        families = _presets_first(sorted(self._families(limit), key=lambda f: f.likely_s))
        # What the families from each on could reach at best.
        bounds = list(accumulate((family.bound_s for family in reversed(families)), min))[::-1]
        seen = _Seen()
        for family, bound in zip(families, bounds, strict=True):
            # Behind the winner the table shows what was met on the way.
            ended = bound >= (1 - TOLERANCE) * seen.fastest or seen.idle >= PATIENCE
            if ended and (len(seen.best) >= count or bound > 2 * seen.fastest):
                break
            self._look(family, seen)
        while (beside := next(filter(seen.is_beside, families), None)) is not None:
            self._look(beside, seen)
        left_s = min((f.bound_s for f in families if id(f) not in seen.ids), default=math.inf)
        found = sorted(seen.best.values(), key=lambda candidate: candidate.step_s)
        found = found[: max(count, LEAST_FULL)]
        full = rank([evaluate(self._request, c.plan, c.batch) for c in found])[:count]
        # Of the full run: the order came from short models, which are not exact.
        proven = not full or left_s >= (1 - TOLERANCE) * full[0].step_s
        smallest = None
        if not full and self._smallest is not None:
            smallest = evaluate(self._request, *self._smallest[1:])
        return Result(tuple(full), smallest, self._num_plans, len(self._estimates), proven)

    def _look(self, family: _Family, seen: "_Seen") -> None:
        """Simulates a family."""
        seen.add(family, self._members(family))
        self._progress(len(self._estimates))

    # --- families -----------------------------------------------------------------------------

    def _families(self, limit: int) -> Iterator[_Family]:
        request = self._request
        choices = placements(request.cluster, request.path)
        for batch in request.cuts:
            accumulates = batch.accumulate > 1
            for partitioning in partitionings(self._topology, accumulates=accumulates):
                base = replace(partitioning, precision=request.precision)
                for plan in self._kept_until(base, accumulates=accumulates):
                    for setting in activation_settings(request.cluster, request.path):
                        chosen = replace(plan, activations=setting)
                        for fitting in self._fitting(chosen, batch, choices, limit):
                            busy = self._busy(fitting, batch)
                            longest = max(busy)
                            likely = longest + (1 - HIDDEN) * (sum(busy) - longest)
                            yield _Family(fitting, batch, longest, likely)

    def _kept_until(self, plan: Plan, *, accumulates: bool) -> list[Plan]:
        if accumulates and plan.keep != "none":
            return [plan, replace(plan, keep_until="step")]
        return [plan]

    def _fitting(
        self, plan: Plan, batch: Batch, choices: Sequence[Placement], limit: int
    ) -> Iterator[Plan]:
        """The placements that fit, but none that moves more than another one that fits."""
        taken: list[Placement] = []
        for placement in choices:
            if any(moved_further(placement, other) for other in taken):
                continue
            candidate = placed(plan, placement, self._request.path)
            if self._tile_numel:
                tiling = replace(candidate.tiling, numel=self._tile_numel)
                candidate = replace(candidate, tiling=tiling)
            needed = self._memory(candidate, batch)
            if not any(overflows(needed, self._request, limit)):
                taken.append(placement)
                yield candidate
            elif self._smallest is None or needed.total < self._smallest[0]:
                self._smallest = (needed.total, candidate, batch)

    def _members(self, family: _Family) -> Iterator[Candidate]:
        """The wirings of a family, simulated on short models: raw hops, the leanest, the others.

        Where raw hops leave next to nothing exposed, fewer bytes have nothing to gain; where the
        leanest do not help, neither do those between.
        """
        raw, *lossy = wirings(family.plan, self._topology, self._request.loss)
        first = self._candidate(raw, family.batch)
        yield first
        uses = ("gather", "reduce", "refresh")
        exposed = sum(first.estimate.exposed[use] for use in uses)
        if not lossy or exposed < NEAR * first.step_s:
            return
        leanest = self._candidate(lossy[-1], family.batch)
        yield leanest
        if leanest.step_s < (1 - NEAR) * first.step_s:
            # One state's wire at a time: what one gains hardly depends on the others.
            for plan in lossy[:-1]:
                if sum(_wire(plan, state) != _wire(lossy[-1], state) for state in STATES) == 1:
                    yield self._candidate(plan, family.batch)

    def _candidate(self, plan: Plan, batch: Batch) -> Candidate:
        return Candidate(plan, batch, self._estimate(plan, batch))

    # --- facts --------------------------------------------------------------------------------

    def _memory(self, plan: Plan, batch: Batch) -> Memory:
        """What a plan needs; activations are added to what does not depend on the batch."""
        accumulates = batch.accumulate > 1
        key = (_without_activations(plan), accumulates)
        found = self._memories.get(key)
        if found is None:
            found = self._memories[key] = self._model(plan).memory(
                plan, self._topology, accumulates=accumulates, saved=None
            )
        self._num_plans += 1
        return with_activations(found, self._work(plan, batch).saved, plan.activations)

    def _estimate(self, plan: Plan, batch: Batch) -> Estimate:
        found = self._estimates.get((plan, batch))
        if found is None:
            found = self._estimates[plan, batch] = self._model(plan).estimate(
                plan,
                self._work(plan, batch),
                self._request.cluster,
                accumulate=batch.accumulate,
                length=SHORT,  # good enough for an order; the best are run in full
            )
        return found

    def _work(self, plan: Plan, batch: Batch) -> Work:
        key = (batch.micro, plan.precision.compute or "", self._tiles(plan))
        if key not in self._works:
            self._works[key] = self._request.facts.work(
                batch.micro, self._request.seq, plan, self._topology
            )
        return self._works[key]

    def _model(self, plan: Plan) -> Alike:
        """The model's units."""
        tiled = self._tiles(plan)
        if tiled not in self._alike:
            self._alike[tiled] = Alike(self._request.facts.spec(plan, self._topology))
        return self._alike[tiled]

    def _tiles(self, plan: Plan) -> bool:
        """Whether layers are cut: tiles only exist where parameters travel."""
        rungs = resolve(plan, self._topology, "")
        return bool(plan.tiling.numel) and (rungs.params > 0 or plan.params.tier != "device")

    # --- the bound ----------------------------------------------------------------------------

    def _busy(self, plan: Plan, batch: Batch) -> list[float]:
        """Seconds of each resource; no step of any wiring of a plan is shorter than the longest."""
        work = self._work(plan, batch)
        busy: Seconds = defaultdict(float)
        for phase, times in step_phases(batch.accumulate).items():
            for resource, seconds in self._transfers(plan, phase).items():
                busy[resource] += times * seconds
        forwards = 1 if plan.activations == "keep" else 2
        alone = self._update(plan) + self._ends(plan)
        busy["compute"] = alone + batch.accumulate * (
            self._collecting(plan)
            + sum(
                times
                * (
                    forwards * self._prices.compute(work.dtype, flops, backward=False).seconds
                    + self._prices.compute(work.dtype, 2 * flops, backward=True).seconds
                )
                for flops, times in Counter(
                    flops for name, flops in work.forward_flops.items() if name != ROOT
                ).items()
            )
        )
        return list(busy.values())

    def _update(self, plan: Plan) -> float:
        """Seconds of the optimizer's own work where its states are on the device."""
        if plan.optim.tier != "device":
            return 0.0
        parts = self._topology.factor(plan.optim.spread)
        return self._prices.update(self._request.facts.numel // parts, "device").seconds

    def _collecting(self, plan: Plan) -> float:
        """Seconds in which a pass brings its gradients together."""
        word = DTYPE_BYTES[plan.precision.reduce_dtype("float32")]
        return self._prices.copy(self._request.facts.numel * word).seconds

    def _ends(self, plan: Plan) -> float:
        """Seconds that nothing can hide: the first gather, and the last unit's reduction."""
        key = _without_activations(plan)
        if key not in self._exposed:
            self._exposed[key] = self._first_and_last(plan)
        return self._exposed[key]

    def _first_and_last(self, plan: Plan) -> float:
        lean = self._lean(plan)
        units = self._model(plan).model.units
        first = units[min(1, len(units) - 1)]
        rungs = resolve(lean, self._topology, first.name)
        ops = unit_ops(first, rungs, lean, Phase.ONLY, encloses=first.name == ROOT)
        exposed = (*ops[Trigger.BEFORE_FORWARD], *ops[Trigger.GRADS_READY])
        return sum(self._hop_seconds(op, hop) for op in exposed for hop in op.hops)

    def _lean(self, plan: Plan) -> Plan:
        key = _without_activations(plan)
        if key not in self._leanest:
            self._leanest[key] = leanest(plan, self._topology, self._request.loss)
        return self._leanest[key]

    def _hop_seconds(self, op: Op, hop: Hop) -> float:
        """A hop with nothing encoded or summed."""
        direct = op.kind is Kind.REDUCE and hop.format is not None
        return self._prices.hop("", hop, reduces=False, direct=direct).seconds

    def _transfers(self, plan: Plan, phase: Phase) -> Seconds:
        """Seconds on each link and tier in one pass, for the leanest wires and nothing encoded."""
        key = (_without_activations(plan), phase)
        if key not in self._links:
            lean = self._lean(plan)
            total: Seconds = defaultdict(float)
            for unit, times in _classes(self._model(plan)):
                for resource, seconds in self._unit_transfers(lean, unit, phase).items():
                    total[resource] += times * seconds
            self._links[key] = total
        return self._links[key]

    def _unit_transfers(self, plan: Plan, unit: UnitSpec, phase: Phase) -> Seconds:
        seconds: Seconds = defaultdict(float)
        rungs = resolve(plan, self._topology, unit.name)
        ops = unit_ops(unit, rungs, plan, phase, encloses=unit.name == ROOT)
        for op in (op for some in ops.values() for op in some):
            for hop in op.hops:
                seconds[f"link {hop.level}"] += self._hop_seconds(op, hop)
            for stage in self._moves(plan, op):
                for resource, _ in stage.needs:
                    seconds[resource] += stage.seconds
        return seconds

    def _moves(self, plan: Plan, op: Op) -> Iterator[Stage]:
        """Bytes to and from tiers, as the simulator moves them."""
        if not op.moved_bytes:
            return
        if op.kind is Kind.STEP:
            tier = plan.moving_tier or "device"
            read = written = op.moved_bytes / 2
        else:
            tier = plan.grads.tier if op.kind is Kind.STORE else plan.params.tier
            read = op.moved_bytes if op.kind is Kind.FETCH else 0
            written = op.moved_bytes - read
        if tier != "device":
            yield self._prices.move(tier, read, writes=False)
            yield self._prices.move(tier, written, writes=True)


class _Seen:
    """The families that were looked at."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.best: dict[tuple[str, ...], Candidate] = {}
        """Of each partitioning."""
        self.fastest = math.inf
        self.idle = 0
        """Families since the last one that was faster."""
        self._centre: _Family | None = None

    def add(self, family: _Family, members: Iterator[Candidate]) -> None:
        self.ids.add(id(family))
        self.idle += 1
        for candidate in members:
            key, best = _partitioning(candidate.plan), self.best
            best[key] = rank([candidate, best[key]])[0] if key in best else candidate
            if candidate.step_s < (1 - NEAR) * self.fastest:
                self.idle = 0
            if candidate.step_s < self.fastest:
                self.fastest, self._centre = candidate.step_s, family

    def is_beside(self, family: _Family) -> bool:
        """Whether it differs from the fastest in one choice, could be faster, and is new."""
        if id(family) in self.ids or family.bound_s >= (1 - TOLERANCE) * self.fastest:
            return False
        assert self._centre is not None
        pairs = zip(family.choices, self._centre.choices, strict=True)
        return sum(mine != its for mine, its in pairs) == 1


def _presets_first(families: list[_Family]) -> list[_Family]:
    """The likeliest family of each preset's spreads leads, so that no search overlooks it."""
    known = {_spreads(make()) for make in PRESETS.values()}
    first: dict[tuple[str, ...], _Family] = {}
    for family in families:
        if (spreads := _spreads(family.plan)) in known:
            first.setdefault(spreads, family)
    leading = {id(family) for family in first.values()}
    return [*first.values(), *(family for family in families if id(family) not in leading)]


def _spreads(plan: Plan) -> tuple[str, ...]:
    return (plan.params.spread, plan.grads.spread, plan.optim.spread, plan.keep)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first: by time, and among equally fast ones by what is lost, then by memory."""
    left = sorted(candidates, key=lambda candidate: candidate.step_s)
    ranked = []
    while left:
        near = [c for c in left if c.step_s <= (1 + NEAR) * left[0].step_s]
        chosen = min(near, key=lambda c: (c.plan.is_lossy(), c.estimate.memory.total, c.step_s))
        left.remove(chosen)
        ranked.append(chosen)
    return ranked


def _without_activations(plan: Plan) -> Plan:
    """What is left of a plan for figures that do not depend on activations."""
    return replace(plan, activations="keep")


def _wire(plan: Plan, state: str) -> str:
    wire: str = getattr(plan, state).wire
    return wire


def _classes(alike: Alike) -> list[tuple[UnitSpec, int]]:
    """Units with how many there are of each, alike ones together."""
    begin, count = alike.run
    units = alike.model.units
    rest = [*units[:begin], *units[begin + count :]]
    return [(units[begin], count), *((unit, 1) for unit in rest)]


def _partitioning(plan: Plan) -> tuple[str, ...]:
    return (
        plan.params.spread,
        plan.optim.spread,
        plan.keep,
        plan.params.tier,
        plan.grads.tier,
        plan.optim.tier,
    )
