"""Every rule fires with a remedy, and the legal space is exactly the chains of divisors."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import PlanError
from shardwise.core.layout import ModelSpec, ParamSpec, lay_out
from shardwise.core.topology import Level, Topology
from shardwise.plans import presets
from shardwise.plans.plan import Override, Plan, Precision, StatePlan, keep_factor, resolve
from shardwise.plans.validate import check, legal_plans, spreads, violations

GRID = Topology.parse("node=2,world=2")
SIX = Topology.parse("node=6,world=2")


def plan_of(params: str, grads: str, optim: str, keep: str = "none", **fields: object) -> Plan:
    states = (StatePlan(spread=spread) for spread in (params, grads, optim))
    plan = Plan(**dict(zip(("params", "grads", "optim"), states, strict=True)), keep=keep)
    return replace(plan, **fields)  # type: ignore[arg-type]


def model_of(*names: str) -> ModelSpec:
    weight = ParamSpec("weight", (64,), "float32")
    return ModelSpec(tuple(lay_out(name, [weight], 4) for name in names))


MODEL = model_of("root", "h.0", "h.1")

RULES: dict[str, tuple[Plan, Topology, str]] = {
    "unknown params spread": (plan_of("rack", "none", "world"), GRID, "params.spread: .*rack"),
    "unknown grads spread": (plan_of("none", "rack", "world"), GRID, "grads.spread: .*rack"),
    "unknown optim spread": (plan_of("none", "none", "rack"), GRID, "optim.spread: .*rack"),
    "unknown keep": (presets.zero3(keep="rack"), GRID, "keep: .*rack"),
    "no divisor of a level": (presets.mics("node:4"), SIX, "use one of node:1, node:2"),
    "node not filled": (
        presets.mics("world:3"),
        Topology.parse("island=2,rack=3"),
        "continues beyond a level that it does not fill; use none or island or rack",
    ),
    "params finer than optim": (
        plan_of("world", "node", "node"),
        GRID,
        r"params.spread 'world' \(4 shards\) does not divide optim.spread 'node' \(2 shards\)",
    ),
    "grads finer than optim": (plan_of("none", "world", "node"), GRID, "grads.spread 'world'"),
    "params and grads cross": (
        plan_of("node:2", "node:3", "node"),
        SIX,
        "params.spread 'node:2' .* must divide grads.spread 'node:3' .*, or the reverse",
    ),
    "keep and grads cross": (
        plan_of("node", "node:3", "node", "node:2"),
        SIX,
        "grads.spread 'node:3' .* must divide keep 'node:2' .*, or the reverse",
    ),
    "keep finer than params": (
        plan_of("node", "node", "node", "world"),
        GRID,
        "keep 'world' .* does not divide params.spread 'node' .*; use none or node or full",
    ),
    "keep until": (replace(presets.ddp(), keep_until="ever"), GRID, "use backward or step"),
    "keep nothing until step": (
        replace(presets.zero3(), keep_until="step"),
        GRID,
        "there is nothing to keep",
    ),
    "dtype with a neighbour": (
        presets.ddp(precision=Precision(compute="bfloat")),
        GRID,
        "precision.compute 'bfloat' .* did you mean 'bfloat16'",
    ),
    "dtype without one": (
        presets.ddp(precision=Precision(reduce="int8")),
        GRID,
        "precision.reduce 'int8' .* use one of float64",
    ),
    "narrow master": (
        presets.ddp(precision=Precision(compute="float32", master="bfloat16")),
        GRID,
        "master 'bfloat16' is narrower",
    ),
    "prefetch": (replace(presets.ddp(), prefetch=-1), GRID, "prefetch is -1; use 0"),
    "unit size": (replace(presets.ddp(), min_unit_numel=-1), GRID, "min_unit_numel is -1"),
    "empty unit pattern": (replace(presets.ddp(), units=("",)), GRID, "empty pattern"),
    "empty override pattern": (
        replace(presets.zero3(), overrides=(Override(unit="", keep="full"),)),
        GRID,
        "empty unit pattern; use '\\*'",
    ),
    "idle override": (
        replace(presets.ddp(), overrides=(Override(unit="h.0"),)),
        GRID,
        "'h.0' changes nothing",
    ),
    "illegal override": (
        replace(presets.hsdp(), overrides=(Override(unit="h.[0]", keep="world"),)),
        GRID,
        r"^For units 'h\.\[0\]': keep 'world'",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_fires_once_and_alone(rule: str) -> None:
    plan, topology, sentence = RULES[rule]
    found = violations(plan, topology)
    assert len(found) == (3 if rule in ("no divisor of a level", "node not filled") else 1), found
    with pytest.raises(PlanError, match=sentence.removeprefix("^")):
        check(plan, topology)
    assert all(line.endswith((".", "?")) for line in found)


def test_all_violations_are_listed_at_once() -> None:
    plan = plan_of("world", "rack", "none", keep_until="ever", prefetch=-1)
    found = violations(plan, GRID)
    assert len(found) == 4
    with pytest.raises(PlanError) as caught:
        check(plan, GRID)
    assert str(caught.value).splitlines()[0] == "Plan 'custom' cannot run on node=2,world=2:"
    assert str(caught.value).splitlines()[1:] == [f"- {sentence}" for sentence in found]


@pytest.mark.parametrize("field", ["units", "overrides"])
def test_patterns_must_match_the_model(field: str) -> None:
    value = ("layer.*",) if field == "units" else (Override(unit="layer.*", keep="full"),)
    plan = replace(presets.zero3(), **{field: value})
    assert violations(plan, GRID) == []
    (sentence,) = violations(plan, GRID, MODEL)
    assert "'layer.*' matches no unit of the model; its units are root, h.0, h.1." in sentence


def test_near_patterns_are_suggested() -> None:
    plan = replace(presets.zero3(), overrides=(Override(unit="roots", keep="full"),))
    assert "did you mean 'root'?" in violations(plan, GRID, MODEL)[0]


def test_overrides_are_checked_together_as_units_meet_them() -> None:
    plan = replace(
        presets.zero3(),
        overrides=(
            Override(unit="h.*", params=StatePlan(spread="node")),
            Override(unit="h.1", keep="world"),
        ),
    )
    assert violations(plan, GRID)[0].startswith("For units 'h.1': keep 'world'")
    assert violations(plan, GRID, MODEL)[0].startswith("For unit 'h.1': keep 'world'")
    several = replace(plan, overrides=(Override(unit="h.*", keep="rack"),))
    assert violations(several, GRID, MODEL)[0].startswith("For unit 'h.0' and 1 more: keep: ")


def test_overrides_may_carry_what_is_kept_until_step() -> None:
    plan = replace(
        presets.zero3(), keep_until="step", overrides=(Override(unit="h.0", keep="full"),)
    )
    assert violations(plan, GRID, MODEL) == []


def chain(factors: tuple[int, ...]) -> bool:
    return all(a % b == 0 or b % a == 0 for a, b in permutations(factors, 2))


@pytest.mark.parametrize("levels", ["world=1", "world=4", "node=2,world=2", "node=6", "a=1,b=3"])
def test_legal_plans_are_the_chains_of_divisors(levels: str) -> None:
    topology = Topology.parse(levels)
    factors = spreads(topology)
    expected = {
        (keep, params, grads, optim)
        for keep, params, grads, optim in product(factors, repeat=4)
        if chain((keep, params, grads, optim)) and keep <= params <= optim and grads <= optim
    }
    found = legal_plans(topology)
    resolved = []
    for plan in found:
        states = (plan.params, plan.grads, plan.optim)
        spread = tuple(topology.factor(state.spread) for state in states)
        resolved.append((keep_factor(plan, topology), *spread))
    assert len(resolved) == len(set(resolved)) == len({plan.name for plan in found})
    assert set(resolved) == expected


@settings(max_examples=40)
@given(st.data())
def test_a_plan_without_violations_resolves(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    topology = Topology(tuple(map(Level, ("node", "rack", "world"), sizes)))
    names = st.sampled_from([*spreads(topology).values(), "node", "world", "node:2", "world:3"])
    keep = data.draw(st.one_of(names, st.just("full")))
    plan = plan_of(data.draw(names), data.draw(names), data.draw(names), keep)
    if not violations(plan, topology):
        rungs = resolve(plan, topology, "h.0")
        assert rungs.keep <= rungs.params <= rungs.optim
        assert rungs.grads <= rungs.optim


@pytest.mark.parametrize(
    ("wires", "sentence"),
    [
        ({"params": "int9"}, "params.wire: 'int9' in 'int9' is not a wire format; the nearest"),
        ({"params": "int8/feedback"}, "params.wire 'int8/feedback' has error feedback, which only"),
        ({"grads": "int4/delta"}, "grads.wire 'int4/delta' sends differences, which only the ref"),
        ({"grads": "rack=int8"}, "names no level 'rack' of node=2,world=2"),
        ({"grads": "int4/feedback"}, "error feedback on level node, where it would need memory"),
        ({"optim": "node=int4/delta"}, "sends differences on a level that receives its values"),
        ({"optim": "int4/delta,node=int8/delta"}, "use one format with delta from the outermost"),
    ],
)
def test_wires_that_cannot_run_say_why(wires: dict[str, str], sentence: str) -> None:
    plan = presets.zero1()
    for state, wire in wires.items():
        plan = replace(plan, **{state: replace(getattr(plan, state), wire=wire)})
    found = violations(plan, Topology.parse("node=2,world=2"))
    assert len(found) == 1, found
    assert sentence in found[0]


@pytest.mark.parametrize(
    "wires",
    [
        {"params": "int8", "grads": "int4,node=int8", "optim": "int4/delta"},
        {"grads": "world=int4/feedback"},
        {"optim": "world=int4/delta,node=bf16"},
    ],
)
@pytest.mark.parametrize(
    "levels", ["world=1", "world=4", "node=2,world=2", "node=2,rack=2,world=2"]
)
def test_wires_that_can_run(wires: dict[str, str], levels: str) -> None:
    plan = presets.zero1()
    for state, wire in wires.items():
        plan = replace(plan, **{state: replace(getattr(plan, state), wire=wire)})
    assert violations(plan, Topology.parse(levels)) == []
