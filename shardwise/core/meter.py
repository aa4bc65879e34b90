"""Counts of the bytes that links, stores and copies move, for each operation.

The code that executes an operation makes its ``Meter`` the current one of its thread; lanes and
stores pass it on to the threads that do the work. Without a meter, counting costs one comparison.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Meter:
    """What one operation has moved so far on this rank."""

    sent: Counter[int] = field(default_factory=Counter)
    """Bytes that crossed a link, by the exchange's key."""
    read: int = 0
    """Bytes that came from a tier."""
    written: int = 0
    """Bytes that went to one."""


class _Thread(threading.local):
    meter: Meter | None = None


THREAD = _Thread()
"""``THREAD.meter`` is the meter of the operation that this thread works for."""
_lock = threading.Lock()


@contextmanager
def counting(meter: Meter | None) -> Iterator[None]:
    """Inside, this thread counts what it moves with this meter.

    >>> with counting(Meter()) as _, counting(meter := Meter()):
    ...     count_sent(7, 100)
    >>> meter.sent
    Counter({7: 100})
    """
    before, THREAD.meter = THREAD.meter, meter
    try:
        yield
    finally:
        THREAD.meter = before


def count_sent(key: int, nbytes: int) -> None:
    """Count bytes of an exchange over a link: those that this rank sends, as many as it gets."""
    meter = THREAD.meter
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
