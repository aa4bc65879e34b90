"""Overrides for single units, made after the search for a plan for all units, where they pay."""

from dataclasses import replace

from shardwise.planner.alike import Alike
from shardwise.planner.request import Candidate, Request, evaluate
from shardwise.plans.plan import Override, Plan, StatePlan
from shardwise.plans.validate import violations

STATES = ("params", "grads", "optim")
WORTH = 0.005
"""An override that gains less of a step is not worth another line in the plan."""


def refine(request: Request, candidate: Candidate) -> Candidate:
    """The same plan with overrides for some units, if it is faster with them and still fits."""
    for better in (_resident, _replicated):
        found = better(request, candidate)
        if found is not None and found.step_s < (1 - WORTH) * candidate.step_s:
            candidate = found
    return candidate


def _resident(request: Request, candidate: Candidate) -> Candidate | None:
    """If states rest on a tier: the plan with as many units as fit on the device."""
    plan = candidate.plan
    if all(getattr(plan, state).tier == "device" for state in STATES):
        return None
    spec = request.facts.spec(plan, request.cluster.topology)
    begin, count = Alike(spec).run
    names = [unit.name for unit in spec.units[begin : begin + count] if not unit.inside]
    states = {state: replace(getattr(plan, state), tier="device") for state in STATES}

    def keeping(number: int) -> Candidate:
        overrides = tuple(Override(unit=name, **states) for name in names[:number])
        return evaluate(request, replace(plan, overrides=overrides), candidate.batch)

    fits, too_many = 0, len(names) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if keeping(middle).fits(request):
            fits = middle
        else:
            too_many = middle
    return keeping(fits) if fits else None


def _replicated(request: Request, candidate: Candidate) -> Candidate | None:
    """The plan with small units (mostly the root) in full on every rank: their gathers cost
    latency, not bytes."""
    plan, topology = candidate.plan, request.cluster.topology
    if plan.params.spread == "none" or plan.params.tier != "device":
        return None
    spec = request.facts.spec(plan, topology)
    begin, count = Alike(spec).run
    usual = spec.units[begin].numel
    small = [u.name for u in spec.units if u.numel < usual / 2 and not u.inside]
    if not small or count < 2:
        return None
    full = StatePlan(spread="none")
    overrides = tuple(Override(unit=name, params=full, keep="none") for name in small)
    changed: Plan = replace(plan, overrides=(*plan.overrides, *overrides))
    if violations(changed, topology, spec):
        return None
    found = evaluate(request, changed, candidate.batch)
    return found if found.fits(request) else None
