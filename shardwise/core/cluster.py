"""A cluster as the planner sees it: the speeds of its links, devices, hosts and disks.

Times are curves over amounts, measured by ``shardwise probe`` or derived from cited rates. An
unknown figure is None, and asking for it is an error: an unknown speed is never taken for zero.

[Note: All at once]
Every figure is what one rank gets while all ranks of its node do the same, because that is how
training uses a machine. A link's ``bandwidth`` is that of one member of its level (a device in a
node, a node in a cluster), one-way; the ranks inside a member share it.
"""

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from shardwise.core.errors import PlanError
from shardwise.core.topology import Level, Topology


class ClusterError(PlanError):
    """The description of a cluster lacks a figure, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by amount: linear between known points, and beyond the last one.

    Amounts below the first point take as long as the first: it is the cost of any request.

    >>> curve = Curve(((1000, 2.0), (2000, 3.0)))
    >>> [curve.seconds(amount) for amount in (0, 1000, 1500, 4000)]
    [0.0, 2.0, 2.5, 5.0]
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if len(amounts) < 2 or any(b <= a for a, b in pairwise(amounts)):
            raise ClusterError("A curve needs at least two points, in ascending order of amounts.")
        if any(seconds < 0 for _, seconds in self.points) or self.points[-1][1] <= 0:
            raise ClusterError("The times of a curve must be seconds, the last one positive.")

    @classmethod
    def of_rate(cls, rate: float, latency_s: float = 0.0) -> "Curve":
        """The curve of an amount per second, after a latency.

        >>> Curve.of_rate(100.0, 0.5).seconds(200)
        2.5
        """
        return cls(((0.0, latency_s), (rate, latency_s + 1.0)))

    @classmethod
    def median(cls, visits: "Sequence[Curve]") -> "Curve":
        """The median of several measurements, at the amounts of the one with the fewest points.

        >>> Curve.median([Curve(((1, s), (2, 3.0))) for s in (1.0, 0.2, 1.1)]).points
        ((1, 1.0), (2, 3.0))
        """
        fewest = min(visits, key=lambda visit: len(visit.points))
        return cls(
            tuple(
                (amount, statistics.median(visit.seconds(amount) for visit in visits))
                for amount, _ in fewest.points
            )
        )

    def seconds(self, amount: float) -> float:
        """How long an amount takes; zero takes no time."""
        if amount <= 0:
            return 0.0
        first, last = self.points[0], self.points[-1]
        if amount <= first[0]:
            return first[1]
        if amount >= last[0]:
            before = self.points[-2]
            slope = (last[1] - before[1]) / (last[0] - before[0])
            # Noise may make the last segment fall; a larger amount never takes less time.
            return last[1] + (amount - last[0]) * max(slope, 0.5 * last[1] / last[0])
        right = bisect_right(self.points, amount, key=lambda point: point[0])
        (a, s), (b, t) = self.points[right - 1], self.points[right]
        return s + (t - s) * (amount - a) / (b - a)

    def rate(self, amount: float) -> float:
        """Amount per second for transfers of this amount."""
        return amount / self.seconds(amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The links of one level, between the ``size`` members that it joins."""

    name: str
    size: int
    bandwidth: float | None = None
    """Bytes per second out of one member, one-way, all of its ranks together."""
    latency_s: float | None = None
    """Seconds of the shortest message."""
    gather: Curve | None = None
    """Measured: seconds of an all-gather hop by the bytes that each rank sends."""
    reduce: Curve | None = None
    """Likewise for a reduce-scatter hop, including the sums."""
    busy: float = 0.0
    """Share of the compute resource that hops take while they run, from 0 to 1: of the host's
    processors if they compute, else of the GPU's multiprocessors, whose kernels transfer data."""
    source: str = ""

    def __post_init__(self) -> None:
        rated = self.bandwidth is not None and self.latency_s is not None
        measured = self.gather is not None and self.reduce is not None
        if self.size > 1 and not rated and not measured:
            raise ClusterError(
                f"Level '{self.name}' of the cluster has neither bandwidth and latency_s nor "
                "measured gather and reduce; give one of the two pairs, or run shardwise probe."
            )

    def measured(self, sent_bytes: float, size: int, *, reduces: bool) -> float | None:
        """Seconds of a hop between ``size`` of its members; None: not measured.

        Curves were measured between all members. Among fewer members a hop has fewer latencies.
        """
        curve = self.reduce if reduces else self.gather
        if curve is None:
            return None
        return max(self.shortest_s * (size - 1), curve.seconds(sent_bytes) + self._shift_s(size))

    @property
    def shortest_s(self) -> float:
        """Seconds of the shortest message, according to the measurements."""
        if self.gather is None:
            return 0.0
        return self.gather.points[0][1] / max(1, self.size - 1)

    def _shift_s(self, size: int) -> float:
        return self.shortest_s * (size - self.size)

    def resized(self, size: int) -> "LinkSpec":
        """The same links between more or fewer members."""
        if self.gather is None or self.reduce is None or size < 2:
            return replace(self, size=size)
        shift, least = self._shift_s(size), self.shortest_s * (size - 1)

        def shifted(curve: Curve) -> Curve:
            return Curve(tuple((amount, max(least, s + shift)) for amount, s in curve.points))

        return replace(self, size=size, gather=shifted(self.gather), reduce=shifted(self.reduce))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The compute device of a rank."""

    name: str
    kind: str
    """``cpu``, whose memory is the host's, or torch's name of an accelerator."""
    memory_bytes: int
    """Memory per rank."""
    forward: Mapping[str, Curve]
    """By dtype: seconds of a block's forward by the operations of its matrix products."""
    backward: Mapping[str, Curve]
    """Likewise for its backward, by the operations of backward."""
    update: Curve
    """Seconds of an AdamW update by elements, with states in float32."""
    copy: Curve
    """Seconds of a copy within memory, by bytes."""
    encode: Mapping[str, Curve] = field(default_factory=dict)
    """By kind of wire format: seconds by elements."""
    decode: Mapping[str, Curve] = field(default_factory=dict)
    share: float = 1.0
    """Share of the host's processors that the compute of its ranks takes; hops can use the rest. 1
    for devices with their own processors."""
    source: str = ""

    @property
    def is_accelerator(self) -> bool:
        """Whether it has its own memory and processors, not the host's."""
        return self.kind != "cpu"

    def compute(self, dtype: str, flops: float, *, backward: bool = False) -> float:
        """Seconds of a forward or backward of a unit."""
        return self._of("compute", self.backward if backward else self.forward, dtype).seconds(
            flops
        )

    def code(self, kind: str, numel: int, *, decodes: bool = False) -> float:
        """Seconds to encode or decode some elements."""
        found = self.decode if decodes else self.encode
        return self._of("decode" if decodes else "encode", found, kind).seconds(numel)

    def _of(self, what: str, curves: Mapping[str, Curve], key: str) -> Curve:
        if key not in curves:
            known = ", ".join(curves) or "none"
            raise ClusterError(
                f"Device '{self.name}' has no {what} speed for {key} (it has {known}); "
                "add it to the cluster's file, or run shardwise probe."
            )
        return curves[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node's memory that is not on its devices."""

    memory_bytes: int
    """Memory of one node."""
    bandwidth: float
    """Bytes per second to or from one device, one-way, while all devices of a node transfer."""
    update: Curve | None = None
    """Seconds of one rank's share of an AdamW update there, by elements; None: unknown."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """All disks of a node together."""

    size_bytes: int
    read: float
    """Bytes per second, all ranks of a node together."""
    write: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The levels, innermost first, and the device, host and disk of each rank."""

    name: str
    levels: tuple[LinkSpec, ...]
    device: Device
    host: Host | None = None
    disk: Disk | None = None
    source: str = ""

    def __post_init__(self) -> None:
        _ = self.topology  # raises on illegal sizes and names

    @property
    def topology(self) -> Topology:
        return Topology(tuple(Level(level.name, level.size) for level in self.levels))

    @property
    def world(self) -> int:
        return self.topology.world

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host and its disks."""
        return self.topology.ranks_per_node

    def level(self, name: str) -> LinkSpec:
        return next(level for level in self.levels if level.name == name)

    def ranks_inside(self, name: str) -> int:
        """The number of ranks in one member of a level, which share its link."""
        index = next(i for i, level in enumerate(self.levels) if level.name == name)
        return prod(level.size for level in self.levels[:index])

    def with_bandwidth(self, name: str, bandwidth: float) -> "Cluster":
        """The same cluster with faster or slower links on a level.

        A measured level is priced by rates afterwards; its latency is that of its shortest hop.
        """
        if name not in (level.name for level in self.levels):
            known = ", ".join(level.name for level in self.levels)
            raise ClusterError(f"Cluster '{self.name}' has no level '{name}'; use one of {known}.")
        link, latency = self.level(name), self.level(name).latency_s
        if latency is None:
            if link.gather is None:
                raise ClusterError(
                    f"The latency of level '{name}' of cluster '{self.name}' is unknown, because "
                    "it joins one member only; add latency_s."
                )
            latency = link.shortest_s
        changed = replace(link, bandwidth=bandwidth, latency_s=latency, gather=None, reduce=None)
        levels = tuple(changed if level.name == name else level for level in self.levels)
        return replace(self, levels=levels)

    def with_world(self, world: int) -> "Cluster":
        """The same cluster with more or fewer members of the outermost level.

        With fewer ranks than one such member has, the cluster is part of one member.
        """
        inner = prod(level.size for level in self.levels[:-1])
        if world >= inner and world % inner == 0:
            outer = self.levels[-1].resized(world // inner)
            return replace(self, levels=(*self.levels[:-1], outer))
        if len(self.levels) == 2 and 0 < world < inner and inner % world == 0:
            node, outer = self.levels
            return replace(self, levels=(node.resized(world), outer.resized(1)))
        raise ClusterError(
            f"Cluster '{self.name}' has {inner} ranks in each member of its outermost level, so "
            f"it cannot have {world} ranks; use a multiple"
            f"{' or a divisor' * (len(self.levels) == 2)} of {inner}."
        )
