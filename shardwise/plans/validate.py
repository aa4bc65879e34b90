"""Which plans are legal: every violation as a sentence, and the list of all legal plans.

[Note: Legal plans]
The numbers of shards of keep, P, G and OS form one chain of divisors, so that one ladder has a rung
for each: keep is no finer than P, P and G are no finer than OS, and of P and G (and of keep and G)
one divides the other. Equal numbers are legal: a plan for many nodes also runs on one rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product

from shardwise.core.errors import PlanError
from shardwise.core.layout import DTYPE_BYTES, ModelSpec
from shardwise.core.topology import Topology, divisors
from shardwise.core.wire import Wire
from shardwise.plans.plan import (
    ACTIVATIONS,
    KEEP_UNTIL,
    TIERS,
    UPDATES,
    Override,
    Plan,
    StatePlan,
    format_of,
    resolve,
    untiled,
)

WINDOW_GRAIN = 1 << 12
"""Elements: in every dtype at least one page of a disk."""
STEP_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes that a step can compute, reduce and update in."""


def check(plan: Plan, topology: Topology, model: ModelSpec | None = None) -> None:
    """Raise one PlanError that lists every violation; see ``violations``."""
    found = violations(plan, topology, model)
    if not found:
        return
    head = f"Plan '{plan.name}' cannot run on {topology}:"
    raise PlanError(f"{head} {found[0]}" if len(found) == 1 else "\n- ".join([head, *found]))


def violations(plan: Plan, topology: Topology, model: ModelSpec | None = None) -> list[str]:
    """Everything that makes a plan illegal on a topology, each a sentence with a remedy.

    With a model, patterns must match its units, and overrides are checked for the units they match.

    >>> from shardwise.plans.presets import zero3
    >>> violations(zero3(keep="node"), Topology.parse("node=2,world=2"))
    []
    """
    found = value_violations(plan)
    readable = not found  # wires are checked further only if they can be parsed
    for where, resolved in _cases(plan, model):
        sentences = _space_violations(resolved, topology)
        if readable:
            sentences += _wire_violations(resolved, topology)
            if not sentences:
                sentences += _delta_violations(replace(resolved, overrides=()), topology)
        found += [f"{where}{sentence}" for sentence in sentences]
    if model is not None:
        found += _unmatched(plan, model)
    return list(dict.fromkeys(found))


def value_violations(plan: Plan) -> list[str]:
    """The violations that do not depend on a topology: words, numbers and patterns."""
    return [
        *_keep_until(plan),
        *_precision(plan),
        *_numbers(plan),
        *_patterns(plan),
        *_wire_options(plan),
        *_tiers(plan),
    ]


def spreads(topology: Topology) -> dict[int, str]:
    """Every spread of a topology by its number of shards, ascending.

    >>> spreads(Topology.parse("node=4,world=2"))
    {1: 'none', 2: 'node:2', 4: 'node', 8: 'world'}
    """
    names, inside = {1: "none"}, 1
    for level in topology.levels:
        for count in divisors(level.size)[1:]:
            whole = count == level.size
            names[inside * count] = level.name if whole else f"{level.name}:{count}"
        inside *= level.size
    return names


def legal_plans(topology: Topology) -> list[Plan]:
    """Every legal combination of P, G, OS and keep on a topology, without duplicates.

    >>> [plan.name for plan in legal_plans(Topology.parse("world=1"))]
    ['P=none G=none OS=none keep=none']
    """
    factors = spreads(topology)
    found = []
    for params, grads, optim in product(factors, repeat=3):
        # Keeping P's own rung is keep="none"; keeping rung 0 is "full".
        kept = {params: "none", **({1: "full"} if params > 1 else {})}
        kept |= {factor: name for factor, name in factors.items() if 1 < factor < params}
        for keep in kept.values():
            plan = Plan(
                name=f"P={factors[params]} G={factors[grads]} OS={factors[optim]} keep={keep}",
                params=StatePlan(spread=factors[params]),
                grads=StatePlan(spread=factors[grads]),
                optim=StatePlan(spread=factors[optim]),
                keep=keep,
            )
            if not violations(plan, topology):
                found.append(plan)
    return found


def _cases(plan: Plan, model: ModelSpec | None) -> Iterator[tuple[str, Plan]]:
    """The plan itself, then as overrides change it, each with the words that name its units."""
    yield "", plan
    if model is None:
        for index, override in enumerate(plan.overrides):
            # Earlier overrides may match the same units, and this one certainly does.
            so_far = (*plan.overrides[:index], replace(override, unit="*"))
            resolved = replace(plan, overrides=so_far).for_unit(override.unit)
            yield f"For units '{override.unit}': ", resolved
        return
    variants: dict[Plan, list[str]] = {}
    for unit in model.units:
        variants.setdefault(plan.for_unit(unit.name), []).append(unit.name)
    variants.pop(plan, None)
    for resolved, names in variants.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"For unit '{names[0]}'{more}: ", resolved


