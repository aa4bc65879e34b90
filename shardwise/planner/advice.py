"""What the planner reports besides the plan: why it wins, what limits it, what more would buy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwise.core.cluster import Cluster, ClusterError, Curve, LinkSpec
from shardwise.core.errors import PlanError
from shardwise.cost.engine import SLOWED
from shardwise.planner.choices import Choice, other_choices
from shardwise.planner.request import (
    Candidate,
    Overflow,
    Request,
    Result,
    evaluate,
    overflows,
    rank,
)
from shardwise.planner.search import Search
from shardwise.planner.space import Batch, Loss
from shardwise.planner.units import refine
from shardwise.plans.along import Moment, along, peak
from shardwise.plans.presets import PRESETS
from shardwise.plans.validate import violations

SHARES = (0.75, 0.5, 0.35, 0.25, 0.18, 0.125)
"""Shares of the memory for which the front has the fastest plan."""
BRIEFLY = 12
"""The patience of searches under other conditions; they begin with the best plans found so far."""
WORTH = 0.02
"""Gains below this share of the step are ignored."""


@dataclass(frozen=True)
class WhatIf:
    """How fast the best plan would be on a changed cluster."""

    change: str
    step_s: float
    speed_up: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A plan and the reasons for it, or why there is none."""

    request: Request
    result: Result
    best: Candidate | None = None
    """None: nothing fits."""
    front: tuple[Candidate, ...] = ()
    """The fastest plans for less and less memory: no other plan is both faster and smaller."""
    presets: dict[str, Candidate] = field(default_factory=dict)
    """The presets at the same batch, whether they fit or not."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The presets that cannot be run or simulated here, each with the reason."""
    what_ifs: tuple[WhatIf, ...] = ()
    binds: str = "memory"
    """The bottleneck: what keeps the best plan from being faster, in words."""
    choices: tuple[Choice, ...] = ()
    """Why the best plan wins: what each of its choices saves."""
    peak: Moment | None = None
    """When memory peaks, and what it holds then; of the smallest plan if nothing fits."""
    remedies: tuple[str, ...] = ()
    """If nothing fits: changes each of which would make a plan fit; with "perhaps": might."""

    def lacking(self) -> list[Overflow]:
        """If nothing fits: by how much the smallest plan is too large."""
        smallest = self.result.smallest
        return list(overflows(smallest.estimate.memory, self.request)) if smallest else []


def advise(request: Request, tell: Callable[[str], None] = lambda _: None) -> Advice:
    """Search, then compare the best plan with its alternatives."""
    tell("searching the legal plans")
    looking = Search(request)
    result = looking.run()
    if result.best is None:
        tell("searching for changes that would make it fit")
        return Advice(
            request=request,
            result=result,
            peak=peak_of(request, result.smallest) if result.smallest else None,
            remedies=tuple(_remedies(request)),
        )
    tell("refining single units")
    best = refine(request, result.best)
    tell("searching with less memory")
    smaller = _with_less_memory(request, looking, best)
    # No search simulates all plans: one found for less memory may be as fast.
    chosen = rank([best, *smaller])[0]
    if chosen is not best:
        best = refine(request, chosen)
    tell("presets")
    named, left_out = _presets(request, best.batch)
    what_ifs = tuple(_what_ifs(request, looking, best, tell))
    tell("comparing alternatives")
    return Advice(
        request=request,
        result=result,
        best=best,
        front=_front([best, *smaller]),
        presets=named,
        left_out=left_out,
        what_ifs=what_ifs,
        binds=_binds(best, what_ifs),
        choices=other_choices(request, looking, best),
        peak=peak_of(request, best),
    )


def peak_of(request: Request, candidate: Candidate) -> Moment:
    """The moment of a step at which a candidate holds the most memory."""
    plan, batch, topology = candidate.plan, candidate.batch, request.cluster.topology
    saved = request.facts.work(batch.micro, request.seq, plan, topology).saved
    spec = request.facts.spec(plan, topology)
    moments = along(
        plan,
        spec,
        topology,
        saved,
        accumulates=batch.accumulate > 1,
        accelerated=request.cluster.device.is_accelerator,
    )
    return peak(moments)


MORE = (2, 4, 8, 16, 32, 64)
"""Factors that are tried if nothing fits: more ranks, or shorter sequences."""


def _remedies(request: Request) -> Iterator[str]:
    """The smallest change of each kind that makes a plan fit; changes that do not are omitted."""
    cluster, world, seq = request.cluster, request.cluster.world, request.seq
    if cluster.disk is not None and not request.path:
        if Search(replace(request, path="disk")).fits():
            yield "states on disk (--path)"
    elif cluster.disk is None:
        yield "perhaps a disk, missing in the cluster's description (shardwise probe --path)"
    if cluster.host is None and cluster.device.is_accelerator:
        yield "perhaps host memory, missing in the cluster's description ([host])"
    if cluster.host is not None and cluster.host.update is None:
        yield (
            "perhaps optimizer states in host memory; how fast hosts update them is missing in the "
            "cluster's description (host.update_rate)"
        )
    for times in MORE:
        batch = request.global_batch * times  # as many per rank as before
        try:
            larger = cluster.with_world(world * times)
        except ClusterError:  # only one node was probed: links between nodes are unknown
            yield "perhaps more nodes; their links are missing in the cluster's description"
            break
        if Search(replace(request, cluster=larger, global_batch=batch)).fits():
            yield f"{world * times:,} ranks (--ranks {world * times})"
            break
    for times in MORE:
        if seq // times and Search(replace(request, seq=seq // times)).fits():
            yield f"sequences of {seq // times} (--seq {seq // times})"
            break


