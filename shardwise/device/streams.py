"""Order between streams, and between streams and the host: two different waits.

[Note: Two waits]
``order_after`` makes the *current stream* wait: whatever is enqueued on it from now on runs after
the work, and the host goes on at once. It is what memory on the device needs. ``block_host_until``
makes the *host* wait: afterwards the host itself may read and write the memory that the work uses.
It is needed wherever a thread, a disk or an optimizer on the CPU touches that memory, and costs
time in which the host cannot enqueue compute. A ``core.ticket.Ticket`` has the same two.

On a CPU work is done when its call returns, so a mark is None and both return at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.device.abilities import has_streams

Mark = torch.Event | None
"""A point on a stream: what was enqueued before it. None: a point that is passed already."""

_HIGH_PRIORITY = -1
"""Torch's word for streams whose work goes first when the device has room for one of two."""


def mark(device: torch.device, stream: torch.Stream | None = None) -> Mark:
    """Everything that was enqueued so far on a stream, by default the current one."""
    if not has_streams(device):
        return None
    event = torch.Event(device)
    event.record(stream if stream is not None else torch.accelerator.current_stream(device))
    return event


def order_after(point: Mark) -> None:
    """The current stream waits, the host goes on: see [Note: Two waits]."""
    if point is not None:
        torch.accelerator.current_stream(point.device).wait_event(point)


def block_host_until(point: Mark) -> None:
    """The host waits: see [Note: Two waits]."""
    if point is not None:
        point.synchronize()


def has_passed(point: Mark) -> bool:
    """Whether a wait would return at once."""
    return point is None or bool(point.query())


def synchronize(device: torch.device) -> None:
    """The host waits for all streams of a device."""
    if has_streams(device):
        torch.accelerator.synchronize(device)


def side_stream(device: torch.device) -> torch.Stream:
    """A stream for transfers. They go before compute where both could run: compute waits for
    them, and they take few of the device's processors."""
    return torch.Stream(device, priority=_HIGH_PRIORITY)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream on which this thread enqueues now."""
    return torch.accelerator.current_stream(device)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Inside, this thread enqueues on a stream, and its device is the current one.

    Unlike ``with stream``, which keeps what it restores in the stream itself, this may be nested
    and used by several threads at once.
    """
    device = stream.device
    with torch.accelerator.device_index(device.index):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


class Copies:
    """Copies between a device and pinned memory of its host, on a stream of their own: compute and
    collectives go on beside them. Without streams they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device) if has_streams(device) else None

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, after: Mark = None) -> Mark:
        """Copies what the current stream has made of ``source``; ``target`` has it after the mark.

        Neither may be freed or change before that; a pool takes the mark as ``last_use``. Until
        ``after`` other work may use ``target``.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        begun = mark(self._device)
        with on_stream(self._stream):
            order_after(begun)
            order_after(after)
            target.copy_(source, non_blocking=True)
            return mark(self._device)

    def keep_alive(self, tensor: torch.Tensor) -> None:
        """A tensor of torch's allocator may be dropped now, although a copy still uses it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