def _space_violations(plan: Plan, topology: Topology) -> list[str]:
    """Violations of [Note: Legal plans] on a topology."""
    words = {
        "params.spread": plan.params.spread,
        "grads.spread": plan.grads.spread,
        "optim.spread": plan.optim.spread,
    }
    if plan.keep not in ("none", "full"):
        words["keep"] = plan.keep
    found: list[str] = []
    legal = spreads(topology)
    factors: dict[str, int] = {"keep": 1} if plan.keep == "full" else {}
    for key, spread in words.items():
        try:
            factors[key] = topology.factor(spread)
        except PlanError as error:
            found.append(f"{key}: {error}")
            continue
        if factors[key] not in legal:
            found.append(
                f"{key} '{spread}' ({factors.pop(key)} shards) continues beyond a level that it "
                f"does not fill; use {' or '.join(legal.values())}."
            )

    def parts(key: str) -> str:
        return f"{key} '{words.get(key, plan.keep)}' ({factors[key]} shards)"

    for finer, coarser in _MULTIPLES:
        if finer in factors and coarser in factors and factors[finer] % factors[coarser]:
            choices = [name for f, name in legal.items() if factors[finer] % f == 0]
            if coarser == "keep":
                choices.append("full")
            found.append(
                f"{parts(coarser)} does not divide {parts(finer)}; "
                f"use {' or '.join(choices)} for {coarser}, or spread {finer} further."
            )
    for one, other in _COMPARABLE:
        if one in factors and other in factors:
            low, high = sorted((factors[one], factors[other]))
            if high % low:
                found.append(
                    f"{parts(one)} must divide {parts(other)}, or the reverse; "
                    f"use the same spread for both, or fill the level with one of them."
                )
    return found


_MULTIPLES = (
    ("optim.spread", "params.spread"),
    ("optim.spread", "grads.spread"),
    ("params.spread", "keep"),
)
"""Pairs whose first must be a multiple of the second."""

_COMPARABLE = (("params.spread", "grads.spread"), ("grads.spread", "keep"))
"""Pairs in which one must be a multiple of the other."""


def _keep_until(plan: Plan) -> list[str]:
    if plan.keep_until not in KEEP_UNTIL:
        return [f"keep_until '{plan.keep_until}' is unknown; use {' or '.join(KEEP_UNTIL)}."]
    keeps = [plan.keep, *(override.keep or "none" for override in plan.overrides)]
    if plan.keep_until == "step" and set(keeps) == {"none"}:
        sentence = (
            "keep_until is 'step', but there is nothing to keep because keep is 'none'; "
            "set keep to a spread or to full, or keep_until to backward."
        )
        return [sentence]
    return []


def _precision(plan: Plan) -> list[str]:
    precision = plan.precision
    fields = ("compute", "reduce", "master")
    chosen = {name: dtype for name in fields if (dtype := getattr(precision, name)) is not None}
    found = []
    for name, dtype in chosen.items():
        if dtype not in STEP_DTYPES:
            hint = _nearest(dtype, STEP_DTYPES) or f"use one of {', '.join(STEP_DTYPES)}."
            found.append(f"precision.{name} '{dtype}' is not a dtype that a step can use; {hint}")
    compute, master = chosen.get("compute"), chosen.get("master")
    if not found and compute and master and DTYPE_BYTES[master] < DTYPE_BYTES[compute]:
        found.append(
            f"precision.master '{master}' is narrower than precision.compute '{compute}', so the "
            "optimizer would round the parameters; use a master that is at least as wide."
        )
    return found


def _states(plan: Plan) -> Iterator[tuple[str, StatePlan]]:
    """The states of a plan and its overrides, each with the key that names it."""
    for name in ("params", "grads", "optim"):
        yield name, getattr(plan, name)
        for override in plan.overrides:
            if (state := getattr(override, name)) is not None:
                yield name, state


def _tiers(plan: Plan) -> list[str]:
    """Unknown tiers, and budgets that are not positive."""
    found = []
    for name, state in _states(plan):
        if state.tier not in TIERS:
            hint = _nearest(state.tier, TIERS) or f"use {', '.join(TIERS)}."
            found.append(f"{name}.tier '{state.tier}' is unknown; {hint}")
    if plan.activations not in ACTIVATIONS:
        hint = _nearest(plan.activations, ACTIVATIONS) or f"use {', '.join(ACTIVATIONS)}."
        found.append(f"activations '{plan.activations}' is unknown; {hint}")
    for key in ("device_bytes", "cpu_bytes", "nvme_bytes"):
        budget = getattr(plan.tiers, key)
        if budget is not None and budget <= 0:
            found.append(f"tiers.{key} is {budget}; use a positive number, or omit it.")
    if plan.tiers.window_numel < WINDOW_GRAIN or plan.tiers.window_numel % WINDOW_GRAIN:
        found.append(
            f"tiers.window_numel is {plan.tiers.window_numel}; use a multiple of {WINDOW_GRAIN}, "
            "so that windows begin on block boundaries of a disk."
        )
    if plan.tiers.update not in UPDATES:
        hint = _nearest(plan.tiers.update, UPDATES) or f"use {' or '.join(UPDATES)}."
        found.append(f"tiers.update '{plan.tiers.update}' is unknown; {hint}")
    elif plan.tiers.update != "step" and not plan.streams_updates():
        found.append(
            f"tiers.update is '{plan.tiers.update}', but neither gradients nor optimizer states "
            "rest on a tier; set optim.tier, or omit tiers.update."
        )
    return found


