"""The hops of each level, through the links and in the lanes that training uses.

All ranks hop at once, so that the ranks of a node share its link as they do in training.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.grid import Grid
from shardwise.comm.lane import Lane
from shardwise.comm.link import pieces
from shardwise.core.cluster import Curve, LinkSpec
from shardwise.core.topology import Step
from shardwise.core.wire import Format
from shardwise.probe.clock import Clock
from shardwise.probe.compute import Passes
from shardwise.probe.scope import Scope, fitting
from shardwise.wire.codec import make_codec

_GATHER, _REDUCE = 1, 2
_ALIGN_BYTES = 64
_MOST_BUSY = 1.5
_ROUNDS = 5
_LEAST_PASSES = 3

Hop = Callable[[], None]


def measure_level(
    grid: Grid, step: Step, clock: Clock, scope: Scope, room: int, tell: Callable[[str], None]
) -> LinkSpec:
    """The links of a level that joins several members."""
    hops = _Hops(grid, step)
    # A reduction holds what it sends, what arrives, and its sum.
    sizes = fitting(scope.sent_bytes, 4.0, room)

    def sweep(lane: Lane, make: Callable[[float], Hop]) -> Curve:
        return clock.sweep(sizes, lambda sent: hops.time(clock, scope, lane, sent, make))

    tell(f"gathers on {step.level}")
    gather = sweep(grid.gathers, hops.gather)
    tell(f"reductions on {step.level}")
    reduce = sweep(grid.reduces, hops.reduce)
    tell(f"compute beside hops on {step.level}")
    middle, _ = gather.points[(len(gather.points) - 1) // 2]
    return LinkSpec(
        name=step.level,
        size=step.size,
        gather=gather,
        reduce=reduce,
        busy=_measure_busy(hops, grid, middle, clock, scope),
        source=grid.link_kinds[step.level],
    )


class _Hops:
    """Hops on one level, of float32."""

    def __init__(self, grid: Grid, step: Step) -> None:
        self._gathers, self._reduces = grid.link("gather", step), grid.link("reduce", step)
        self._gather_key = grid.labels.key(_GATHER, "gather of a probe")
        self._reduce_key = grid.labels.key(_REDUCE, "reduction of a probe")
        self._step, self._device = step, grid.device
        self._codec = make_codec(Format("fp32"), 1, grid.device)

    def piece_bytes(self, sent: float) -> int:
        """What one member gets of the bytes that a rank sends: to each other member as many."""
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
        self, clock: Clock, scope: Scope, lane: Lane, sent: float, make: Callable[[float], Hop]
    ) -> tuple[float, float]:
        """What a rank really sends in a hop, and the seconds of it."""
        hop = make(sent)

        def lap(count: int) -> tuple[float]:
            begin = clock.now()
            lane.submit(lambda _: _repeat([hop], count)).wait()
            return ((clock.now() - begin) / count,)

        really_sent = self.piece_bytes(sent) * (self._step.size - 1)
        return really_sent, clock.measure(lap, scope.hops)[0]

    def _buffer(self, sent: float) -> torch.Tensor:
        numel = self.piece_bytes(sent) // 4 * self._step.size
        return torch.zeros(numel, device=self._device)


def _measure_busy(hops: _Hops, grid: Grid, sent: float, clock: Clock, scope: Scope) -> float:
    """How much longer a pass takes while hops of a size run in a lane all the time.

    Passes alone and passes beside hops take turns, so that other work disturbs both alike.
    """
    both = (hops.gather(sent), hops.reduce(sent))
    passes = Passes(scope.blocks[1], torch.float32, grid.device)
    passes.run()
    alone_s = clock.slowest([_time_pass(passes, grid.device)])[0]
    wanted_s = max(scope.busy_s, _LEAST_PASSES * alone_s)

    def run_hops(count: int) -> tuple[list[float], float]:
        clock.slowest([0.0])  # a rank that is late would compute beside no hops
        begin = time.perf_counter()
        found = _pass_beside(lambda: _repeat(both, count), grid, passes)
        return found, (time.perf_counter() - begin) / count

    # Hops, too, take longer beside compute: a few of them tell how many fill the time.
    _, hops_s = run_hops(2)
    count = max(2, round(wanted_s / clock.slowest([hops_s])[0]))
    alone_count = max(_LEAST_PASSES, round(wanted_s / max(alone_s, 1e-6)))
    ratios = []
    for _ in range(_ROUNDS):
        alone = [_time_pass(passes, grid.device) for _ in range(alone_count)]
        beside, _ = run_hops(count)
        # A ratio of two of the slowest would mostly compare what else disturbed these ranks.
        mean_alone, mean_beside = clock.mean([statistics.median(alone), statistics.median(beside)])
        ratios.append(mean_beside / mean_alone)
    return round(min(max(statistics.median(ratios) - 1, 0.0), _MOST_BUSY), 3)


def _pass_beside(work: Hop, grid: Grid, passes: Passes) -> list[float]:
    """Seconds of the passes that were run while the lane worked; one at least."""
    running = _Running(grid.device)

    def run(_: Callable[[], None]) -> None:
        try:
            work()
        finally:
            running.end()

    ticket = grid.reduces.submit(run)
    found = [_time_pass(passes, grid.device)]
    while running:
        found.append(_time_pass(passes, grid.device))
    ticket.wait()
    return found[:-1] or found  # the last pass outlived the hops


def _time_pass(passes: Passes, device: torch.device) -> float:
    begin = time.perf_counter()
    passes.run()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # not the lane's, which works beside
    return time.perf_counter() - begin


def _repeat(hops: Sequence[Hop], count: int) -> None:
    for _ in range(count):
        for hop in hops:
            hop()


class _Running:
    """True until the lane has come to the end."""

    def __init__(self, device: torch.device) -> None:
        self._done = threading.Event()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """To be called in the lane, at the end of its work."""
        if self._event is not None:
            self._event.record()
        self._done.set()

    def __bool__(self) -> bool:
        if self._event is not None:
            return not self._event.query()
        return not self._done.is_set()