def _presets(request: Request, batch: Batch) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The presets at the same batch, and those that cannot be run or simulated, with reasons."""
    topology = request.cluster.topology
    found: dict[str, Candidate] = {}
    left_out: dict[str, str] = {}
    for name, preset in PRESETS.items():
        plan = replace(
            preset(),
            precision=request.precision,
            separate_memory=request.cluster.device.is_accelerator,
        )
        reasons = violations(plan, topology)
        if plan.rests_on("nvme"):
            plan = replace(plan, tiers=replace(plan.tiers, path=request.path))
            if request.cluster.disk is not None and not request.path:
                reasons.append("It needs a folder on a disk (--path).")
        if request.loss is Loss.NONE and plan.is_lossy():
            reasons = ["Its wires are lossy."]
        if reasons:
            left_out[name] = reasons[0]
            continue
        try:
            candidate = evaluate(request, plan, batch)
            if not candidate.fits(request) and plan.activations == "keep":
                candidate = evaluate(request, replace(plan, activations="recompute"), batch)
        except PlanError as error:  # the cluster lacks what it needs, a disk for example
            left_out[name] = str(error)
        else:
            found[name] = candidate
    return found, left_out


def _with_less_memory(request: Request, looking: Search, best: Candidate) -> list[Candidate]:
    found = []
    for share in SHARES:
        # Tiles are tried only if nothing else fits: they make many units, and many plans.
        tiles = best.plan.tiling.numel > 0
        limit = int(share * request.limit)
        less = looking.run(1, limit=limit, tiles=tiles, patience=BRIEFLY).best
        if less is None:
            break
        found.append(less)
    return found


def _front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_s, c.estimate.memory.total)):
        if not front or candidate.estimate.memory.total < front[-1].estimate.memory.total:
            front.append(candidate)
    return tuple(front)


def _what_ifs(
    request: Request, looking: Search, best: Candidate, tell: Callable[[str], None]
) -> list[WhatIf]:
    def what_if(change: str, other: Candidate | None) -> WhatIf:
        # Never slower: the best plan runs there as well.
        step_s = min(best.step_s, other.step_s if other is not None else best.step_s)
        return WhatIf(change, step_s, best.step_s / step_s)

    tell("searching with more memory")
    found = [
        what_if("twice the memory", looking.run(1, limit=2 * request.limit, patience=BRIEFLY).best)
    ]
    for change, cluster in _faster(request.cluster, best.estimate.exposed["tier"] > 0):
        tell(f"searching with {change}")
        faster = looking.with_other_speeds(cluster)
        found.append(what_if(change, faster.run(1, patience=BRIEFLY).best))
    return found


def _faster(cluster: Cluster, waits_for_tiers: bool) -> Iterator[tuple[str, Cluster]]:
    """The cluster with one of its parts twice as fast, for each part."""
    for level in cluster.levels:
        if level.size > 1:
            yield f"twice the bandwidth on {level.name}", _with_faster_links(cluster, level)
    host, disk = cluster.host, cluster.disk
    if waits_for_tiers and host is not None:
        twice = replace(host, bandwidth=2 * host.bandwidth)
        yield "twice the bandwidth to host memory", replace(cluster, host=twice)
    if waits_for_tiers and disk is not None:
        quick = replace(disk, read=2 * disk.read, write=2 * disk.write)
        yield "disks twice as fast", replace(cluster, disk=quick)


def _with_faster_links(cluster: Cluster, level: LinkSpec) -> Cluster:
    """The cluster with one level's links twice as fast."""

    def halved(curve: Curve | None) -> Curve | None:
        if curve is None:
            return None
        latency = curve.points[0][1]  # stays as it is
        return Curve(tuple((amount, (latency + s) / 2) for amount, s in curve.points))

    faster = replace(
        level,
        bandwidth=2 * level.bandwidth if level.bandwidth is not None else None,
        gather=halved(level.gather),
        reduce=halved(level.reduce),
    )
    levels = tuple(faster if one is level else one for one in cluster.levels)
    return replace(cluster, levels=levels)


def _binds(best: Candidate, what_ifs: tuple[WhatIf, ...]) -> str:
    exposed = best.estimate.exposed
    share = {use: seconds / best.step_s for use, seconds in exposed.items()}
    memory = what_ifs[0].speed_up - 1
    worst = max(_WAITS, key=lambda use: share[use])
    if memory > WORTH:
        return f"memory: with twice as much a step would be {1 + memory:.2f} times as fast"
    if share[worst] > WORTH:
        return f"{_WAITS[worst]}, {share[worst]:.0%} of a step"
    return f"compute, {share['compute']:.0%} of a step"


_WAITS = {
    "gather": "communication (waiting for gathered parameters)",
    "reduce": "communication (waiting for reduced gradients)",
    "refresh": "communication (waiting for the refresh after the update)",
    "tier": "host memory or the disk (waiting for states that rest there)",
    "update": "the optimizer's update",
    "copies": "copies in memory",
    SLOWED: "processors (transfers take them from compute)",
}
"""What a step may wait for besides compute, in words."""