def _wire_options(plan: Plan) -> list[str]:
    """Formats that cannot be parsed, and options that do not apply to the state."""
    found = []
    for name, state in _states(plan):
        try:
            formats = Wire.parse(state.wire).formats
        except PlanError as error:
            found.append(f"{name}.wire: {error}")
            continue
        for format in formats:
            if format.feedback and name != "grads":
                found.append(
                    f"{name}.wire '{state.wire}' has error feedback, which only gradients can "
                    "have; use it in grads.wire, or omit it."
                )
            if format.delta and name != "optim":
                found.append(
                    f"{name}.wire '{state.wire}' sends differences, which only the refresh can "
                    "send; use delta in optim.wire, or omit it."
                )
    return found


def _wire_violations(plan: Plan, topology: Topology) -> list[str]:
    """Wires that name no level, and options on hops where they are impossible."""
    found = []
    levels = [level.name for level in topology.levels]
    for name in ("params", "grads", "optim"):
        wire = Wire.parse(getattr(plan, name).wire)
        for level in wire.levels:
            if level not in (*levels, "node", "world"):
                hint = _nearest(level, levels) or f"use {' or '.join(levels)}."
                found.append(f"{name}.wire '{wire}' names no level '{level}' of {topology}; {hint}")
    feedback = [
        level.name
        for index, level in enumerate(topology.levels[:-1])
        if (format := Wire.parse(plan.grads.wire).at(level.name, innermost=index == 0))
        and format.feedback
    ]
    if feedback:
        found.append(
            f"grads.wire '{plan.grads.wire}' has error feedback on level {feedback[0]}, where it "
            "would need memory for full gradients; "
            f"use it on the outermost level ({levels[-1]}) only."
        )
    return found


def _delta_violations(plan: Plan, topology: Topology) -> list[str]:
    """Deltas are computed where the refresh begins, and must be forwarded unchanged."""
    rungs = resolve(plan, topology, "")
    steps = [s for s in rungs.ladder.steps[rungs.params : rungs.optim] if s.size > 1]
    formats = [format_of(plan.optim.wire, step, "float32") for step in reversed(steps)]
    deltas = [index for index, format in enumerate(formats) if format and format.delta]
    if not deltas or (deltas == list(range(len(deltas))) and len(set(formats[: len(deltas)])) == 1):
        return []
    return [
        f"optim.wire '{plan.optim.wire}' sends differences on a level that receives its values "
        "from another; use one format with delta from the outermost level of the refresh inwards."
    ]


def _numbers(plan: Plan) -> list[str]:
    found = []
    if plan.prefetch < 0:
        found.append(f"prefetch is {plan.prefetch}; use 0 (gather on use) or more units ahead.")
    if plan.min_unit_numel < 0:
        found.append(f"min_unit_numel is {plan.min_unit_numel}; use 0 or more elements.")
    if plan.tiling.numel < 0:
        found.append(f"tiling.numel is {plan.tiling.numel}; use 0 (no tiles) or more elements.")
    return found


def _patterns(plan: Plan) -> list[str]:
    found = []
    if not all(plan.units):
        found.append("units has an empty pattern; name modules such as 'h.*', or remove it.")
    for override in plan.overrides:
        if not override.unit:
            found.append("An override has an empty unit pattern; use '*' for every unit.")
        if override == Override(unit=override.unit):
            found.append(
                f"The override of units '{override.unit}' changes nothing; "
                "give it params, grads, optim or keep, or remove it."
            )
    return found


def _unmatched(plan: Plan, model: ModelSpec) -> list[str]:
    names = list(dict.fromkeys(untiled(unit.name) for unit in model.units))
    keys = [("units", pattern) for pattern in plan.units]
    keys += [("The override", override.unit) for override in plan.overrides]
    found = []
    for key, pattern in keys:
        if pattern and not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            hint = _nearest(pattern, names) or f"its units are {known}."
            found.append(f"{key} pattern '{pattern}' matches no unit of the model; {hint}")
    return found


def _nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    near = get_close_matches(word, known, n=1)
    return f"did you mean '{near[0]}'?" if near else ""
