"""The grid of ranks: levels, spreads, and the ladder that every transfer walks on.

Ranks are numbered with the innermost level first: with ``node=2,world=3`` rank 5 is the second
rank (5 % 2) of the third node (5 // 2).

[Note: Ladder]
A *rung* is how finely a flat buffer is sharded: rung 0 is the full buffer, and each further rung
cuts every shard of the rung above by the size of one *step*. Steps are the levels of the topology,
innermost first; a spread that stops inside a level cuts this level into two steps. The position in
the innermost step is the most significant digit of a shard's index, so a rank's shard on a rung is
part of its shard on the rung above: ownership is nested, every hop moves contiguous memory, and
nothing is ever reordered.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from shardwise.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Level:
    """One ring of the grid: ``size`` members joined by one kind of link."""

    name: str
    size: int


@dataclass(frozen=True)
class Topology:
    """Levels of the grid, innermost link first."""

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names:
            raise PlanError("A topology needs at least one level; write for example world=1.")
        for level in self.levels:
            if level.size < 1:
                raise PlanError(f"Level '{level.name}' has size {level.size}; use at least 1.")
            if not level.name.isidentifier() or level.name in ("none", "full"):
                raise PlanError(
                    f"'{level.name}' cannot name a level; use a word such as node, rack or world."
                )
        if len(set(names)) != len(names):
            raise PlanError(f"Level names must differ, got {', '.join(names)}.")
        if "world" in names[:-1]:
            raise PlanError(f"Level 'world' of {self} must be the last; it names the whole grid.")

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parse a text such as ``node=2,world=2``.

        >>> Topology.parse("node=2,world=3").world
        6
        """
        levels = []
        for item in text.split(","):
            name, _, size = item.strip().partition("=")
            if not size.isdecimal():
                raise PlanError(
                    f"'{item.strip()}' in levels '{text}' is not NAME=SIZE; "
                    "write for example node=2,world=2 (innermost first)."
                )
            levels.append(Level(name, int(size)))
        return cls(tuple(levels))

    def __str__(self) -> str:
        return ",".join(f"{level.name}={level.size}" for level in self.levels)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(level.size for level in self.levels)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host: up to the level named node, otherwise the innermost level.

        >>> grids = ("world=4", "node=2,world=4", "socket=4,node=2,world=4", "island=4,node=2")
        >>> [Topology.parse(grid).ranks_per_node for grid in grids]
        [4, 2, 8, 8]
        """
        if len(self.levels) == 1:
            return self.world
        names = [level.name for level in self.levels]
        inside = names.index("node") if "node" in names else 0
        return prod(level.size for level in self.levels[: inside + 1])

    def factor(self, spread: str) -> int:
        """Number of shards into which a spread cuts a state.

        ``none`` is a full replica; a level's name includes this level and all levels inside it;
        ``level:n`` stops inside the level after n of its members. ``node`` and ``world`` are
        always understood: if no level has the name, as the innermost level and the whole grid.

        >>> grid = Topology.parse("node=8,world=16")
        >>> [grid.factor(s) for s in ("none", "node:4", "node", "world:2", "world")]
        [1, 4, 8, 16, 128]
        """
        if spread == "none":
            return 1
        name, colon, count = spread.partition(":")
        index = self._level_index(name, spread)
        inside = prod(level.size for level in self.levels[:index])
        size = self.levels[index].size
        if name == "world" and self.levels[index].name != "world":
            inside, size = 1, self.world
        if not colon:
            return inside * size
        if not count.isdecimal() or int(count) < 1 or size % int(count):
            raise PlanError(
                f"Spread '{spread}' does not divide level {name}={size}; "
                f"use one of {', '.join(f'{name}:{d}' for d in divisors(size))}."
            )
        return inside * int(count)

    def _level_index(self, name: str, spread: str) -> int:
        names = [level.name for level in self.levels]
        if name in names:
            return names.index(name)
        if name == "node":
            return 0
        if name == "world":
            return len(names) - 1
        raise PlanError(
            f"Spread '{spread}' names no level of {self}; use none or {', '.join(names)}."
        )

    def ladder(self, factors: tuple[int, ...]) -> "Ladder":
        """The ladder whose rungs include every factor in ``factors``."""
        steps: list[Step] = []
        stride = 1
        for level in self.levels:
            inner, outer = stride, stride * level.size
            cuts = sorted({inner, outer, *(f for f in factors if inner < f < outer)})
            for low, high in pairwise(cuts):
                if high % low:
                    raise PlanError(
                        f"Neither of the factors {low} and {high} divides the other inside level "
                        f"'{level.name}' of {self}."
                    )
                steps.append(Step(level.name, high // low, low))
            stride = outer
        return Ladder(tuple(steps))


@dataclass(frozen=True, slots=True)
class Step:
    """One hop of the ladder: ``size`` ranks, ``stride`` apart, on the links of ``level``."""

    level: str
    size: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """Position of a rank among the members of its hop."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks of ``rank``'s group on this hop, in order of their coordinate."""
        base = rank - self.coordinate(rank) * self.stride
        return tuple(base + i * self.stride for i in range(self.size))


@dataclass(frozen=True)
class Ladder:
    """The steps of a chain of spreads; see [Note: Ladder]. Rung k lies below the first k steps."""

    steps: tuple[Step, ...]

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Number of shards on each rung, from 1 (full) to the number of ranks."""
        counts = [1]
        for step in self.steps:
            counts.append(counts[-1] * step.size)
        return tuple(counts)

    @property
    def bottom(self) -> int:
        """The finest rung: one shard per rank."""
        return len(self.steps)

    def rung(self, factor: int) -> int:
        """The rung that has ``factor`` shards."""
        if factor not in self.parts:
            raise PlanError(f"No rung of this ladder has {factor} shards; it has {self.parts}.")
        return self.parts.index(factor)

    def index(self, rank: int, rung: int) -> int:
        """The index of a rank's shard on a rung."""
        index = 0
        for step in self.steps[:rung]:
            index = index * step.size + step.coordinate(rank)
        return index

    def interval(self, rank: int, rung: int, padded_numel: int) -> "Interval":
        """A rank's shard on a rung, as an interval of a flat of ``padded_numel`` elements."""
        part = padded_numel // self.parts[rung]
        start = self.index(rank, rung) * part
        return Interval(start, start + part)


@dataclass(frozen=True, slots=True)
class Interval:
    """A half-open range of elements of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: "Interval") -> "Interval":
        """The elements in both intervals; empty intervals have ``numel`` 0.

        >>> Interval(0, 4).intersect(Interval(2, 9))
        Interval(start=2, stop=4)
        """
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def relative_to(self, origin: int) -> slice:
        """This interval as a slice of a buffer that begins at ``origin``."""
        return slice(self.start - origin, self.stop - origin)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
