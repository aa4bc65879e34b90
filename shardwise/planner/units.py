"""Choices for single units, where they pay: after the best plan for all of them was found."""

from dataclasses import replace

from shardwise.planner.alike import Alike
from shardwise.planner.request import Candidate, Request, evaluate
from shardwise.plans.plan import Override, Plan, StatePlan
from shardwise.plans.validate import violations

STATES = ("params", "grads", "optim")
WORTH = 0.005
"""A choice that gains less of a step is not worth another line in the plan."""


def refine(request: Request, candidate: Candidate) -> Candidate:
    """The same plan with exceptions for some units, if these make it faster and still fit."""
    for better in (_resident, _replicated):
        found = better(request, candidate)
        if found is not None and found.step_s < (1 - WORTH) * candidate.step_s:
            candidate = found
    return candidate


def _resident(request: Request, candidate: Candidate) -> Candidate | None:
    """Where states rest on a tier: as many units as fit stay on the device."""
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
    """Small units (the root, mostly) rest in full: their gathers cost latency, not bytes."""
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
