"""Lanes: ordered queues that run transfers beside compute.

On CPU a lane is a thread, on CUDA a stream. Work on a lane runs in the order of submission, which
is the same on every rank, so collectives match.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from shardwise.core.meter import THREAD, Meter, counting
from shardwise.core.ticket import DONE, Ticket


class Lane(Protocol):
    """An ordered queue of work."""

    def submit(self, work: Callable[["Early"], None]) -> Ticket:
        """Queue ``work``; it may call its argument once its result can be used."""

    def drain(self) -> None:
        """Wait for everything submitted so far, including work after an early result."""

    def close(self) -> None:
        """End the lane after the work already submitted."""


Early = Callable[[], None]


class _ThreadTicket:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


_Queued = tuple[Callable[[Early], None], _ThreadTicket, Meter | None]


class ThreadLane:
    """A lane on CPU: one thread. Torch's kernels and gloo's waits release the GIL."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shardwise-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Early], None]) -> Ticket:
        ticket = _ThreadTicket()
        self._queue.put((work, ticket, THREAD.meter))
        return ticket

    def drain(self) -> None:
        self.submit(lambda _: None).wait()

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
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.wait()


class StreamLane:
    """A lane on CUDA: one stream; work is enqueued immediately and ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[Early], None]) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            work(lambda: None)
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamTicket(event)

    def drain(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        self._stream.synchronize()


class InlineLane:
    """A lane for a single rank: nothing travels, so work runs when it is submitted."""

    def submit(self, work: Callable[[Early], None]) -> Ticket:
        with torch.no_grad():
            work(lambda: None)
        return DONE

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Future:
    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class HostLane:
    """The thread for the host's work beside backward.

    There is one for all models and optimizers of a process, because these may share parameters and
    groups. A failure affects only the work that failed. On CUDA it has its own stream.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}

    def submit(self, work: Callable[[], None], device: torch.device) -> Ticket:
        """Queue work that runs after everything enqueued on the caller's stream."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "shardwise-host")
        if device.type != "cuda":
            return _Future(self._pool.submit(self._run, work, THREAD.meter))
        index = torch.cuda.current_device() if device.index is None else device.index
        begun = torch.cuda.Event()
        begun.record(torch.cuda.current_stream(index))
        return _Future(self._pool.submit(self._run_on_cuda, work, THREAD.meter, index, begun))

    def _run(self, work: Callable[[], None], meter: Meter | None) -> None:
        with torch.no_grad(), counting(meter):
            work()

    def _run_on_cuda(
        self, work: Callable[[], None], meter: Meter | None, index: int, begun: torch.cuda.Event
    ) -> None:
        with torch.cuda.device(index):
            if index not in self._streams:
                self._streams[index] = torch.cuda.Stream(index)
            with torch.cuda.stream(stream := self._streams[index]):
                begun.wait()
                self._run(work, meter)
                stream.synchronize()


HOST = HostLane()


def wait_on_host(ticket: Ticket, device: torch.device) -> None:
    """Wait for work whose results the host reads: on CUDA a ticket only orders a stream."""
    ticket.wait()
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def make_lane(name: str, device: torch.device, world: int) -> Lane:
    """A lane for the device."""
    if world == 1:
        return InlineLane()
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
