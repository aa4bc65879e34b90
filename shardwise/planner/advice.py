"""What a planner says beside the plan: why it wins, what binds, and what more would buy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.core.cluster import Cluster, Curve, LinkSpec
from shardwise.core.errors import PlanError
from shardwise.cost.engine import SLOWED
from shardwise.plan.presets import PRESETS
from shardwise.plan.validate import violations
from shardwise.planner.search import (
    Candidate,
    Overflow,
    Request,
    Result,
    Search,
    evaluate,
    overflows,
    rank,
)
from shardwise.planner.space import Batch, Loss
from shardwise.planner.units import refine

SHARES = (0.75, 0.5, 0.35, 0.25, 0.18, 0.125)
"""Of the memory, for the front: what could be had with less."""
WORTH = 0.02
"""A gain below this share of the step is none."""


@dataclass(frozen=True)
class WhatIf:
    """The best plan of another cluster."""

    change: str
    step_s: float
    speed_up: float


@dataclass(frozen=True)
class Advice:
    """A plan and the reasons for it."""

    request: Request
    result: Result
    best: Candidate | None
    front: tuple[Candidate, ...]
    """Best plans for less and less memory: nothing else is both faster and smaller."""
    presets: dict[str, Candidate]
    """What people would choose by name, whether it fits or not."""
    left_out: dict[str, str]
    """The presets that cannot be compared here, each with the reason."""
    what_ifs: tuple[WhatIf, ...]
    binds: str
    """What keeps the best plan from being faster, as a sentence."""

    def lacking(self) -> list[Overflow]:
        """Where nothing fits: by how much the smallest plan is too large."""
        smallest = self.result.smallest
        return list(overflows(smallest.estimate.memory, self.request)) if smallest else []


def advise(request: Request, tell: Callable[[str], None] = lambda _: None) -> Advice:
    """Searches, and looks around the best plan."""
    tell("searching the legal plans")
    looking = Search(request)
    result = looking.run()
    if result.best is None:
        return Advice(request, result, None, (), {}, {}, (), "memory")
    tell("choices for single units")
    best = refine(request, result.best)
    tell("what less memory costs")
    smaller = _with_less_memory(request, looking, best)
    # No search sees all plans: what was found for less memory may be as fast.
    chosen = rank([best, *smaller])[0]
    if chosen is not best:
        best = refine(request, chosen)
    front = _front([best, *smaller])
    tell("presets")
    named, left_out = _presets(request, best.batch)
    what_ifs = tuple(_what_ifs(request, looking, best, tell))
    binds = _binds(request, best, what_ifs)
    return Advice(request, result, best, front, named, left_out, what_ifs, binds)


def _presets(request: Request, batch: Batch) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The presets in the same batch; and those that cannot be run or priced here, with reasons."""
    topology = request.cluster.topology
    found: dict[str, Candidate] = {}
    left_out: dict[str, str] = {}
    for name, preset in PRESETS.items():
        plan = replace(preset(), precision=request.precision)
        if name == "infinity":
            plan = replace(plan, tiers=replace(plan.tiers, path=request.path))
        reasons = violations(plan, topology)
        if request.loss is Loss.NONE and plan.is_lossy():
            reasons = ["It loses bits on the wire."]
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
        # Tiles only where nothing fits otherwise: they make many units, and many plans.
        tiles = best.plan.tiling.numel > 0
        less = looking.run(1, limit=int(share * request.limit), tiles=tiles).best
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
        # Never slower: the plan that was found still runs there.
        step_s = min(best.step_s, other.step_s if other is not None else best.step_s)
        return WhatIf(change, step_s, best.step_s / step_s)

    tell("what more memory would buy")
    found = [what_if("twice the memory", looking.run(1, limit=2 * request.limit).best)]
    for level in request.cluster.levels:
        if level.size > 1:
            tell(f"what faster links on {level.name} would buy")
            faster = looking.with_other_speeds(_with_faster(request.cluster, level))
            found.append(what_if(f"twice the bandwidth on {level.name}", faster.run(1).best))
    return found


def _with_faster(cluster: Cluster, level: LinkSpec) -> Cluster:
    """The cluster with one level's links twice as fast."""

    def halved(curve: Curve | None) -> Curve | None:
        if curve is None:
            return None
        return Curve(tuple((amount, seconds / 2) for amount, seconds in curve.points))

    faster = replace(
        level,
        bandwidth=2 * level.bandwidth if level.bandwidth is not None else None,
        gather=halved(level.gather),
        reduce=halved(level.reduce),
    )
    levels = tuple(faster if one is level else one for one in cluster.levels)
    return replace(cluster, levels=levels)


def _binds(request: Request, best: Candidate, what_ifs: tuple[WhatIf, ...]) -> str:
    exposed = best.estimate.exposed
    share = {use: seconds / best.step_s for use, seconds in exposed.items()}
    memory = what_ifs[0].speed_up - 1
    transfers = {use: share[use] for use in ("gather", "reduce", "refresh", "tier")}
    worst = max(transfers, key=lambda use: transfers[use])
    if memory > WORTH:
        return f"memory: with twice as much of it a step would be {1 + memory:.2f} times as fast"
    if transfers[worst] > WORTH:
        return f"communication: {transfers[worst]:.0%} of a step waits for {_WORDS[worst]}"
    if share[SLOWED] > WORTH:
        return f"processors: transfers take {share[SLOWED]:.0%} of a step from the compute"
    return f"compute: it is {share['compute']:.0%} of a step"


_WORDS = {
    "gather": "parameters to be gathered",
    "reduce": "gradients to be reduced",
    "refresh": "new parameters after the update",
    "tier": "what rests in host memory or on the disk",
}
