"""What an operation of the schedule costs on a cluster: its stages, each with what it occupies.

[Note: Hops]
A hop with measured curves takes what was measured. From rates it takes a ring's time: one latency
for each of the other members, and the bytes at the share of the bandwidth that a rank has. What is
encoded for a reduction goes all to all instead: every pair at once, after one latency.

[Note: Flat collectives]
Other systems run one collective over all ranks of a group, whatever links it crosses: a ring with
as many latencies as ranks, whose bytes cross every level. ``Habits.flat`` prices them so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardwise.core.cluster import Cluster, ClusterError, Curve, Host, LinkSpec
from shardwise.core.errors import PlanError
from shardwise.core.wire import Format
from shardwise.cost.engine import Stage
from shardwise.cost.habits import OURS, Habits
from shardwise.plans.hops import chunk_numel
from shardwise.plans.ops import Hop, Kind, Lane, Op
from shardwise.plans.plan import Rungs

PROCESSOR, HOST_PROCESSOR = "processor", "host processor"
READ, WRITE, HOST = "read", "write", "host"
MOST_CHUNKS = 4
"""Chunks of an encoded reduction that are simulated one by one; more are as many longer ones."""

Stages = list[Stage]

_USES = {
    Kind.KEEP: "copies",
    Kind.COLLECT: "copies",
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.REPLICATE: "reduce",
    Kind.REFRESH: "refresh",
}


@dataclass(frozen=True, slots=True)
class Price:
    """The stages of an operation."""

    chunks: list[tuple[Stages, Stages]]
    """In order; of each what its lane does, and the last hop where that overlaps."""
    then: Stages
    """What the lane does when the last chunk has left it."""
    behind: Stages
    """What is written to a disk, beside whatever comes next."""


@dataclass(frozen=True)
class Prices:
    """The prices of a cluster."""

    cluster: Cluster
    habits: Habits = OURS

    @property
    def _processor(self) -> tuple[tuple[str, float], ...]:
        return ((PROCESSOR, self.cluster.device.share),)

    # --- hops ---------------------------------------------------------------------------------

    def hop(self, use: str, hop: Hop, *, reduces: bool, direct: bool = False) -> Stage:
        """One exchange, in a ring or (``direct``) all to all."""
        link = self.cluster.level(hop.level)
        seconds = link.measured(hop.sent_bytes, hop.size, reduces=reduces)
        if seconds is None:
            seconds = self._ring(link, hop.sent_bytes, 2 if direct else hop.size)
        return self._on(use, seconds, link, link.busy)

    def _ring(self, link: LinkSpec, sent_bytes: float, size: int) -> float:
        assert link.bandwidth is not None
        assert link.latency_s is not None
        share = link.bandwidth / self.cluster.ranks_inside(link.name)
        return link.latency_s * (size - 1) + sent_bytes / share

    def _on(self, use: str, seconds: float, link: LinkSpec, busy: float) -> Stage:
        """A hop's stage. Hosts share their processors; of a GPU its kernels have parts alone."""
        needs = ((f"link {link.name}", 1.0),)
        work = ((PROCESSOR, busy),) if busy else ()
        if not self.cluster.device.is_accelerator:
            return Stage(use, seconds, (*needs, *work))
        return Stage(use, seconds, needs, reserves=work)

    def hops(self, use: str, hops: Sequence[Hop], *, reduces: bool) -> Stages:
        """Exchanges one after the other, or as one ring."""
        if not self.habits.flat or len(hops) < 2:
            return [self.hop(use, hop, reduces=reduces) for hop in hops]
        sent: dict[str, int] = {}
        steps = 0.0
        for hop in sorted(hops, key=lambda hop: self.cluster.ranks_inside(hop.level)):
            link = self.cluster.level(hop.level)
            if link.latency_s is None or link.bandwidth is None:
                raise ClusterError(
                    f"Level '{link.name}' of cluster '{self.cluster.name}' was measured hop by "
                    "hop; for a flat collective give its bandwidth and latency_s."
                )
            # Of the ring's steps, one a member crosses this level's link, the others lie inside.
            steps = steps * hop.size + link.latency_s * (hop.size - 1)
            sent[hop.level] = sent.get(hop.level, 0) + hop.sent_bytes
        links = [self.cluster.level(level) for level in sent]
        slowest = max(self._ring(link, sent[link.name], 1) for link in links)
        return [self._on(use, steps + slowest, links[-1], _ring_busy(links))]

    # --- operations ---------------------------------------------------------------------------

    def operation(self, op: Op, numel: int, rungs: Rungs) -> Price:
        """What an operation costs on ``numel`` elements of a unit; see ``updates.py`` for updates.

        Whoever reads a tier waits for it, and copies what goes to host memory; a disk has threads
        that write behind.
        """
        use = _USES.get(op.kind, "tier")
        if op.lane is Lane.COMPUTE and op.kind is Kind.REFRESH:
            use = "update"  # a copy from master weights, and nothing travels
        reads = [self.move(m.tier, m.reads, writes=False) for m in op.moves if m.reads]
        copies = [self.copy(op.copies, use)] if op.copies else []
        then: Stages = []
        behind: Stages = []
        for m in op.moves:
            if m.writes:
                (behind if m.tier == "nvme" else then).append(
                    self.move(m.tier, m.writes, writes=True)
                )
        if op.kind is not Kind.REDUCE:
            lane = [*reads, *copies, *self.climb(use, op, numel, rungs), *then]
            return Price([(lane, [])], [], behind)
        (inner, outer), *others = self.descend(op, numel, rungs)
        return Price([([*reads, *inner], outer), *others], [*copies, *then], behind)

    def climb(self, use: str, op: Op, numel: int, rungs: Rungs) -> Stages:
        """Up the ladder: encoded once for each run of hops of one format, forwarded, decoded."""
        stages: Stages = []
        parts = rungs.ladder.parts
        for format, group in groupby(op.hops, key=lambda hop: hop.format):
            run = list(group)
            if format is not None:
                own = numel // parts[run[0].step + 1]
                if format.delta:  # the old values are taken from the new, in float32
                    stages.append(self.add(use, 4 * own))
                stages.append(self._code(use, format, own))
            stages += self.hops(use, run, reduces=False)
            if format is not None:
                stages.append(self._code(use, format, numel // parts[run[-1].step], decodes=True))
        return stages

    def descend(self, op: Op, numel: int, rungs: Rungs) -> list[tuple[Stages, Stages]]:
        """A reduction chunk by chunk: its stages, and those of the last hop where that overlaps."""
        use, hops = "reduce", op.hops
        if not any(hop.format for hop in hops):
            # The ranks that share P sum first, then those that hold the same: two collectives.
            inside = [hop for hop in hops if hop.step < rungs.params]
            raw = (self.hops(use, some, reduces=True) for some in (inside, hops[len(inside) :]))
            return [(_joined(list(raw)), [])]
        longest = chunk_numel(numel, rungs.granules, accelerated=self.cluster.device.is_accelerator)
        chunks = max(1, -(-numel // longest))
        simulated = min(chunks, MOST_CHUNKS)
        by_hop = [self._chunk(hop, numel, rungs, chunks, simulated) for hop in hops]
        last = [by_hop.pop()] if op.overlaps else []
        return [(_joined(by_hop), _joined(last))] * simulated

    def replicate_back(self, op: Op, rungs: Rungs) -> Stages:
        """What makes an all-reduce of a reduction, for ranks that hold the same parameters."""
        if any(hop.format for hop in op.hops):
            raise PlanError("An all-reduce is priced for gradients that travel as they are only.")
        shared = [hop for hop in reversed(op.hops) if hop.step >= rungs.params]
        return self.hops("reduce", shared, reduces=False)

    def _chunk(self, hop: Hop, numel: int, rungs: Rungs, chunks: int, simulated: int) -> Stages:
        """One hop of one of the simulated chunks, each of which stands for several."""
        use, format = "reduce", hop.format
        piece = Hop(hop.step, hop.level, hop.size, hop.sent_bytes // chunks, format)
        # An accelerator's backend sums casts as it sums raw values.
        casts = self.cluster.device.is_accelerator and format is not None
        summed = format is None or (casts and not (format.is_blocked or format.feedback))
        travel = self.hop(use, piece, reduces=summed, direct=not summed)
        travel = replace(travel, seconds=travel.seconds * chunks / simulated)
        if format is None or summed:
            return [travel]
        part = numel // rungs.ladder.parts[hop.step]
        others = part * (hop.size - 1) // hop.size // simulated
        encode = [self._code(use, format, others)]
        if format.feedback:  # what was lost is added, and what is lost now is found out
            encode += [
                self.add(use, 4 * others),
                self._code(use, format, others, decodes=True),
                self.add(use, 4 * others),
                self.copy(4 * others, use),
            ]
        # This rank's shard goes to a buffer where the others' are added.
        own = self.copy(4 * part // hop.size // simulated, use)
        return [own, *encode, travel, self._code(use, format, others, decodes=True)]

    def _code(self, use: str, format: Format, numel: int, *, decodes: bool = False) -> Stage:
        seconds = self.cluster.device.code(format.kind, numel, decodes=decodes)
        return Stage(use, seconds, self._processor)

    # --- tiers --------------------------------------------------------------------------------

    def move(self, tier: str, nbytes: float, *, writes: bool, to_host: bool = False) -> Stage:
        """Bytes of one rank between a tier and memory, while all ranks of a node move theirs.

        What comes from a disk ``to_host`` memory, as states do that the host updates, stays there;
        all else goes on to an accelerator, or comes from it, chunk by chunk.
        """
        accelerated = self.cluster.device.is_accelerator
        channel = f"{HOST} {WRITE if writes else READ}"
        if tier == "nvme":
            disk = self.cluster.disk
            if disk is None:
                raise ClusterError(
                    f"Cluster '{self.cluster.name}' has no disk in its description; add [disk], "
                    "or probe it with --path."
                )
            rate = (disk.write if writes else disk.read) / self.cluster.ranks_per_node
            if to_host or not accelerated:
                return Stage("tier", nbytes / rate, (("disk", 1.0),))
            bandwidth = self._host().bandwidth
            slower = min(rate, bandwidth)
            needs = (("disk", slower / rate), (channel, slower / bandwidth))
            return Stage("tier", nbytes / slower, needs)
        if not accelerated:  # the device's memory is the host's
            return Stage("tier", 0.0)
        return Stage("tier", nbytes / self._host().bandwidth, ((channel, 1.0),))

    # --- the program's own ------------------------------------------------------------------------

    def compute(self, dtype: str, flops: float, *, backward: bool) -> Stage:
        seconds = self.cluster.device.compute(dtype, flops, backward=backward)
        return Stage("compute", seconds, self._processor)

    def copy(self, nbytes: float, use: str = "copies") -> Stage:
        return Stage(use, self.cluster.device.copy.seconds(nbytes), self._processor)

    def add(self, use: str, nbytes: float) -> Stage:
        """Adding to so many bytes: as a copy, but two are read where one is written."""
        return self.copy(1.5 * nbytes, use)

    def update(self, numel: int, tier: str) -> Stage:
        """The optimizer's own work: on the device, or by the host where states rest elsewhere."""
        curve: Curve | None = self.cluster.device.update
        needs = self._processor
        if tier != "device" and self.cluster.device.is_accelerator:
            curve, needs = self._host().update, ((HOST_PROCESSOR, 1.0),)
        if curve is None:
            raise ClusterError(
                f"Cluster '{self.cluster.name}' does not say how fast its hosts update "
                "optimizer states; add host.update_rate."
            )
        return Stage("update", curve.seconds(numel), needs)

    def _host(self) -> Host:
        """Beside devices that have a memory of their own; unknown is not free."""
        if self.cluster.host is None:
            raise ClusterError(
                f"Cluster '{self.cluster.name}' has no host in its description; add [host], or "
                "keep what the plan moves there on the device."
            )
        return self.cluster.host


def _ring_busy(links: Sequence[LinkSpec]) -> float:
    """Of a ring through all levels, the inner ones first: its blocks carry what the slowest link
    does, of which the inner links' own blocks could carry more."""
    outer = links[-1]
    assert outer.bandwidth is not None
    inner = (link.busy * min(1.0, outer.bandwidth / (link.bandwidth or 1.0)) for link in links)
    return max(outer.busy, *inner)


def _joined(lists: list[Stages]) -> Stages:
    return [stage for stages in lists for stage in stages]
