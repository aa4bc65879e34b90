"""What the alternatives to a plan's choices would cost: one choice at a time, all else equal."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwise.core.topology import Topology
from shardwise.planner.request import Candidate, Request
from shardwise.planner.search import Search
from shardwise.planner.space import (
    Batch,
    activation_settings,
    partitionings,
    placed,
    placements,
    wirings,
)
from shardwise.plans.plan import Plan
from shardwise.plans.validate import violations

Variants = Iterator[tuple[Plan, Batch]]


@dataclass(frozen=True)
class Choice:
    """The best plan that differs from a given one in one choice."""

    what: str
    """``P``, ``G and OS``, ``keep``, ``wires``, ``tiers``, ``activations`` or ``batch``."""
    mine: str
    instead: str
    over: float
    """Its step time relative to the plan's own."""
    fits: bool
    grown: str
    """The use of the step's time that grows most; empty if none grows."""
    grown_s: float


def other_choices(request: Request, looking: Search, best: Candidate) -> tuple[Choice, ...]:
    """For each choice the fastest alternative that fits, or the fastest if none fits."""
    plan = replace(best.plan, overrides=())  # overrides suit this plan only
    own = looking.quickly(plan, best.batch)
    found = []
    for what, (variants, told) in _DIMENSIONS.items():
        candidates = [
            looking.quickly(other, batch)
            for other, batch in variants(request, plan, best.batch)
            if not violations(other, request.cluster.topology)
        ]
        if candidates:
            fastest = min(candidates, key=lambda c: (not c.fits(request), c.step_s))
            found.append(_choice(request, what, told, own, fastest))
    return tuple(found)


def _choice(
    request: Request,
    what: str,
    told: Callable[[Candidate], str],
    own: Candidate,
    other: Candidate,
) -> Choice:
    before, after = own.estimate.exposed, other.estimate.exposed
    grown = max(after, key=lambda use: after[use] - before[use])
    grown_s = after[grown] - before[grown]
    return Choice(
        what=what,
        mine=told(own),
        instead=told(other),
        over=other.step_s / own.step_s,
        fits=other.fits(request),
        grown=grown if grown_s > 0 else "",
        grown_s=max(0.0, grown_s),
    )


def _spreads(
    request: Request, plan: Plan, batch: Batch, same: Callable[[Plan], tuple[str, ...]]
) -> Variants:
    """Partitionings that agree with the plan in ``same``."""
    topology: Topology = request.cluster.topology
    own = (plan.params.spread, plan.grads.spread, plan.optim.spread, plan.keep)
    for other in partitionings(topology, accumulates=batch.accumulate > 1):
        spreads = (other.params.spread, other.grads.spread, other.optim.spread, other.keep)
        if same(other) == same(plan) and spreads != own:
            yield (
                replace(
                    plan,
                    params=replace(plan.params, spread=other.params.spread),
                    grads=replace(plan.grads, spread=other.grads.spread),
                    optim=replace(plan.optim, spread=other.optim.spread),
                    keep=other.keep,
                ),
                batch,
            )


def _other_params(request: Request, plan: Plan, batch: Batch) -> Variants:
    return _spreads(request, plan, batch, lambda p: (p.grads.spread, p.optim.spread, p.keep))


def _other_sums(request: Request, plan: Plan, batch: Batch) -> Variants:
    return _spreads(request, plan, batch, lambda p: (p.params.spread, p.keep))


def _other_keep(request: Request, plan: Plan, batch: Batch) -> Variants:
    return _spreads(
        request, plan, batch, lambda p: (p.params.spread, p.grads.spread, p.optim.spread)
    )


def _other_wires(request: Request, plan: Plan, batch: Batch) -> Variants:
    for other in wirings(plan, request.cluster.topology, request.loss):
        if other != plan:
            yield other, batch


def _other_tiers(request: Request, plan: Plan, batch: Batch) -> Variants:
    for placement in placements(request.cluster, request.path):
        other = placed(plan, placement, request.path)
        if _tiers(other) != _tiers(plan):
            yield other, batch


def _other_activations(request: Request, plan: Plan, batch: Batch) -> Variants:
    for setting in activation_settings(request.cluster, request.path):
        if setting != plan.activations:
            tiers = replace(plan.tiers, path=request.path) if setting == "nvme" else plan.tiers
            yield replace(plan, activations=setting, tiers=tiers), batch


def _other_batch(request: Request, plan: Plan, batch: Batch) -> Variants:
    for other in request.cuts:
        if other != batch:
            yield plan, other


def _tiers(plan: Plan) -> str:
    return "/".join(state.tier for state in (plan.params, plan.grads, plan.optim))


def wires(plan: Plan) -> str:
    """The wire formats of a plan, in short."""
    states = {"P": plan.params, "G": plan.grads, "OS": plan.optim}
    found = [f"{name} {state.wire}" for name, state in states.items() if state.wire]
    return "; ".join(found) or "raw"


_DIMENSIONS: dict[
    str, tuple[Callable[[Request, Plan, Batch], Variants], Callable[[Candidate], str]]
] = {
    "P": (_other_params, lambda c: c.plan.params.spread),
    "G and OS": (_other_sums, lambda c: f"{c.plan.grads.spread}, {c.plan.optim.spread}"),
    "keep": (_other_keep, lambda c: c.plan.keep),
    "wires": (_other_wires, lambda c: wires(c.plan)),
    "tiers": (_other_tiers, lambda c: _tiers(c.plan)),
    "activations": (_other_activations, lambda c: c.plan.activations),
    "batch": (_other_batch, lambda c: f"{c.batch.micro} x {c.batch.accumulate}"),
}
