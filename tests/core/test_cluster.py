"""Curves, and clusters that say what they do not know."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.core.cluster import Cluster, ClusterError, Curve, Device, LinkSpec
from shardwise.core.errors import PlanError
from shardwise.cost.file import load_cluster, parse_cluster

amounts = st.lists(st.integers(1, 10**12), min_size=2, max_size=8, unique=True).map(sorted)
times = st.floats(1e-6, 1e4)


@st.composite
def curves(draw: st.DrawFn, rising: bool = False) -> Curve:
    xs = draw(amounts)
    seconds = draw(st.lists(times, min_size=len(xs), max_size=len(xs)))
    return Curve(tuple(zip(xs, sorted(seconds) if rising else seconds, strict=True)))


@given(curves())
def test_a_curve_is_exact_at_its_points(curve: Curve) -> None:
    for amount, seconds in curve.points:
        assert curve.seconds(amount) == seconds


@given(curves(), st.floats(0, 1))
def test_a_curve_stays_between_neighbours(curve: Curve, part: float) -> None:
    for (a, s), (b, t) in pairwise(curve.points):
        found = curve.seconds(a + part * (b - a))
        assert min(s, t) <= found * (1 + 1e-9)
        assert found <= max(s, t) * (1 + 1e-9)


@given(curves(rising=True), st.floats(0, 1e13), st.floats(0, 1e13))
def test_more_takes_no_less_time_where_points_rise(curve: Curve, one: float, two: float) -> None:
    less, more = sorted((one, two))
    assert curve.seconds(less) <= curve.seconds(more) * (1 + 1e-9)


@given(curves(), st.floats(0, 1e12), st.floats(0, 1e12))
def test_beyond_the_last_point_more_takes_more(curve: Curve, one: float, two: float) -> None:
    """Even where noise bends the last measured piece down."""
    last = curve.points[-1][0]
    less, more = sorted((last + one, last + two))
    assume(more > less * (1 + 1e-6))
    assert curve.seconds(less) < curve.seconds(more)


@given(curves(), st.floats(0, 1))
def test_below_the_first_point_is_the_price_of_asking(curve: Curve, part: float) -> None:
    amount, seconds = curve.points[0]
    assume(part * amount > 0)
    assert curve.seconds(part * amount) == seconds
    assert curve.seconds(0) == 0


@given(st.floats(1e3, 1e15), st.floats(0, 1), st.floats(1, 1e15))
def test_a_rate_is_a_straight_line(rate: float, latency: float, amount: float) -> None:
    curve = Curve.of_rate(rate, latency)
    assert curve.seconds(amount) == pytest.approx(latency + amount / rate)
    assert curve.rate(amount) == pytest.approx(amount / (latency + amount / rate))


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((1, 1.0),),
        ((1, 1.0), (1, 2.0)),
        ((2, 1.0), (1, 2.0)),
        ((1, -1.0), (2, 1.0)),
        ((1, 0.0), (2, 0.0)),
    ],
)
def test_a_curve_that_cannot_be(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ClusterError, match="curve"):
        Curve(points)


LINE = Curve.of_rate(1e9)
DEVICE = Device(
    name="toy",
    kind="cuda",
    memory_bytes=10**9,
    forward={"float32": LINE, "float16": LINE},
    backward={"float32": Curve.of_rate(5e8)},
    update=LINE,
    copy=LINE,
    encode={"int8": LINE},
)


def cluster(*sizes: int) -> Cluster:
    names = ("node", "rack", "world") if len(sizes) == 3 else ("node", "world")
    levels = tuple(
        LinkSpec(name=name, size=size, bandwidth=1e9, latency_s=1e-6)
        for name, size in zip(names, sizes, strict=True)
    )
    return Cluster(name="toy", levels=levels, device=DEVICE)


def test_forward_and_backward_have_speeds_of_their_own() -> None:
    assert DEVICE.compute("float32", 1e9) == 1.0
    assert DEVICE.compute("float32", 1e9, backward=True) == 2.0


def test_an_unknown_speed_is_an_error_that_says_what_is_known() -> None:
    with pytest.raises(ClusterError, match=r"'toy' has no compute speed for bfloat16 .*float32"):
        DEVICE.compute("bfloat16", 1.0)
    with pytest.raises(ClusterError, match="no compute speed for float16"):
        DEVICE.compute("float16", 1.0, backward=True)
    with pytest.raises(ClusterError, match=r"no encode speed for int4 \(it has int8\)"):
        DEVICE.code("int4", 1)
    with pytest.raises(ClusterError, match=r"no decode speed for int8 \(it has none\)"):
        DEVICE.code("int8", 1, decodes=True)


@pytest.mark.parametrize(
    "known", [{}, {"bandwidth": 1e9}, {"latency_s": 1e-6}, {"gather": LINE}, {"reduce": LINE}]
)
def test_a_level_needs_speeds_unless_it_has_one_member(known: dict) -> None:
    LinkSpec(name="node", size=1, **known)
    with pytest.raises(ClusterError, match="Level 'node' of the cluster has neither"):
        LinkSpec(name="node", size=2, **known)


def test_a_level_is_rated_or_measured() -> None:
    LinkSpec(name="node", size=2, bandwidth=1e9, latency_s=1e-6)
    LinkSpec(name="node", size=2, gather=LINE, reduce=LINE)


def test_a_larger_world_needs_a_link_that_is_known() -> None:
    alone = LinkSpec(name="world", size=1)
    node = LinkSpec(name="node", size=2, bandwidth=1e9, latency_s=1e-6)
    lonely = Cluster(name="toy", levels=(node, alone), device=DEVICE)
    with pytest.raises(ClusterError, match="Level 'world'"):
        lonely.with_world(4)


def test_ranks() -> None:
    three = cluster(2, 3, 4)
    assert three.world == 24
    assert three.ranks_per_node == 2
    assert [three.ranks_inside(name) for name in ("node", "rack", "world")] == [1, 2, 6]
    assert three.level("rack").size == 3


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_another_world_keeps_whole_nodes_or_is_part_of_one(
    inner: int, outer: int, world: int
) -> None:
    before = cluster(inner, outer)
    if world % inner == 0 or inner % world == 0:
        after = before.with_world(world)
        assert after.world == world
        assert after.levels[0].size == min(inner, world)
    else:
        with pytest.raises(ClusterError, match=f"cannot have {world} ranks"):
            before.with_world(world)


def test_levels_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError):
        cluster(0, 2)


def test_a_hop_among_fewer_or_more_members_has_fewer_or_more_latencies() -> None:
    curve = Curve(((1000, 0.003), (2000, 0.004), (4000, 0.006)))
    level = LinkSpec(name="world", size=4, gather=curve, reduce=curve)
    assert level.measured(2000, 4, reduces=False) == pytest.approx(0.004)
    assert level.measured(2000, 2, reduces=True) == pytest.approx(0.004 - 2 * 0.001)
    assert level.measured(1000, 2, reduces=False) == pytest.approx(0.001)
    larger = level.resized(10)
    assert (larger.size, larger.gather.points[1]) == (10, (2000, pytest.approx(0.010)))
    assert larger.measured(2000, 4, reduces=False) == pytest.approx(0.004)
    assert level.resized(1).size == 1
    rated = LinkSpec(name="world", size=4, bandwidth=1.0, latency_s=1.0)
    assert rated.measured(1, 4, reduces=False) is None
    assert rated.resized(8) == replace(rated, size=8)


def test_ranks_of_a_node_share_its_host_whatever_is_inside() -> None:
    def per_node(levels: str) -> int:
        base = LinkSpec(name="", size=1, bandwidth=1.0, latency_s=1.0)
        sizes = dict(text.split("=") for text in levels.split(","))
        specs = tuple(replace(base, name=name, size=int(size)) for name, size in sizes.items())
        return replace(load_cluster("dgx-a100"), levels=specs).ranks_per_node

    assert per_node("node=8,world=4") == 8
    assert per_node("island=4,node=2,world=8") == 8
    assert per_node("rack=4,world=8") == 4
    assert per_node("world=8") == 8


def test_an_unknown_latency_is_an_error() -> None:
    alone = replace(load_cluster("dgx-a100"), levels=(LinkSpec(name="world", size=1),))
    with pytest.raises(ClusterError, match=r"The latency of level 'world' .* is unknown"):
        alone.with_bandwidth("world", 1e9)


FILE = """
name = "mine"
[[levels]]
name = "world"
size = 4
bandwidth = 1e9
latency_s = 1e-5
busy = 0.1
[device]
name = "device"
kind = "cuda"
memory = "10 GB"
memory_bandwidth = 1e12
flops = { float32 = 1e13 }
[host]
memory = "10 GB"
bandwidth = 1e10
[disk]
size = "1 TB"
read = 1e9
write = 1e9
"""


def test_a_file_that_can_be_read() -> None:
    assert parse_cluster(FILE).world == 4


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("bandwidth = 1e9", "bandwidth = 0", "levels.0.bandwidth.*greater than 0"),
        ("bandwidth = 1e9", "bandwidth = nan", "levels.0.bandwidth"),
        ("bandwidth = 1e9", "bandwidth = -1", "levels.0.bandwidth"),
        ("bandwidth = 1e10", "bandwidth = 0", "host.bandwidth"),
        ("read = 1e9", "read = 0", "disk.read"),
        ("busy = 0.1", "busy = 1.5", "levels.0.busy"),
        ("busy = 0.1", "", "does not tell how busy"),
        ("size = 4", "size = 0", "levels.0.size"),
        ('kind = "cuda"', 'kind = "CPU"', "device.kind"),
        ("float32 = 1e13", "float32 = 0", "device.flops.float32"),
    ],
)
def test_a_file_with_an_impossible_figure(before: str, after: str, message: str) -> None:
    assert before in FILE
    with pytest.raises(ClusterError, match=message):
        parse_cluster(FILE.replace(before, after))
