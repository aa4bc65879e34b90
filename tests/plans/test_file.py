"""Plan files: every plan survives the round trip, every mistake is one helpful sentence."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import PlanError
from shardwise.plans import presets
from shardwise.plans.file import TABLES, dump_plan, load_plan, parse_plan
from shardwise.plans.plan import Override, Plan, Precision, StatePlan
from shardwise.plans.validate import STEP_DTYPES, value_violations

WORDS = st.text(min_size=1, max_size=12)
WIRES = st.sampled_from(["", "int8", "int4,node=int8", "node=bf16,world=int4/64"])
STATES = st.builds(StatePlan, spread=WORDS, wire=WIRES)
DTYPES = st.none() | st.sampled_from(STEP_DTYPES)
OVERRIDES = st.builds(
    Override,
    unit=WORDS,
    params=st.none() | STATES,
    grads=st.none() | STATES,
    optim=st.none() | STATES,
    keep=st.none() | WORDS,
)
PLANS = st.builds(
    Plan,
    name=st.text(max_size=12),
    params=STATES,
    grads=STATES,
    optim=STATES,
    keep=WORDS,
    keep_until=st.sampled_from(["backward", "step"]),
    precision=st.builds(Precision, compute=DTYPES, reduce=DTYPES, master=DTYPES),
    prefetch=st.integers(0, 2**62),
    units=st.lists(WORDS, max_size=3).map(tuple),
    min_unit_numel=st.integers(0, 2**62),
    overrides=st.lists(OVERRIDES, max_size=3).map(tuple),
).filter(lambda plan: not value_violations(plan))


@given(PLANS)
def test_every_plan_survives_the_round_trip(plan: Plan) -> None:
    assert parse_plan(dump_plan(plan)) == plan


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_survives_and_loads_by_name(name: str, tmp_path: Path) -> None:
    plan = presets.PRESETS[name]()
    path = tmp_path / "plan.toml"
    path.write_text(dump_plan(plan), encoding="utf-8")
    assert load_plan(path) == load_plan(str(path)) == load_plan(name) == plan
    assert load_plan(plan) is plan


def test_dump_says_the_spreads_and_what_differs() -> None:
    assert tomllib.loads(dump_plan(Plan())) == {
        "params": {"spread": "none"},
        "grads": {"spread": "none"},
        "optim": {"spread": "none"},
    }
    plan = replace(presets.zero3(precision=Precision(compute="bfloat16")), prefetch=3)
    table = tomllib.loads(dump_plan(plan))
    assert set(table) == {"name", "params", "grads", "optim", "precision", "prefetch"}
    assert table["precision"] == {"compute": "bfloat16"}


def test_a_file_may_change_a_preset() -> None:
    text = """
        preset = "zero3"
        keep = "node"
        units = ["h.*"]
        [grads]
        spread = "node"
        [precision]
        reduce = "float32"
        [[overrides]]
        unit = "lm_head"
        optim = { spread = "node" }
    """
    assert parse_plan(text) == replace(
        presets.zero3(keep="node"),
        units=("h.*",),
        grads=StatePlan(spread="node"),
        precision=Precision(reduce="float32"),
        overrides=(Override(unit="lm_head", optim=StatePlan(spread="node")),),
    )
    assert parse_plan('preset = "zero3"\nname = "mine"').name == "mine"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("keep = x", r"Plan file p.toml is not TOML: .*line 1"),
        ('kepe = "node"', r"Plan file p.toml has an unknown key 'kepe'; did you mean 'keep'\?"),
        ('spread = "node"', r"unknown key 'spread'; did you mean 'params.spread'\?"),
        ('compute = "float16"', r"unknown key 'compute'; did you mean 'precision.compute'\?"),
        ("stage = 3", r"unknown key 'stage'; use preset, name, params"),
        ('params = { sprad = "x", spread = "y" }', r"'params.sprad'; did you mean 'spread'\?"),
        (
            'overrides = [{ unit = "a" }, { unit = "b", kep = "full" }]',
            r"'overrides\[1\].kep'; did you mean 'keep'\?",
        ),
        (
            'overrides = [{ unit = "a", params = { x = 1, spread = "y" } }]',
            r"unknown key 'overrides\[0\].params.x'; use spread.",
        ),
        ('overrides = [{ keep = "full" }]', r"lacks the key 'overrides\[0\].unit'"),
        ('params = "world"', r"'params' must be a table such as \{ spread = 'world' \}, not"),
        ('prefetch = "2"', r"In plan file p.toml, 'prefetch' must be a whole number, not '2'."),
        ("prefetch = 1.5", r"'prefetch' must be a whole number, not 1.5"),
        ("prefetch = true", r"'prefetch' must be a whole number, not True"),
        ("keep = 1", r"'keep' must be a string, not 1"),
        ('units = "h.*"', r"'units' must be an array, not 'h.\*'"),
        ("units = [1]", r"'units\[0\]' must be a string, not 1"),
        ('preset = "zero4"', r"In plan file p.toml, preset 'zero4' is unknown; did you mean 'zero"),
        ('preset = "x"', r"preset 'x' is unknown; use one of ddp"),
        ('keep_until = "ever"', r"In plan file p.toml: keep_until 'ever' is unknown"),
        ("prefetch = -1", r"In plan file p.toml: prefetch is -1"),
    ],
)
def test_mistakes_name_file_key_and_remedy(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as caught:
        parse_plan(text, origin="p.toml")
    assert len(str(caught.value).splitlines()) == 1


def test_all_mistakes_of_a_file_are_told() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan('kepe = 1\nprefetch = "2"', origin="p.toml")
    assert len(str(caught.value).splitlines()) == 2


def test_sources_that_are_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'zero33' is neither a preset .* did you mean 'zero3'\?"):
        load_plan("zero33")
    with pytest.raises(PlanError, match=r"absent.toml does not exist"):
        load_plan(tmp_path / "absent.toml")
    with pytest.raises(PlanError, match=r"cannot be read"):
        load_plan(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(PlanError, match=r"latin.toml cannot be read"):
        load_plan(tmp_path / "latin.toml")
    with pytest.raises(PlanError, match=r"presets are called"):
        load_plan(presets.zero3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "record"),
    [("", Plan), ("params", StatePlan), ("precision", Precision), ("overrides", Override)],
)
def test_files_know_every_field(key: str, record: type) -> None:
    known = set(TABLES[key].model_fields) - {"preset"}
    assert known == {field.name for field in fields(record)} - {"separate_memory"}
