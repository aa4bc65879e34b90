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
from shardwise.core.layout import DTYPE_BYTES, FlatSpec, UnitSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.cost.engine import Stage
from shardwise.cost.price import Prices
from shardwise.cost.simulate import Estimate, backward_times, simulate
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
from shardwise.plans.facts import Facts
from shardwise.plans.memory import Memory, with_activations
from shardwise.plans.plan import Plan, Precision, resolve, untiled
from shardwise.plans.presets import PRESETS
from shardwise.plans.schedule import Hop, Kind, Op, Phase, Trigger, trained_flats, unit_ops
from shardwise.plans.traffic import step_phases

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
LEADERS = 6
"""Families that a search in other circumstances looks at first."""
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
    """Where nothing fits: what comes nearest, on the tier that it overflows most."""
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

    @property
    def times(self) -> float:
        """How many times too large."""
        return self.needed / max(1, self.available)


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


def lacks(request: Request, result: Result) -> str:
    """Where nothing fits: on which tiers the nearest plan is too large, as a clause."""
    smallest = result.smallest
    found = overflows(smallest.estimate.memory, request) if smallest else ()
    told = [
        f"the nearest one needs {lack.needed:,} bytes a rank on tier {lack.tier}, which has "
        f"{lack.available:,}"
        for lack in found
    ]
    return "; ".join(told) or "none can be priced"


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
        """The same search on a cluster that differs in speeds only: the best there lead here."""
        other = Search(replace(self._request, cluster=cluster))
        other._whole.follow(self._whole)
        other._tiled.follow(self._tiled)
        return other

    def quickly(self, plan: Plan, batch: Batch) -> Candidate:
        """One plan on a short model, as the search looks at it."""
        space = self._tiled if plan.tiling.numel else self._whole
        return space.candidate(plan, batch)

    def fits(self) -> bool:
        """Whether anything does; nothing is simulated."""
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
        """The fastest plans that fit a device's memory; layers in tiles only where nothing does.

        With less ``patience`` fewer families are looked at beside those that led before.
        """
        within = self._request.limit if limit is None else limit
        result = self._whole.run(count, within, patience)
        if result.best is None and tiles:
            tiled = self._tiled.run(count, within, patience)
            if tiled.best is not None or self._excess(tiled, within) < self._excess(result, within):
                return tiled
        return result

    def _excess(self, result: Result, limit: int) -> float:
        """How many times too large the nearest is of what does not fit."""
        if result.smallest is None:
            return math.inf
        lacking = overflows(result.smallest.estimate.memory, self._request, limit)
        return max((lack.times for lack in lacking), default=0.0)


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
        self._backwards: dict[bool, dict[str, float]] = {}
        self._links: dict[tuple[Plan, Phase], Seconds] = {}
        self._memories: dict[tuple[Plan, bool], Memory] = {}
        self._leanest: dict[Plan, Plan] = {}
        self._exposed: dict[Plan, float] = {}
        self._bases: list[tuple[Plan, Batch]] = []
        self._placed: dict[tuple[int, Placement], tuple[Plan, Memory]] = {}
        """By the index of a base: it with its states on tiers, and what that needs."""
        self._known: dict[tuple[int, Placement], _Family] = {}
        self._leaders: list[tuple[Plan, Batch]] = []
        """What was best in the last run, here or in a space that this one follows."""
        self._num_plans = 0
        self._estimates: dict[tuple[Plan, Batch], Estimate] = {}
        self._smallest: tuple[float, Plan, Batch] | None = None
        """What comes nearest to fitting: how many times too large it is, and for which batch."""

    def follow(self, other: "_Space") -> None:
        """Shares with another space what does not depend on speeds, and looks first where it
        found most."""
        self._works, self._alike = other._works, other._alike
        self._backwards = other._backwards
        self._memories, self._leanest = other._memories, other._leanest
        self._bases, self._placed = other._bases, other._placed
        self._leaders = other._leaders

    def run(self, count: int, limit: int, patience: int) -> Result:
        """Families, the likeliest first, until none can be better; then those beside the best."""
        self._num_plans, self._smallest = 0, None
        families = sorted(self._families(limit), key=lambda f: f.likely_s)
        families = self._leading(_presets_first(families))
        # What the families from each on could reach at best.
        bounds = list(accumulate((family.bound_s for family in reversed(families)), min))[::-1]
        seen = _Seen()
        for family, bound in zip(families, bounds, strict=True):
            # Behind the winner the table shows what was met on the way.
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
        # Of the full run: the order came from short models, which are not exact.
        proven = not full or left_s >= (1 - TOLERANCE) * full[0].step_s
        smallest = None
        if not full and self._smallest is not None:
            smallest = evaluate(self._request, *self._smallest[1:])
        return Result(tuple(full), smallest, self._num_plans, len(self._estimates), proven)

    def fits(self, limit: int) -> bool:
        return next(self._families(limit), None) is not None

    def _leading(self, families: list[_Family]) -> list[_Family]:
        """Those that led before come first, then those that were simulated: they are free."""
        leaders = set(self._leaders)

        def rank(family: _Family) -> int:
            key = (family.plan, family.batch)
            return 0 if key in leaders else 1 if key in self._estimates else 2

        return sorted(families, key=rank)

    def _look(self, family: _Family, seen: "_Seen", limit: int) -> None:
        """Simulates a family; wires take memory, so that some of it may not fit."""
        fitting = (
            candidate
            for candidate in self._members(family)
            if not any(overflows(candidate.estimate.memory, self._request, limit))
        )
        known = len(self._estimates)
        is_faster = seen.add(family, fitting)
        # What was simulated before costs no patience.
        seen.idle = 0 if is_faster else seen.idle + (len(self._estimates) > known)
        self._progress(len(self._estimates))

    # --- families -----------------------------------------------------------------------------

    def _families(self, limit: int) -> Iterator[_Family]:
        """Those that fit. Of a partitioning none that moves more than another one that does."""
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
        """Every partitioning with every setting of activations and cut of the batch."""
        request = self._request
        for batch in request.cuts:
            accumulates = batch.accumulate > 1
            for partitioning in partitionings(self._topology, accumulates=accumulates):
                base = replace(partitioning, precision=request.precision)
                for plan in self._kept_until(base, accumulates=accumulates):
                    for setting in activation_settings(request.cluster, request.path):
                        yield replace(plan, activations=setting), batch

    def _place(self, index: int, placement: Placement) -> tuple[Plan, Memory]:
        base, batch = self._bases[index]
        plan = placed(base, placement, self._request.path)
        if self._tile_numel:
            plan = replace(plan, tiling=replace(plan.tiling, numel=self._tile_numel))
        return plan, self._memory(plan, batch)

    def _family(self, plan: Plan, batch: Batch) -> _Family:
        busy = self._busy(plan, batch)
        longest = max(busy)
        likely = longest + (1 - HIDDEN) * (sum(busy) - longest)
        return _Family(plan, batch, longest, likely)

    def _kept_until(self, plan: Plan, *, accumulates: bool) -> list[Plan]:
        if accumulates and plan.keep != "none":
            return [plan, replace(plan, keep_until="step")]
        return [plan]

    def _members(self, family: _Family) -> Iterator[Candidate]:
        """The wirings of a family, simulated on short models: raw hops, the leanest, the others.

        Where raw hops leave next to nothing exposed, fewer bytes have nothing to gain; where the
        leanest do not help, neither do those between.
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
            # One state's wire at a time: what one gains hardly depends on the others.
            for plan in lossy[:-1]:
                if sum(_wire(plan, state) != _wire(lossy[-1], state) for state in STATES) == 1:
                    yield self.candidate(plan, family.batch)

    def candidate(self, plan: Plan, batch: Batch) -> Candidate:
        return Candidate(plan, batch, self._estimate(plan, batch))

    # --- facts --------------------------------------------------------------------------------

    def _memory(self, plan: Plan, batch: Batch) -> Memory:
        """What a plan needs; activations are added to what does not depend on the batch."""
        accumulates = batch.accumulate > 1
        key = (_without_activations(plan), accumulates)
        found = self._memories.get(key)
        if found is None:
            found = self._memories[key] = self._model(plan).memory(
                plan, self._request.cluster, accumulates=accumulates, saved=None
            )
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
        if not plan.tiling.numel:
            return False
        return resolve(plan, self._topology, "").params > 0 or plan.params.tier != "device"

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
                times * self._compute(work.dtype, flops, backward, forwards)
                for (flops, backward), times in Counter(
                    (flops, self._backward(plan)[name])
                    for name, flops in work.forward_flops.items()
                    if name != ROOT
                ).items()
            )
        )
        return list(busy.values())

    def _compute(self, dtype: str, flops: float, backward: float, forwards: int) -> float:
        """Seconds of a unit's passes; a forward is repeated only where backward comes."""
        forward_s = self._prices.compute(dtype, flops, backward=False).seconds
        if not backward:
            return forward_s
        backward_s = self._prices.compute(dtype, backward * flops, backward=True).seconds
        return forwards * forward_s + backward_s

    def _backward(self, plan: Plan) -> dict[str, float]:
        """Of each unit, without tiles: operations of its backward over those of its forward."""
        tiled = self._tiles(plan)
        if tiled not in self._backwards:
            found: dict[str, float] = {}
            for name, times in backward_times(self._model(plan).model).items():
                found[untiled(name)] = min(times, found.get(untiled(name), times))
            self._backwards[tiled] = found
        return self._backwards[tiled]

    def _update(self, plan: Plan) -> float:
        """Seconds of the optimizer's own work where its states are on the device."""
        if plan.optim.tier != "device":
            return 0.0
        parts = self._topology.factor(plan.optim.spread)
        numel = sum(
            times * (flat.numel // parts)
            for unit, times in _classes(self._model(plan))
            for flat in trained_flats(unit)
        )
        return self._prices.update(numel, "device").seconds  # all at once, as in a step

    def _collecting(self, plan: Plan) -> float:
        """Seconds in which a pass brings its gradients together."""
        dtype_of = plan.precision.reduce_dtype
        return self._of_trained(
            plan,
            lambda flat: self._prices.copy(flat.numel * DTYPE_BYTES[dtype_of(flat.dtype)]).seconds,
        )

    def _of_trained(self, plan: Plan, price: Callable[[FlatSpec], float]) -> float:
        """The sum over what is trained: at least the time of one call for all of a unit's flats."""
        return sum(
            times * max((price(flat) for flat in trained_flats(unit)), default=0.0)
            for unit, times in _classes(self._model(plan))
        )

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
        gathers, reduces = (
            [[self._hop_seconds(op, hop) for hop in op.hops] for op in ops[trigger] if op.hops]
            for trigger in (Trigger.BEFORE_FORWARD, Trigger.GRADS_READY)
        )
        # Hops of a reduction may overlap, chunk by chunk.
        return sum(map(sum, gathers)) + sum(map(max, reduces))

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
        if not self._backward(plan)[untiled(unit.name)]:
            del ops[Trigger.BEFORE_BACKWARD]
        for op in (op for some in ops.values() for op in some):
            for hop in op.hops:
                seconds[f"link {hop.level}"] += self._hop_seconds(op, hop)
            for stage in self._moves(plan, op):
                for resource, share in stage.needs:
                    seconds[resource] += share * stage.seconds
        return seconds

    def _moves(self, plan: Plan, op: Op) -> Iterator[Stage]:
        """Bytes to and from tiers, as the simulator moves them."""
        if not op.moved_bytes:
            return
        if op.kind is Kind.STEP:
            tier = plan.moving_tier or "device"
            written = op.written_bytes
            read = op.moved_bytes - written
        else:
            tier = plan.grads.tier if op.kind is Kind.STORE else plan.params.tier
            read = op.moved_bytes if op.kind is Kind.FETCH else 0
            written = op.moved_bytes - read
        if tier != "device":
            to_host = op.kind is Kind.STEP and plan.optim.tier != "device"
            yield self._prices.move(tier, read, writes=False, to_host=to_host)
            yield self._prices.move(tier, written, writes=True, to_host=to_host)


class _Seen:
    """The families that were looked at."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.best: dict[tuple[str, ...], Candidate] = {}
        """Of each partitioning."""
        self.fastest = math.inf
        self.idle = 0
        """Families that were simulated since the last one that was faster."""
        self._centre: _Family | None = None
        self._steps: list[tuple[float, Plan, Batch]] = []
        """The fastest of each family, in the order of looking."""

    def add(self, family: _Family, members: Iterator[Candidate]) -> bool:
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

    def is_beside(self, family: _Family) -> bool:
        """Whether it differs from the fastest in one choice, could be faster, and is new."""
        if self._centre is None or id(family) in self.ids:
            return False
        if family.bound_s >= (1 - TOLERANCE) * self.fastest:
            return False
        pairs = zip(family.choices, self._centre.choices, strict=True)
        return sum(mine != its for mine, its in pairs) == 1


def _presets_first(families: list[_Family]) -> list[_Family]:
    """The likeliest family of each preset's spreads leads, so that no search overlooks it.

    Without accumulation gradients never rest, and only one of their spreads is in the space.
    """
    known = [make() for make in PRESETS.values()]
    resting = {_spreads(plan, rests=True) for plan in known}
    passing = {_spreads(plan, rests=False) for plan in known}
    first: dict[tuple[str, ...], _Family] = {}
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
