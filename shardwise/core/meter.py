"""Counts of the bytes that links, stores and copies move, for each operation.

The code that executes an operation makes its ``Meter`` the current one of its thread; lanes and
stores pass it on to the threads that do the work. Without a meter, counting costs one comparison.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """What one operation has moved so far on this rank."""

    __slots__ = ("read", "sent", "written")

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        """Bytes that crossed a link, by the exchange's key."""
        self.read = 0
        """Bytes that came from a tier."""
        self.written = 0
        """Bytes that went to one."""


_thread = threading.local()
_lock = threading.Lock()


def current() -> Meter | None:
    """The meter of the operation that this thread works for."""
    return getattr(_thread, "meter", None)


def set_current(meter: Meter | None) -> Meter | None:
    """Makes a meter the thread's; returns the one before it."""
    before = current()
    _thread.meter = meter
    return before


@contextmanager
def counting(meter: Meter | None) -> Iterator[None]:
    """Inside, this thread counts what it moves with this meter.

    >>> with counting(Meter()) as _, counting(meter := Meter()):
    ...     count_sent(7, 100)
    >>> meter.sent
    Counter({7: 100})
    """
    before = set_current(meter)
    try:
        yield
    finally:
        set_current(before)


def count_sent(key: int, nbytes: int) -> None:
    """A link has moved bytes of an exchange: as many as this rank sends, and gets."""
    meter = current()
    if meter is not None:
        with _lock:
            meter.sent[key] += nbytes


def count_moved(meter: Meter | None, nbytes: int, *, writes: bool) -> None:
    """Count bytes moved between memory and a tier."""
    if meter is None:
        return
    with _lock:
        if writes:
            meter.written += nbytes
        else:
            meter.read += nbytes
