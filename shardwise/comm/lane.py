"""Lanes: ordered queues that run transfers beside compute.

On CPU a lane is a thread, on a device with streams a stream. Work on a lane runs in the order of
submission, which is the same on every rank, so collectives match. A host lane is a thread beside a
device, for work of the host: it has a stream of its own for copies.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from shardwise.core.flight import RECORDER
from shardwise.core.meter import THREAD, Meter, counting
from shardwise.core.ticket import DONE, Ticket
from shardwise.device import streams
from shardwise.device.abilities import has_streams


class Lane(Protocol):
    """An ordered queue of work."""

    def submit(self, work: Callable[["Early"], None]) -> Ticket:
        """Queue ``work``; it may call its argument once its result can be used."""

    def so_far(self) -> Ticket:
        """A ticket for everything submitted so far, including work after an early result."""

    def close(self) -> None:
        """End the lane after the work already submitted."""


Early = Callable[[], None]


class _ThreadTicket:
    def __init__(self, waits: str) -> None:
        self._waits, self._done = waits, threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def block_host(self) -> None:
        if not self._done.is_set():
            RECORDER.begin(self._waits)
            self._done.wait()
            RECORDER.end(self._waits)
        if self._error is not None:
            raise self._error

    order_stream = block_host  # on CPU the calling thread is the stream


_Queued = tuple[Callable[[Early], None], _ThreadTicket, Meter | None]


class ThreadLane:
    """A lane on CPU: one thread. Torch's kernels and gloo's waits release the GIL."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._waits = f"wait for lane {name}"
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shardwise-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Early], None]) -> Ticket:
        ticket = _ThreadTicket(self._waits)
        self._queue.put((work, ticket, THREAD.meter))
        return ticket

    def so_far(self) -> Ticket:
        return self.submit(lambda _: None)

    def close(self) -> None:
        self._queue.put(None)
        if self._thread is not threading.current_thread():  # it may collect a dropped model
            self._thread.join(timeout=10)

    def _run(self) -> None:
        # Grad mode is per thread: autograd must never record transfers.
        torch.set_grad_enabled(False)
        while (item := self._queue.get()) is not None:
            work, ticket, meter = item
            THREAD.meter = meter
            if self._broken is None:
                try:
                    work(ticket.finish)
                except BaseException as error:  # raised by the ticket
                    # After a failed transfer ranks are out of step, so all later ones fail as well.
                    self._broken = error
            ticket.finish(self._broken)
            del item, work, ticket, meter  # the closure may own large buffers


class _StreamTicket:
    """For work that is enqueued on a stream."""

    def __init__(self, done: streams.Mark) -> None:
        self._done = done

    def order_stream(self) -> None:
        streams.order_after(self._done)

    def block_host(self) -> None:
        streams.block_host_until(self._done)


class StreamLane:
    """A lane on a device: one stream; work is enqueued immediately and ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, streams.side_stream(device)

    def submit(self, work: Callable[[Early], None]) -> Ticket:
        begun = streams.mark(self._device)
        with streams.on_stream(self._stream), torch.no_grad():
            streams.order_after(begun)
            work(lambda: None)
        return self.so_far()

    def so_far(self) -> Ticket:
        return _StreamTicket(streams.mark(self._device, self._stream))

    def close(self) -> None:
        self._stream.synchronize()


class InlineLane:
    """A lane for a single rank on CPU: nothing travels, so work runs when it is submitted."""

    def submit(self, work: Callable[[Early], None]) -> Ticket:
        with torch.no_grad():
            work(lambda: None)
        return DONE

    def so_far(self) -> Ticket:
        return DONE

    def close(self) -> None:
        pass


class _HostTicket:
    """For work of a host lane, and for the copies that it enqueued on its stream."""

    def __init__(self, future: "Future[streams.Mark]") -> None:
        self._future = future

    def order_stream(self) -> None:
        streams.order_after(self._future.result())

    def block_host(self) -> None:
        streams.block_host_until(self._future.result())


class HostLane:
    """A thread for work of the host beside compute: disks, updates, copies from and to a device.

    The submitting thread never waits. Work begins on the lane's own stream, after everything that
    was enqueued on the submitter's, and a ticket is for what it enqueued as well. Before the host
    itself touches memory that a device uses, work must call ``block_host`` on a ticket or a mark.

    A failure affects only the work that failed.
    """

    def __init__(self, name: str = "host") -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def submit(self, work: Callable[[], None], device: torch.device) -> Ticket:
        """Queue work; ``device`` is the one whose values it moves."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, f"shardwise-{self._name}")
        begun = streams.mark(device)
        return _HostTicket(self._pool.submit(self._run, work, THREAD.meter, device, begun))

    def _run(
        self,
        work: Callable[[], None],
        meter: Meter | None,
        device: torch.device,
        begun: streams.Mark,
    ) -> streams.Mark:
        with torch.no_grad(), counting(meter):
            if begun is None:
                work()
                return None
            if device not in self._streams:
                self._streams[device] = streams.side_stream(device)
            with streams.on_stream(self._streams[device]):
                streams.order_after(begun)
                work()
                return streams.mark(device)


HOST = HostLane()
"""One for all models and optimizers of a process, because these may share parameters and groups."""


def make_lane(name: str, device: torch.device, world: int) -> Lane:
    """A lane for the device."""
    if has_streams(device):
        return StreamLane(
            device
        )  # a single rank as well: its states may be on their way from a tier
    return InlineLane() if world == 1 else ThreadLane(name)
