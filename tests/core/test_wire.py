"""Formats and wires: their text, their errors, and the one formula for bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import PlanError
from shardwise.core.wire import BLOCKS, Format, Wire, row_bytes, wire_bytes

blocked = st.builds(
    Format,
    kind=st.sampled_from(["int8", "int4"]),
    block=st.sampled_from([0, *BLOCKS]),
    minmax=st.booleans(),
    feedback=st.booleans(),
    delta=st.booleans(),
)
casts = st.builds(
    Format,
    kind=st.sampled_from(["bf16", "fp16"]),
    feedback=st.booleans(),
    delta=st.booleans(),
)
formats = blocked | casts | st.just(Format("fp32"))
wires = st.builds(
    Wire,
    st.none() | formats,
    st.dictionaries(st.sampled_from(["node", "rack", "world"]), formats).map(
        lambda named: tuple(named.items())
    ),
)


@given(formats)
def test_a_format_survives_its_text(spec: Format) -> None:
    assert Format.parse(str(spec)) == spec


@given(wires)
def test_a_wire_survives_its_text(wire: Wire) -> None:
    assert Wire.parse(str(wire)) == wire
    assert bool(wire) == bool(str(wire))


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("int8", Format("int8", 256), "int8"),
        ("int4", Format("int4", 128), "int4"),
        ("int4/64", Format("int4", 64), "int4/64"),
        ("int4/128/minmax", Format("int4", 128), "int4"),
        ("int4/symmetric", Format("int4", 128, minmax=False), "int4/symmetric"),
        (" int4 / delta / 64 ", Format("int4", 64, delta=True), "int4/64/delta"),
        ("int4/feedback", Format("int4", feedback=True), "int4/feedback"),
        ("bf16", Format("bf16"), "bf16"),
    ],
)
def test_texts_of_formats(text: str, spec: Format, canonical: str) -> None:
    assert Format.parse(text) == spec
    assert str(spec) == canonical


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("int9", ["'int9'", "int8"]),
        ("bfloat16", ["'bfloat16'", "bf16"]),
        ("quux", ["'quux'", "fp32, bf16, fp16, int8, int4"]),
        ("", ["''", "int8"]),
        ("int4/simetric", ["'simetric'", "symmetric"]),
        ("int4/65", ["65", "int4/64"]),
        ("int8/16", ["16", "int8/32"]),
        ("int8/8192", ["8192", "int8/4096"]),
        ("int8/0", ["no element", "int8/256"]),
        ("int4/64/32", ["twice"]),
        ("int4/minmax/symmetric", ["twice"]),
        ("bf16/64", ["bf16", "cast"]),
        ("fp16/symmetric", ["fp16", "cast"]),
        ("fp16/minmax", ["fp16", "cast"]),
        ("fp32/delta", ["fp32", "delta"]),
        ("int8/-64", ["'-64'"]),
    ],
)
def test_a_bad_format_is_one_sentence_that_helps(text: str, named: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        Format.parse(text)
    for part in named:
        assert part in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("node=int8,int4,int8", "two formats for every level"),
        ("node=int8,node=int4", "twice"),
        ("=int8", "names no level"),
        ("node=int8,", "'' in ''"),
        ("my node=int8", "'my node'"),
        ("node=world=int8", "'node=world'"),
    ],
)
def test_a_bad_wire_says_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        Wire.parse(text)


def test_formats_by_level() -> None:
    assert Wire.parse("").at("node") is None
    assert Wire.parse("int8").at("anything") == Format("int8")
    by_level = Wire.parse("node=int8, world=int4/64")
    assert by_level.at("world") == Format("int4", 64)
    assert by_level.at("rack") is None
    assert by_level.levels == ("node", "world")
    both = Wire.parse("int4,node=int8")
    assert (both.at("rack"), both.at("node")) == (Format("int4"), Format("int8"))
    assert both.formats == (Format("int4"), Format("int8"))


def test_node_is_the_innermost_level_unless_that_is_named() -> None:
    wire = Wire.parse("int4,node=int8,rack=bf16")
    assert wire.at("island", innermost=True) == Format("int8")
    assert wire.at("island") == Format("int4")
    assert wire.at("rack", innermost=True) == Format("bf16")


def test_what_loses() -> None:
    assert Format("int8").is_lossy("bfloat16")
    assert not Format("fp32").is_lossy("float16")
    assert Format("fp32").is_lossy("float64")
    assert Format("bf16").is_lossy("float16")
    assert Format("fp16").is_lossy("bfloat16")
    assert not Wire.parse("node=fp32").is_lossy()
    assert Wire.parse("node=fp32,world=bf16").is_lossy()


@pytest.mark.parametrize(
    ("text", "numel", "nbytes"),
    [
        ("fp32", 3, 12),
        ("bf16", 3, 6),
        ("fp16", 0, 0),
        ("int8", 0, 0),
        ("int8", 256, 260),
        ("int8", 512, 520),
        ("int8", 513, 520 + 5),
        ("int8/symmetric", 256, 258),
        ("int4", 128, 68),
        ("int4", 131, 68 + 2 + 4),
        ("int4/symmetric", 128, 66),
        ("int4/32", 96, 3 * 20),
    ],
)
def test_bytes(text: str, numel: int, nbytes: int) -> None:
    assert wire_bytes(Format.parse(text), numel) == nbytes


@given(blocked, st.integers(0, 20), st.integers(0, 5000))
def test_whole_rows_add_up(spec: Format, rows: int, numel: int) -> None:
    whole = wire_bytes(spec, rows * spec.block)
    assert whole == rows * row_bytes(spec, spec.block) == rows * spec.block * spec.bits / 8
    assert wire_bytes(spec, rows * spec.block + numel) == whole + wire_bytes(spec, numel)
