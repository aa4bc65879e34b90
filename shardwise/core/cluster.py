"""A cluster as the planner sees it: what its links, devices, hosts and disks do in a second.

Times are curves over amounts, measured by ``shardwise probe`` or drawn from cited rates. Whatever
is not known is None, and asking for it is an error: an unknown speed is never taken for zero.

[Note: All at once]
Every figure is what one rank gets while all ranks of its node do the same, because that is how
training uses a machine. A link's ``bandwidth`` is that of one member of its level (a device in a
node, a node in a cluster), one way; the ranks inside a member share it.
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
    """A cluster whose description lacks what was asked for, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by amount: straight lines between known points, the last one going on.

    Amounts below the first point take as long as that: it is the price of asking at all.

    >>> curve = Curve(((1000, 2.0), (2000, 3.0)))
    >>> [curve.seconds(amount) for amount in (0, 1000, 1500, 4000)]
    [0.0, 2.0, 2.5, 5.0]
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if len(amounts) < 2 or any(b <= a for a, b in pairwise(amounts)):
            raise ClusterError("A curve needs two points or more, in ascending order of amounts.")
        if any(seconds < 0 for _, seconds in self.points) or self.points[-1][1] <= 0:
            raise ClusterError("A curve's times are seconds: positive, at least the last one.")

    @classmethod
    def of_rate(cls, rate: float, latency_s: float = 0.0) -> "Curve":
        """So much in a second, after a latency.

        >>> Curve.of_rate(100.0, 0.5).seconds(200)
        2.5
        """
        return cls(((0.0, latency_s), (rate, latency_s + 1.0)))

    @classmethod
    def median(cls, visits: "Sequence[Curve]") -> "Curve":
        """Of the same thing measured several times, at the amounts of the visit that has fewest.

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
        """How long an amount takes; nothing takes no time."""
        if amount <= 0:
            return 0.0
        first, last = self.points[0], self.points[-1]
        if amount <= first[0]:
            return first[1]
        if amount >= last[0]:
            before = self.points[-2]
            slope = (last[1] - before[1]) / (last[0] - before[0])
            # Noise may bend the end down; more never takes less.
            return last[1] + (amount - last[0]) * max(slope, 0.5 * last[1] / last[0])
        right = bisect_right(self.points, amount, key=lambda point: point[0])
        (a, s), (b, t) = self.points[right - 1], self.points[right]
        return s + (t - s) * (amount - a) / (b - a)

    def rate(self, amount: float) -> float:
        """Amount in a second at a size."""
        return amount / self.seconds(amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The links of one level: between the ``size`` members that it joins."""

    name: str
    size: int
    bandwidth: float | None = None
    """Bytes a second out of one member, one way, all of its ranks together."""
    latency_s: float | None = None
    """What one message takes however short it is."""
    gather: Curve | None = None
    """Measured: seconds of a gather hop by the bytes that each rank sends."""
    reduce: Curve | None = None
    """Likewise of a reduce hop, with the summing."""
    busy: float = 0.0
    """How much of what computes the hops take while they run: 0 none, 1 all. Of a host's processors
    where these compute; else of a GPU's multiprocessors, whose kernels carry the transfers."""
    source: str = ""

    def __post_init__(self) -> None:
        rated = self.bandwidth is not None and self.latency_s is not None
        measured = self.gather is not None and self.reduce is not None
        if self.size > 1 and not rated and not measured:
            raise ClusterError(
                f"Level '{self.name}' of the cluster has neither bandwidth and latency_s nor "
                "measured gather and reduce; give one of both, or run shardwise probe."
            )

    def measured(self, sent_bytes: float, size: int, *, reduces: bool) -> float | None:
        """Seconds of a hop between ``size`` of its members; None: nobody has measured it.

        Curves are of all members. Among fewer of them a hop has fewer latencies.
        """
        curve = self.reduce if reduces else self.gather
        if curve is None:
            return None
        return max(self.shortest_s * (size - 1), curve.seconds(sent_bytes) + self._shift_s(size))

    @property
    def shortest_s(self) -> float:
        """What one message takes however short it is, by what was measured."""
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
    """What computes: one a rank."""

    name: str
    kind: str
    """``cuda`` or ``cpu``; of the latter the memory is the host's."""
    memory_bytes: int
    """For one rank."""
    forward: Mapping[str, Curve]
    """By dtype: seconds of a block's forward by its matrix products' operations."""
    backward: Mapping[str, Curve]
    """Likewise of its backward, by the operations of backward."""
    update: Curve
    """Seconds of an AdamW update by elements, with states in float32."""
    copy: Curve
    """Seconds of a copy inside memory by bytes."""
    encode: Mapping[str, Curve] = field(default_factory=dict)
    """By kind of wire format: seconds by elements."""
    decode: Mapping[str, Curve] = field(default_factory=dict)
    share: float = 1.0
    """How much of a host's processors the compute of its ranks takes; what it leaves is for hops.
    Of devices with processors of their own: all."""
    source: str = ""

    @property
    def is_accelerator(self) -> bool:
        """Whether its memory and processors are its own, not the host's."""
        return self.kind != "cpu"

    def compute(self, dtype: str, flops: float, *, backward: bool = False) -> float:
        """Seconds of a pass over a unit."""
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
    """A node's memory beside the devices' own."""

    memory_bytes: int
    """Of one node."""
    bandwidth: float
    """Bytes a second between it and one device, one way, while all devices of a node do it."""
    update: Curve | None = None
    """Seconds of one rank's share of an AdamW update there, by elements; None: not known."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A node's disks together."""

    size_bytes: int
    read: float
    """Bytes a second, all ranks of a node together."""
    write: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Levels innermost first, and what each rank has."""

    name: str
    levels: tuple[LinkSpec, ...]
    device: Device
    host: Host | None = None
    disk: Disk | None = None
    source: str = ""

    def __post_init__(self) -> None:
        _ = self.topology  # which refuses sizes and names that cannot be

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
        """Ranks of one member of a level, which share its link."""
        index = next(i for i, level in enumerate(self.levels) if level.name == name)
        return prod(level.size for level in self.levels[:index])

    def with_bandwidth(self, name: str, bandwidth: float) -> "Cluster":
        """The same cluster with faster or slower links on a level.

        A measured level is priced by rates from then on; what its shortest hop took is latency.
        """
        if name not in (level.name for level in self.levels):
            known = ", ".join(level.name for level in self.levels)
            raise ClusterError(f"Cluster '{self.name}' has no level '{name}'; use one of {known}.")
        link, latency = self.level(name), self.level(name).latency_s
        if latency is None:
            if link.gather is None:
                raise ClusterError(
                    f"Nobody knows the latency of level '{name}' of cluster '{self.name}', which "
                    "joins one member only; add latency_s."
                )
            latency = link.shortest_s
        changed = replace(link, bandwidth=bandwidth, latency_s=latency, gather=None, reduce=None)
        levels = tuple(changed if level.name == name else level for level in self.levels)
        return replace(self, levels=levels)

    def with_world(self, world: int) -> "Cluster":
        """The same cluster with more or fewer members of the outermost level.

        Fewer ranks than one such member has are a part of one.
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
            f"that it cannot have {world} ranks; use a multiple"
            f"{' or a divisor' * (len(self.levels) == 2)} of {inner}."
        )
