"""The grid of ranks: levels, spreads, and the ladder that every transfer walks on.

Ranks are numbered with the innermost level first: with ``node=2,world=3`` rank 5 is the second
rank (5 % 2) of the third node (5 // 2).

[Note: Ladder]
A *rung* says into how many parts a flat buffer is cut: rung 0 is the full buffer, each further
rung cuts every part of the rung above by the size of one *step*. Steps are the levels of the
topology, innermost first; a spread that stops inside a level cuts this level into two steps.
The position inside the innermost step is the most significant digit of the part's index, so the
part that a rank owns on a rung lies inside the part that it owns on the rung above: ownership is
nested, every hop moves contiguous memory, and nothing is ever reordered.
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
            raise PlanError("A topology needs a level; write for example world=1.")
        for level in self.levels:
            if level.size < 1:
                raise PlanError(
                    f"Level '{level.name}' has size {level.size}; it must be at least 1."
                )
            if not level.name.isidentifier() or level.name in ("none", "full"):
                raise PlanError(
                    f"'{level.name}' cannot name a level; use a word such as node, rack or world."
                )
        if len(set(names)) != len(names):
            raise PlanError(f"Level names must differ, got {', '.join(names)}.")
        if "world" in names[:-1]:
            raise PlanError(f"Level 'world' of {self} is not the last; it names the whole grid.")

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Reads ``node=2,world=2``.

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
        """Ranks that share a host: those up to the level that is called node, or of the innermost.

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
        """Number of parts that a spread cuts a state into.

        ``none`` is a full replica; a level's name fills this level and all inside it;
        ``level:n`` stops inside the level after n of its members. ``node`` and ``world`` are
        always understood: where no level has the name, the innermost level and the whole grid.

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
                        f"Factors {low} and {high} do not divide each other inside level "
                        f"'{level.name}' of {self}."
                    )
                steps.append(Step(level.name, high // low, low))
            stride = outer
        return Ladder(tuple(steps))


@dataclass(frozen=True, slots=True)
class Step:
    """One hop's worth of the ladder: ``size`` ranks, ``stride`` apart, on the link of ``level``."""

    level: str
    size: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """Position of a rank among the members of its hop."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that meet ``rank`` on this hop, in order of their coordinate."""
        base = rank - self.coordinate(rank) * self.stride
        return tuple(base + i * self.stride for i in range(self.size))


@dataclass(frozen=True)
class Ladder:
    """Steps of one state chain; see [Note: Ladder]. Rung k lies below the first k steps."""

    steps: tuple[Step, ...]

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Number of parts on each rung, from 1 (full) to the number of ranks."""
        counts = [1]
        for step in self.steps:
            counts.append(counts[-1] * step.size)
        return tuple(counts)

    @property
    def bottom(self) -> int:
        """The finest rung: one part a rank."""
        return len(self.steps)

    def rung(self, factor: int) -> int:
        """The rung that has ``factor`` parts."""
        if factor not in self.parts:
            raise PlanError(f"No rung of this ladder has {factor} parts; it has {self.parts}.")
        return self.parts.index(factor)

    def index(self, rank: int, rung: int) -> int:
        """Which part of the rung a rank owns."""
        index = 0
        for step in self.steps[:rung]:
            index = index * step.size + step.coordinate(rank)
        return index

    def interval(self, rank: int, rung: int, padded_numel: int) -> "Interval":
        """The interval of a flat buffer of ``padded_numel`` elements that a rank owns on a rung."""
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
        """What both have in common; empty intervals have ``numel`` 0.

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
