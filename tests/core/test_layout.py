"""Flats: every parameter has its place, and every rung cuts every flat evenly."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layout import ALIGN, ModelSpec, ParamSpec, lay_out, padded

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
"""Includes scalars () and empty parameters."""

PARAMS = st.lists(
    st.tuples(SHAPES, st.sampled_from(["float32", "bfloat16"]), st.booleans()), max_size=8
).map(lambda rows: [ParamSpec(f"p{i}", *row) for i, row in enumerate(rows)])


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_padding_is_the_least_that_divides(numel: int, world: int) -> None:
    size = padded(numel, world)
    assert size % (ALIGN * world) == 0
    assert size >= max(numel, 1)
    assert size - ALIGN * world < max(numel, 1)


@given(PARAMS, st.integers(1, 40))
def test_every_parameter_has_one_slot(params: list[ParamSpec], world: int) -> None:
    unit = lay_out("unit", params, world)
    placed = [slot.param for flat in unit.flats for slot in flat.slots]
    assert sorted(placed, key=lambda p: p.name) == sorted(params, key=lambda p: p.name)
    assert unit.numel == sum(param.numel for param in params)
    assert ModelSpec((unit, unit)).numel == 2 * unit.numel


@given(PARAMS, st.integers(1, 40))
def test_slots_lie_end_to_end_in_uniform_flats(params: list[ParamSpec], world: int) -> None:
    unit = lay_out("unit", params, world)
    kinds = [(flat.dtype, flat.requires_grad) for flat in unit.flats]
    assert len(set(kinds)) == len(kinds)
    for flat in unit.flats:
        kind = (flat.dtype, flat.requires_grad)
        assert {(slot.param.dtype, slot.param.requires_grad) for slot in flat.slots} == {kind}
        assert flat.slots[0].interval.start == 0
        pairs = pairwise(slot.interval for slot in flat.slots)
        assert all(left.stop == right.start for left, right in pairs)
        assert all(slot.interval.numel == slot.param.numel for slot in flat.slots)
        assert flat.numel == padded(flat.slots[-1].interval.stop, world)


def test_a_scalar_has_one_element_and_an_empty_unit_no_flat() -> None:
    assert ParamSpec("scale", (), "float32").numel == 1
    assert lay_out("empty", [], 4).flats == ()
