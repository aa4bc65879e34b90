"""The best plan for a model on a cluster: every legal plan is priced from below, few are simulated.

Plans are looked at in the order of a lower bound of their step time (nothing overlaps better than
perfectly), so that the search may end as soon as the bound of the next one is above the best that
was found, less a tolerance. The bound counts the bytes of the leanest wires and no codec, and takes
the busiest resource.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwise.core.cluster import Cluster
from shardwise.core.layout import DTYPE_BYTES, UnitSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.cost.price import Prices
from shardwise.cost.simulate import Estimate, simulate
from shardwise.plan.facts import Facts
from shardwise.plan.memory import Memory
from shardwise.plan.plan import Plan, Precision, resolve
from shardwise.plan.schedule import Hop, Kind, Op, Phase, Trigger, unit_ops
from shardwise.plan.traffic import step_phases
from shardwise.planner.alike import Alike
from shardwise.planner.space import (
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
TOLERANCE = 0.02
"""No plan that was not looked at is faster than the winner by more than this share of its step."""
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

    @property
    def best(self) -> Candidate | None:
        return self.ranked[0] if self.ranked else None


@dataclass(frozen=True, order=True)
class Overflow:
    """A tier that has too little."""

    tier: str
    needed: int
    available: int


def overflows(needed: Memory, request: Request) -> Iterator[Overflow]:
    """The tiers of one rank that are too small for what is needed."""
    cluster = request.cluster
    share = cluster.ranks_per_node
    if needed.total > request.limit:
        yield Overflow("device", needed.total, request.limit)
    if cluster.host is not None and needed.cpu > cluster.host.memory_bytes // share:
        yield Overflow("cpu", needed.cpu, cluster.host.memory_bytes // share)
    if needed.nvme and cluster.disk is not None and needed.nvme > cluster.disk.size_bytes // share:
        yield Overflow("nvme", needed.nvme, cluster.disk.size_bytes // share)


def search(
    request: Request, *, count: int = RANKED, progress: Callable[[int], None] = lambda _: None
) -> Result:
    """The fastest plans that fit."""
    result = _Search(request, tile_numel=0, progress=progress).run(count)
    if result.best is None:
        tiled = _Search(request, tile_numel=TILE_NUMEL, progress=progress).run(count)
        if tiled.best is not None or _need(tiled) < _need(result):
            return tiled
    return result


def evaluate(request: Request, plan: Plan, batch: Batch, *, flat: bool = False) -> Candidate:
    """One plan, run in full, whether it fits or not."""
    topology = request.cluster.topology
    work = request.facts.work(batch.micro, request.seq, plan, topology)
    estimate = simulate(
        plan,
        request.facts.spec(plan, topology),
        work,
        request.cluster,
        accumulate=batch.accumulate,
        flat=flat,
    )
    return Candidate(plan, batch, estimate)


def _need(result: Result) -> int:
    return result.smallest.estimate.memory.total if result.smallest else 1 << 62


@dataclass(frozen=True)
class _Family:
    """Plans that differ in wires only."""

    plan: Plan
    batch: Batch


class _Search:
    def __init__(
        self, request: Request, *, tile_numel: int, progress: Callable[[int], None]
    ) -> None:
        self._request, self._progress = request, progress
        self._topology: Topology = request.cluster.topology
        self._prices = Prices(request.cluster)
        self._tile_numel = tile_numel
        self._works: dict[tuple[int, str], Work] = {}
        self._alike: dict[bool, Alike] = {}
        self._links: dict[tuple[Plan, Phase], Seconds] = {}
        self._smallest: tuple[int, Plan, Batch] | None = None
        self._num_plans = self._num_simulated = 0

    def run(self, count: int) -> Result:
        """Families in the order of their bounds, until none can be better."""
        heap: list[tuple[float, int, _Family]] = []
        for index, (bound, family) in enumerate(self._families()):
            heap.append((bound, index, family))
        heapq.heapify(heap)
        best: dict[tuple[str, ...], Candidate] = {}
        while heap:
            bound, _, family = heapq.heappop(heap)
            ranked = sorted(candidate.step_s for candidate in best.values())
            # The winner is proven; of those behind it the table shows what was met on the way.
            proven = ranked and bound >= (1 - TOLERANCE) * ranked[0]
            if proven and (len(ranked) >= count or bound > 2 * ranked[0]):
                break
            for candidate in self._members(family):
                key = _partitioning(candidate.plan)
                if key not in best or candidate.step_s < best[key].step_s:
                    best[key] = candidate
            self._progress(self._num_simulated)
        found = sorted(best.values(), key=lambda candidate: candidate.step_s)[:count]
        full = [evaluate(self._request, c.plan, c.batch) for c in found]
        smallest = None
        if not full and self._smallest is not None:
            smallest = evaluate(self._request, *self._smallest[1:])
        return Result(tuple(rank(full)), smallest, self._num_plans, self._num_simulated)

    # --- families -----------------------------------------------------------------------------

    def _families(self) -> Iterator[tuple[float, _Family]]:
        request = self._request
        choices = placements(request.cluster, request.path)
        for batch in batches(request.global_batch, self._topology.world):
            accumulates = batch.accumulate > 1
            for partitioning in partitionings(self._topology, accumulates=accumulates):
                base = replace(partitioning, precision=request.precision)
                for plan in self._kept_until(base, accumulates=accumulates):
                    for setting in activation_settings(request.cluster, request.path):
                        chosen = replace(plan, activations=setting)
                        for fitting in self._fitting(chosen, batch, choices):
                            yield self._bound(fitting, batch), _Family(fitting, batch)

    def _kept_until(self, plan: Plan, *, accumulates: bool) -> list[Plan]:
        if accumulates and plan.keep != "none":
            return [plan, replace(plan, keep_until="step")]
        return [plan]

    def _fitting(self, plan: Plan, batch: Batch, choices: Sequence[Placement]) -> Iterator[Plan]:
        """The placements that fit, but none that moves more than another one that fits."""
        work = self._work(plan, batch)
        taken: list[Placement] = []
        for placement in choices:
            if any(moved_further(placement, other) for other in taken):
                continue
            candidate = placed(plan, placement, self._request.path)
            if self._tile_numel:
                tiling = replace(candidate.tiling, numel=self._tile_numel)
                candidate = replace(candidate, tiling=tiling)
            needed = self._model(candidate).memory(
                candidate,
                self._topology,
                accumulates=batch.accumulate > 1,
                activations=work.saved.held(plan.activations),
            )
            self._num_plans += 1
            if not any(overflows(needed, self._request)):
                taken.append(placement)
                yield candidate
            elif self._smallest is None or needed.total < self._smallest[0]:
                self._smallest = (needed.total, candidate, batch)

    def _members(self, family: _Family) -> Iterator[Candidate]:
        """Every wiring of a family, simulated on short models; raw hops first.

        Where these leave next to nothing exposed, fewer bytes have nothing to gain.
        """
        work = self._work(family.plan, family.batch)
        for plan in wirings(family.plan, self._topology, self._request.loss):
            self._num_simulated += 1
            estimate = self._model(plan).estimate(
                plan, work, self._request.cluster, accumulate=family.batch.accumulate
            )
            yield Candidate(plan, family.batch, estimate)
            exposed = sum(estimate.exposed[use] for use in ("gather", "reduce", "refresh"))
            if not plan.is_lossy() and exposed < NEAR * estimate.step_s:
                return

    # --- facts --------------------------------------------------------------------------------

    def _work(self, plan: Plan, batch: Batch) -> Work:
        key = (batch.micro, plan.precision.compute or "")
        if key not in self._works:
            self._works[key] = self._request.facts.work(
                batch.micro, self._request.seq, plan, self._topology
            )
        return self._works[key]

    def _model(self, plan: Plan) -> Alike:
        """The model's units; tiles only exist where parameters travel."""
        rungs = resolve(plan, self._topology, "")
        tiled = bool(plan.tiling.numel) and (rungs.params > 0 or plan.params.tier != "device")
        if tiled not in self._alike:
            self._alike[tiled] = Alike(self._request.facts.spec(plan, self._topology))
        return self._alike[tiled]

    # --- the bound ----------------------------------------------------------------------------

    def _bound(self, plan: Plan, batch: Batch) -> float:
        """No step of any wiring of a plan is shorter."""
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
        return max(busy.values())

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
        lean = leanest(plan, self._topology, self._request.loss)
        units = self._model(plan).model.units
        first = units[min(1, len(units) - 1)]
        rungs = resolve(lean, self._topology, first.name)
        ops = unit_ops(first, rungs, lean, Phase.ONLY, encloses=first.name == ROOT)
        exposed = (*ops[Trigger.BEFORE_FORWARD], *ops[Trigger.GRADS_READY])
        return sum(self._hop_seconds(op, hop) for op in exposed for hop in op.hops)

    def _hop_seconds(self, op: Op, hop: Hop) -> float:
        """A hop with nothing encoded or summed."""
        direct = op.kind is Kind.REDUCE and hop.format is not None
        return self._prices.hop("", hop, reduces=False, direct=direct).seconds

    def _transfers(self, plan: Plan, phase: Phase) -> Seconds:
        """Seconds on each link and tier in one pass, for the leanest wires and nothing encoded."""
        key = (replace(plan, activations="keep"), phase)
        if key not in self._links:
            lean = leanest(plan, self._topology, self._request.loss)
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
            if op.moved_bytes:
                tier = plan.params.tier if op.kind is Kind.FETCH else plan.optim.tier
                if tier != "device":
                    stage = self._prices.move(tier, op.moved_bytes, writes=op.kind is Kind.STORE)
                    seconds[f"tier {tier}"] += stage.seconds
        return seconds


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
