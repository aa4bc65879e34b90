"""Traces of a step: spans on tracks, saved in the format of Chrome and Perfetto.

At most one trace is active in a process; without one a span costs a comparison.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from shardwise.core.flight import RECORDER


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a track that took time."""

    track: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Count:
    """Amounts from this moment until the next count."""

    name: str
    at_s: float
    amounts: Mapping[str, float]


PREDICTED = "predicted"
_PREDICTED_PID = 1_000_000
"""Larger than any rank, so that a prediction and measured ranks can be put into one file."""


class Trace:
    """Spans of one process; any thread may add to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counts: list[Count] = []
        self._lock = threading.Lock()
        self._current: dict[str, tuple[str, float]] = {}

    def add(self, track: str, name: str, begin_s: float, end_s: float) -> None:
        with self._lock:
            self.spans.append(Span(track, name, begin_s, end_s))

    def switch(self, track: str, name: str | None) -> None:
        """End the current span of a track, and begin ``name``; None: begin nothing."""
        now = time.perf_counter()
        before = self._current.pop(track, None)
        if before is not None:
            self.add(track, before[0], before[1], now)
        if name is not None:
            self._current[track] = (name, now)

    def save(self, path: str | os.PathLike[str], *, rank: int = 0, predicted: bool = False) -> None:
        """Write Chrome's trace format; times are microseconds since the first span."""
        pid, process = (_PREDICTED_PID, PREDICTED) if predicted else (rank, f"rank {rank}")
        for track in list(self._current):
            self.switch(track, None)
        origin = min((span.begin_s for span in self.spans), default=0.0)
        tracks = list(dict.fromkeys(span.track for span in self.spans))
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        ]
        for index, track in enumerate(tracks):
            name = {"name": track}
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": index, "args": name}
            )
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "pid": pid,
                    "tid": tracks.index(span.track),
                    "ts": round((span.begin_s - origin) * 1e6, 1),
                    "dur": round((span.end_s - span.begin_s) * 1e6, 1),
                }
            )
        for count in self.counts:
            at, amounts = round((count.at_s - origin) * 1e6, 1), dict(count.amounts)
            events.append({"ph": "C", "name": count.name, "pid": pid, "ts": at, "args": amounts})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events}, file)


_active: Trace | None = None


def active() -> Trace | None:
    return _active


@contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """Inside, spans of this process are added to ``trace``."""
    global _active
    before, _active = _active, trace
    shown, RECORDER.shows = RECORDER.shows, partial(trace.switch, "compute")
    try:
        yield trace
    finally:
        _active, RECORDER.shows = before, shown


@contextmanager
def span(track: str, name: str) -> Iterator[None]:
    """Record what happens inside as a span, if a trace is active.

    >>> with recording(Trace()) as trace, span("disk", "read"):
    ...     pass
    >>> [(span.track, span.name) for span in trace.spans]
    [('disk', 'read')]
    """
    trace = _active
    if trace is None:
        yield
        return
    begin = time.perf_counter()
    try:
        yield
    finally:
        trace.add(track, name, begin, time.perf_counter())
