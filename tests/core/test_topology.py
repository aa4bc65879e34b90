"""The grid: names, spreads, and the ladder's promises for any levels."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import PlanError
from shardwise.core.topology import Interval, Ladder, Level, Topology, divisors

NAMES = ("node", "rack", "site", "world")


@st.composite
def ladders(draw: st.DrawFn) -> tuple[Topology, Ladder]:
    """Any grid of 1 to 4 levels, with a ladder whose spreads may stop inside levels."""
    sizes = draw(
        st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda s: prod(s) <= 160)
    )
    topology = Topology(tuple(map(Level, NAMES, sizes)))
    factors, inside = [], 1
    for size in sizes:
        count = draw(st.sampled_from(divisors(size)))
        factors += [inside * count, inside * draw(st.sampled_from(divisors(count)))]
        inside *= size
    return topology, topology.ladder(tuple(factors))


def test_ranks_count_the_innermost_level_first() -> None:
    ladder = Topology.parse("node=2,world=3").ladder(())
    node, world = ladder.steps
    assert (node.coordinate(5), world.coordinate(5)) == (1, 2)
    assert node.group(5) == (4, 5)
    assert world.group(5) == (1, 3, 5)


def test_node_position_is_the_most_significant_digit() -> None:
    ladder = Topology.parse("node=2,world=2").ladder(())
    assert [ladder.interval(rank, 1, 8).start for rank in range(4)] == [0, 4, 0, 4]
    assert [ladder.interval(rank, 2, 8).start for rank in range(4)] == [0, 4, 2, 6]


@pytest.mark.parametrize(
    ("levels", "spread", "factor"),
    [
        ("node=8,world=16", "none", 1),
        ("node=8,world=16", "node:1", 1),
        ("node=8,world=16", "node:2", 2),
        ("node=8,world=16", "node", 8),
        ("node=8,world=16", "world:1", 8),
        ("node=8,world=16", "world:4", 32),
        ("node=8,world=16", "world", 128),
        ("island=4,rack=3", "node", 4),
        ("island=4,rack=3", "node:2", 2),
        ("island=4,rack=3", "world", 12),
        ("island=4,rack=3", "world:4", 4),
        ("island=4,node=2,world=2", "node", 8),
        ("world=1", "node", 1),
        ("world=1", "world", 1),
    ],
)
def test_factor(levels: str, spread: str, factor: int) -> None:
    assert Topology.parse(levels).factor(spread) == factor


@pytest.mark.parametrize("spread", ["", "rack", "full", "node:3", "node:0", "node:", "node:²"])
def test_bad_spreads_name_the_choices(spread: str) -> None:
    with pytest.raises(PlanError, match=r"use (none or node, world|one of node:1)"):
        Topology.parse("node=4,world=2").factor(spread)


@pytest.mark.parametrize(
    ("levels", "problem"),
    [
        ("", "is not NAME=SIZE"),
        ("node", "is not NAME=SIZE"),
        ("node=two", "is not NAME=SIZE"),
        ("node=²", "is not NAME=SIZE"),
        ("node=2;world=2", "is not NAME=SIZE"),
        ("node=0", "at least 1"),
        ("full=2", "cannot name a level"),
        ("my node=2", "cannot name a level"),
        ("node=2,node=2", "must differ"),
        ("world=2,rack=2", "must be the last"),
    ],
)
def test_bad_levels(levels: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Topology.parse(levels)


def test_a_topology_needs_a_level() -> None:
    with pytest.raises(PlanError, match="needs at least one level"):
        Topology(())


def test_parse_and_str_are_inverse() -> None:
    assert str(Topology.parse(" node=2, world=3 ")) == "node=2,world=3"


def test_factors_inside_a_level_must_divide_each_other() -> None:
    with pytest.raises(PlanError, match="divides the other"):
        Topology.parse("node=6").ladder((2, 3))


def test_rung_of_an_unknown_factor() -> None:
    with pytest.raises(PlanError, match="No rung"):
        Topology.parse("node=4").ladder(()).rung(2)


@given(ladders())
def test_rungs_go_from_full_to_one_part_a_rank(grid: tuple[Topology, Ladder]) -> None:
    topology, ladder = grid
    assert ladder.parts[0] == 1
    assert ladder.parts[-1] == topology.world
    assert ladder.parts[ladder.bottom] == topology.world
    assert all(step.size > 1 for step in ladder.steps)
    assert [ladder.rung(parts) for parts in ladder.parts] == list(range(ladder.bottom + 1))


@given(ladders(), st.integers(1, 3))
def test_each_rung_covers_the_flat_once_a_replica(
    grid: tuple[Topology, Ladder], blocks: int
) -> None:
    topology, ladder = grid
    numel = blocks * topology.world
    for rung, parts in enumerate(ladder.parts):
        owned = [ladder.interval(rank, rung, numel) for rank in range(topology.world)]
        tiles = sorted(set(owned), key=lambda interval: interval.start)
        assert [tile.start for tile in tiles] == [i * numel // parts for i in range(parts)]
        assert all(left.stop == right.start for left, right in pairwise(tiles))
        assert tiles[-1].stop == numel
        assert all(owned.count(tile) == topology.world // parts for tile in tiles)


@given(ladders())
def test_the_bottom_index_is_a_bijection(grid: tuple[Topology, Ladder]) -> None:
    topology, ladder = grid
    indices = {ladder.index(rank, ladder.bottom) for rank in range(topology.world)}
    assert indices == set(range(topology.world))


@given(ladders())
def test_ownership_is_nested(grid: tuple[Topology, Ladder]) -> None:
    topology, ladder = grid
    for rank in range(topology.world):
        owned = [ladder.interval(rank, rung, topology.world) for rung in range(ladder.bottom + 1)]
        for outer, inner in pairwise(owned):
            assert outer.intersect(inner) == inner


@given(ladders())
def test_hop_groups_partition_the_ranks(grid: tuple[Topology, Ladder]) -> None:
    topology, ladder = grid
    for step in ladder.steps:
        groups = {step.group(rank) for rank in range(topology.world)}
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
        for rank in range(topology.world):
            assert step.group(rank)[step.coordinate(rank)] == rank


@given(ladders())
def test_the_pieces_of_a_hop_are_contiguous_and_in_order(grid: tuple[Topology, Ladder]) -> None:
    topology, ladder = grid
    for rung, step in enumerate(ladder.steps):
        for rank in range(topology.world):
            group = step.group(rank)
            pieces = [ladder.interval(peer, rung + 1, topology.world) for peer in group]
            assert all(left.stop == right.start for left, right in pairwise(pieces))
            whole = Interval(pieces[0].start, pieces[-1].stop)
            assert {ladder.interval(peer, rung, topology.world) for peer in group} == {whole}


@given(*(st.integers(0, 20),) * 4)
def test_intersection(a: int, b: int, c: int, d: int) -> None:
    one, other = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    common = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    both = one.intersect(other)
    assert both.numel == len(common)
    if common:
        assert set(range(both.start, both.stop)) == common


def test_relative_to() -> None:
    assert list(range(10, 20))[Interval(12, 15).relative_to(10)] == [12, 13, 14]
