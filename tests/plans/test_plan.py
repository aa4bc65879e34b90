"""Plans resolve to rungs; presets say what their papers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.topology import Level, Topology
from shardwise.plans import presets
from shardwise.plans.plan import Override, Plan, Precision, StatePlan, keep_factor, resolve
from shardwise.plans.validate import violations

GRID = Topology.parse("node=2,world=3")

TOPOLOGIES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
    lambda sizes: Topology(tuple(map(Level, ("node", "rack", "site", "world"), sizes)))
)


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (presets.ddp(), (1, 1, 1, 1)),
        (presets.zero1(), (1, 1, 6, 1)),
        (presets.zero2(), (1, 6, 6, 1)),
        (presets.zero3(), (6, 6, 6, 6)),
        (presets.zero3(keep="node"), (6, 6, 6, 2)),
        (presets.fsdp(), (6, 6, 6, 6)),
        (presets.fsdp(reshard_after_forward=False), (6, 6, 6, 1)),
        (presets.hsdp(), (2, 2, 2, 2)),
        (presets.hsdp(keep="full"), (2, 2, 2, 1)),
        (presets.mics(), (2, 2, 2, 2)),
        (presets.mics("world:3"), (6, 6, 6, 6)),
        (presets.amsp(), (2, 2, 6, 2)),
    ],
)
def test_presets_rest_where_they_should(plan: Plan, parts: tuple[int, ...]) -> None:
    rungs = resolve(plan, GRID, "h.0")
    found = (rungs.params, rungs.grads, rungs.optim, rungs.keep)
    assert tuple(rungs.ladder.parts[rung] for rung in found) == parts
    assert rungs.bottom == rungs.ladder.bottom


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_know_their_name_and_take_a_precision(name: str) -> None:
    precision = Precision(compute="bfloat16")
    assert presets.PRESETS[name]().name == name
    assert presets.PRESETS[name]().precision == Precision()
    assert getattr(presets, name)(precision=precision).precision is precision


@given(TOPOLOGIES)
def test_every_preset_is_legal_everywhere(topology: Topology) -> None:
    variants = [preset() for preset in presets.PRESETS.values()]
    variants += [presets.zero3(keep="node"), presets.zero3(keep="full"), presets.hsdp(keep="full")]
    for plan in variants:
        assert violations(plan, topology) == []
        resolve(plan, topology, "")


@pytest.mark.parametrize("name", presets.PRESETS)
def test_on_one_rank_everything_is_full(name: str) -> None:
    rungs = resolve(presets.PRESETS[name](), Topology.parse("world=1"), "")
    assert (rungs.params, rungs.grads, rungs.optim, rungs.keep, rungs.bottom) == (0,) * 5


def test_a_spread_inside_a_level_cuts_it_in_two() -> None:
    rungs = resolve(presets.mics("node:4"), Topology.parse("node=8,world=2"), "")
    assert [(step.level, step.size) for step in rungs.ladder.steps] == [
        ("node", 4),
        ("node", 2),
        ("world", 2),
    ]


@pytest.mark.parametrize(
    ("keep", "factor"), [("none", 6), ("full", 1), ("node", 2), ("world", 6), ("world:1", 2)]
)
def test_keep_factor(keep: str, factor: int) -> None:
    assert keep_factor(presets.zero3(keep=keep), GRID) == factor


def test_later_overrides_win_field_by_field() -> None:
    plan = Plan(
        overrides=(
            Override(unit="h.*", keep="full", params=StatePlan(spread="node")),
            Override(unit="h.1", params=StatePlan(spread="world")),
        )
    )
    assert plan.for_unit("head") is plan
    assert plan.for_unit("h.0").params.spread == "node"
    assert plan.for_unit("h.1").params.spread == "world"
    assert plan.for_unit("h.1").keep == "full"
    assert plan.for_unit("h.1").optim == plan.optim
    assert plan.for_unit("h.10").params.spread == "node"


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        (Precision(), "float32", ("float32", "float32", "float32")),
        (Precision(), "bfloat16", ("bfloat16", "bfloat16", "float32")),
        (Precision(), "float64", ("float64", "float64", "float64")),
        (Precision(compute="bfloat16"), "float32", ("bfloat16", "bfloat16", "float32")),
        (
            Precision(compute="bfloat16", reduce="float32"),
            "float32",
            ("bfloat16", "float32", "float32"),
        ),
        (Precision(master="bfloat16"), "bfloat16", ("bfloat16", "bfloat16", "bfloat16")),
        (
            Precision(compute="bfloat16", reduce="float16", master="float32"),
            "complex64",
            ("complex64", "complex64", "complex64"),
        ),
    ],
)
def test_precision(precision: Precision, dtype: str, expected: tuple[str, str, str]) -> None:
    found = (
        precision.compute_dtype(dtype),
        precision.reduce_dtype(dtype),
        precision.master_dtype(dtype),
    )
    assert found == expected


def test_integers_are_never_cast() -> None:
    assert Precision(compute="bfloat16").compute_dtype("int64") == "int64"
