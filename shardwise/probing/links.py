"""Measures the hops of each level, with the links and lanes that training uses.

All ranks run their hops at once, so that the ranks of a node share its link as in training.
"""

import statistics
import time
from collections.abc import Callable, Collection, Sequence

import psutil
import torch

from shardwise.comm.grid import Grid
from shardwise.comm.lane import Lane
from shardwise.comm.link import pieces
from shardwise.core.cluster import Curve, LinkSpec
from shardwise.core.ticket import Ticket
from shardwise.core.topology import Step
from shardwise.core.wire import Format
from shardwise.device import streams
from shardwise.device.abilities import separate_memory
from shardwise.probing.clock import Clock
from shardwise.probing.scope import Effort, Scope, fitting
from shardwise.wire.codec import make_codec

_GATHER, _REDUCE = 1, 2
_ALIGN_BYTES = 64
_ROUNDS = 3
_SIDE, _SIDE_ON_HOST = 4096, 256
"""Size of the matrices whose products are timed beside hops: one product fills a device."""

Hop = Callable[[], None]


def measure_level(
    grid: Grid,
    step: Step,
    clock: Clock,
    scope: Scope,
    memory_bytes: int,
    processors: Collection[int],
    tell: Callable[[str], None],
) -> LinkSpec:
    """Measure the links of a level with several members; ``processors`` are those of the host."""
    hops = _Hops(grid, step)
    # A reduction has buffers for what it sends, what it receives, and the sum.
    sizes = fitting(scope.sent_bytes, 4.0, memory_bytes)

    def sweep(lane: Lane, make: Callable[[float], Hop]) -> Curve:
        return clock.sweep(sizes, lambda sent: hops.time(clock, scope.hops, lane, sent, make))

    tell(f"gathers on {step.level}")
    gather = sweep(grid.gathers, hops.gather)
    tell(f"reductions on {step.level}")
    reduce = sweep(grid.reduces, hops.reduce)
    tell(f"processors busy with hops on {step.level}")
    largest, _ = gather.points[-1]
    return LinkSpec(
        name=step.level,
        size=step.size,
        gather=gather,
        reduce=reduce,
        busy=_busy(hops, grid, largest, clock, scope, processors),
        source=grid.link_kinds[step.level],
    )


def time_gather(
    grid: Grid, step: Step, clock: Clock, sent: float, effort: Effort
) -> tuple[float, float]:
    """Bytes that a rank actually sends in a gather hop of about ``sent`` bytes, and its seconds."""
    hops = _Hops(grid, step)
    return hops.time(clock, effort, grid.gathers, sent, hops.gather)


class _Hops:
    """Hops of float32 on one level."""

    def __init__(self, grid: Grid, step: Step) -> None:
        self._gathers, self._reduces = grid.link("gather", step), grid.link("reduce", step)
        self._gather_key = grid.labels.key(_GATHER, "gather of a probe")
        self._reduce_key = grid.labels.key(_REDUCE, "reduction of a probe")
        self._step, self._device = step, grid.device
        self._codec = make_codec(Format("fp32"), 1, grid.device)

    def piece_bytes(self, sent: float) -> int:
        """Bytes that each other member gets of the bytes that a rank sends."""
        return max(1, round(sent / (self._step.size - 1) / _ALIGN_BYTES)) * _ALIGN_BYTES

    def gather(self, sent: float) -> Hop:
        buffer, link = self._buffer(sent), self._gathers

        def hop() -> None:
            link.gather(buffer, self._gather_key)
            link.finish()

        return hop

    def reduce(self, sent: float) -> Hop:
        buffer, link = self._buffer(sent), self._reduces
        payload, own = buffer.view(torch.uint8), pieces(buffer, link.size)[link.coordinate]
        out = torch.zeros_like(own)

        def hop() -> None:
            link.reduce(payload, own, out, self._reduce_key, self._codec, scale=0.5, add=False)
            link.finish()

        return hop

    def time(
        self, clock: Clock, effort: Effort, lane: Lane, sent: float, make: Callable[[float], Hop]
    ) -> tuple[float, float]:
        """Bytes that a rank actually sends in a hop, and its seconds."""
        hop = make(sent)

        def lap(count: int) -> tuple[float]:
            begin = clock.now()
            lane.submit(lambda _: _repeat([hop], count)).block_host()
            return ((clock.now() - begin) / count,)

        really_sent = self.piece_bytes(sent) * (self._step.size - 1)
        return really_sent, clock.measure(lap, effort)[0]

    def _buffer(self, sent: float) -> torch.Tensor:
        numel = self.piece_bytes(sent) // 4 * self._step.size
        return torch.zeros(numel, device=self._device)


def _busy(
    hops: _Hops,
    grid: Grid,
    sent: float,
    clock: Clock,
    scope: Scope,
    processors: Collection[int],
) -> float:
    """The share of the compute resource that hops take while they run; see LinkSpec.busy."""
    both = (hops.gather(sent), hops.reduce(sent))
    begin = clock.now()
    grid.reduces.submit(lambda _: _repeat(both, 1)).block_host()
    once = clock.slowest([clock.now() - begin])[0]
    count = max(1, round(scope.busy_s / once))

    def begin_hops() -> Ticket:
        return grid.reduces.submit(lambda _: _repeat(both, count))

    def measure() -> float:
        if separate_memory(grid.device):
            return lost_to_hops(begin_hops, grid.device, clock, count * once)
        return _kept_busy(begin_hops, clock, processors)

    shares = [measure() for _ in range(_ROUNDS)]
    return round(min(max(statistics.median(shares), 0.0), 1.0), 3)


def _kept_busy(
    begin_hops: Callable[[], Ticket], clock: Clock, processors: Collection[int]
) -> float:
    """The share of the host's processors that is not idle while all ranks run hops.

    This includes the kernel's work for the network, which no process is charged for. It measures
    idle time instead of busy time: kernels that sample busy time at their ticks miss work that
    begins and ends between two ticks, which is much of it on slow links. Idle time is measured
    exactly, because ticks stop then.
    """
    clock.slowest([0.0])  # all begin together
    before, begin = _rested_s(processors), time.perf_counter()
    begin_hops().block_host()
    rested, elapsed = _rested_s(processors) - before, time.perf_counter() - begin
    return clock.slowest([1.0 - rested / elapsed / len(processors)])[0]


def lost_to_hops(
    begin_hops: Callable[[], Ticket], device: torch.device, clock: Clock, hops_s: float
) -> float:
    """The share of a device's speed that matrix products lose while hops run beside them.

    ``hops_s`` is how long the hops take alone; the products take half of that.
    """
    side = _SIDE if separate_memory(device) else _SIDE_ON_HOST
    matrix = torch.randn(side, side, device=device)
    product = torch.empty_like(matrix)

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)
        streams.block_host_until(streams.mark(device))  # not the whole device: hops must continue
        return time.perf_counter() - begin

    seconds(1)
    count = max(1, round(hops_s / 2 / clock.slowest([seconds(1)])[0]))
    alone = seconds(count)
    clock.slowest([0.0])  # all begin together
    ticket = begin_hops()
    beside = seconds(count)
    ticket.block_host()
    clock.now()
    return clock.mean([1.0 - alone / beside])[0]


def _rested_s(processors: Collection[int]) -> float:
    """Idle seconds of processors since this host started, including time stolen by others."""
    rested = 0.0
    for index, times in enumerate(psutil.cpu_times(percpu=True)):
        if index in processors:
            rested += times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    return rested


def _repeat(hops: Sequence[Hop], count: int) -> None:
    for _ in range(count):
        for hop in hops:
            hop()
