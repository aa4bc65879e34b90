"""The flight recorder: a ring of the last operations of a rank, cheap enough to be always on.

The ring is memory of fixed size that other processes of the host may map: what a rank did last can
be read after it was killed, without its help. A record is 16 bytes; names are written once.
"""

import itertools
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path

_MAGIC = b"swflight"
_HEADER = struct.Struct("<8sIiIId")
"""Magic, version, rank, pid, bytes of names, and the wall clock when the monotonic one was 0."""
_STEP, _STEP_AT = struct.Struct("<q"), 48
_RECORD = struct.Struct("<dHHHBB")
"""When, what, unit, thread, mark, and the turn."""
_LENGTH = struct.Struct("<H")
_VERSION = 1
_NAMES_BYTES = 1 << 16
_RECORDS = 2048
_NAMES_AT = 64
_RECORDS_AT = _NAMES_AT + _NAMES_BYTES
SIZE = _RECORDS_AT + _RECORDS * _RECORD.size
SUFFIX = ".flight"
AGREEMENT = "agreement on "
"""How an exchange between all ranks, outside of lanes, begins."""
TURNS = 256


class Mark(IntEnum):
    """What a record says."""

    BEGIN = 1
    END = 2
    POINT = 3
    """Something that takes no time, such as the number of a step."""
    RESET = 4
    """Whatever the thread had begun is over: an exception left it."""


_MARKS = {mark.value for mark in Mark}


@dataclass(frozen=True, slots=True)
class Event:
    """One record of a ring."""

    at_s: float
    """On the host's monotonic clock, which all of its processes share."""
    thread: str
    mark: Mark
    what: str
    unit: str
    turn: int = 0
    """How many operations the thread had begun, modulo ``TURNS``. Lanes do the same on all ranks,
    in the same order, so that this tells which of two ranks is ahead."""

    @property
    def title(self) -> str:
        return f"{self.what} of unit '{self.unit}'" if self.unit else self.what


@dataclass(frozen=True, slots=True)
class Flight:
    """What a ring has: the last events of a rank, in order."""

    rank: int
    pid: int
    wall_s: float
    """The wall clock when the monotonic one was 0."""
    step: int
    """The optimizer steps that it has completed."""
    events: tuple[Event, ...]

    def open(self) -> dict[str, list[Event]]:
        """What each thread has begun and not ended, the outermost first."""
        stacks: dict[str, list[Event]] = {}
        for event in self.events:
            stack = stacks.setdefault(event.thread, [])
            if event.mark is Mark.BEGIN:
                stack.append(event)
            elif event.mark is Mark.RESET:
                stack.clear()
            elif event.mark is Mark.END:
                alike = [i for i, begun in enumerate(stack) if begun.title == event.title]
                if alike:
                    del stack[alike[-1] :]
        return {thread: stack for thread, stack in stacks.items() if stack}


class _Thread(threading.local):
    entry: list[int] | None = None
    """The number of its name, and how many operations it has begun."""


Write = Callable[..., float]


class Recorder:
    """Writes the ring of this process; any thread may. About half a microsecond a record."""

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray(SIZE)
        self._turns = itertools.count()
        self._names: dict[str, int] = {"": 0}
        self._used = 0
        self._mine = _Thread()
        self._latest: dict[int, tuple[float, tuple[Mark, str, str]]] = {}
        """The last record of each thread, for a look that costs nothing."""
        self._lock = threading.Lock()
        self._identity = -1, 0
        self._step = 0
        self.begin: Write = partial(self.write, Mark.BEGIN)
        """Something begins on this thread: ``begin(what, unit)`` returns the time."""
        self.end: Write = partial(self.write, Mark.END)
        """It is over."""
        self.point: Write = partial(self.write, Mark.POINT)
        self.shows: Callable[[str | None], None] | None = None
        """Also called with what the program computes; of the active trace."""

    def computes(self, what: str = "", unit: str = "") -> None:
        """The program computes a unit from now on, or nothing that is in one."""
        if what:
            self.write(Mark.POINT, what, unit)
        if self.shows is not None:
            self.shows(f"{what} {unit}" if what else None)

    def reset(self) -> None:
        """This thread begins anew: an exception may have left what it had begun."""
        self.write(Mark.RESET, "", "")

    def stepped(self, step: int | None = None) -> None:
        """An optimizer step is done; ``step`` is its number, if the program counts otherwise."""
        self._step = self._step + 1 if step is None else step
        _STEP.pack_into(self._memory, _STEP_AT, self._step)

    def share(self, rank: int) -> str:
        """Move the ring to memory that other processes can map; returns the path of its file, which
        the caller removes as soon as they have."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix="shardwise-", suffix=SUFFIX, dir=folder)
        try:
            os.posix_fallocate(handle, 0, SIZE)  # a full file system is an error here, not later
            shared = mmap.mmap(handle, SIZE)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        with self._lock:
            self._identity = rank, os.getpid()
            shared[:] = bytes(self._memory)
            self._memory = shared
            self._head()
        return path

    def position(self) -> str:
        """What this rank is doing, in a few words: what has been under way for longest."""
        latest = [Event(at, "", *rest) for at, rest in list(self._latest.values())]
        open_ones = [event for event in latest if event.mark is Mark.BEGIN]
        waits = [event for event in open_ones if event.what.startswith("wait")]
        found = [event for event in open_ones if event not in waits] or waits or latest[-1:]
        return min(found, key=lambda event: event.at_s).title if found else ""

    def snapshot(self) -> bytes:
        """The ring as it is now."""
        return bytes(self._memory)

    def write(self, mark: Mark, what: str, unit: str = "") -> float:
        """Add a record; returns its time."""
        now = time.perf_counter()
        names, thread = self._names, self._mine.entry
        if what not in names or unit not in names or not thread:
            thread = self._introduce(what, unit)
        thread[1] += mark == 1
        at = _RECORDS_AT + next(self._turns) % _RECORDS * 16
        _RECORD.pack_into(
            self._memory, at, now, names[what], names[unit], thread[0], mark, thread[1] % TURNS
        )
        self._latest[thread[0]] = now, (mark, what, unit)
        return now

    def _introduce(self, what: str, unit: str) -> list[int]:
        with self._lock:
            thread = threading.current_thread().name.removeprefix("shardwise-")
            for name in (what, unit, thread):
                if name not in self._names:
                    self._add(name)
            self._mine.entry = self._mine.entry or [self._names[thread], 0]
            return self._mine.entry

    def _add(self, name: str) -> None:
        text = name.encode()[:200]
        begin = _NAMES_AT + self._used
        if self._used + _LENGTH.size + len(text) > _NAMES_BYTES:
            self._names[name] = 0  # no room for more names: its records stay, without it
            return
        _LENGTH.pack_into(self._memory, begin, len(text))
        self._memory[begin + _LENGTH.size : begin + _LENGTH.size + len(text)] = text
        self._used += _LENGTH.size + len(text)
        self._names[name] = sum(1 for number in self._names.values() if number) + 1
        self._head()

    def _head(self) -> None:
        wall = time.time() - time.perf_counter()
        _HEADER.pack_into(self._memory, 0, _MAGIC, _VERSION, *self._identity, self._used, wall)


RECORDER = Recorder()
"""The one of this process. Its ring moves to shared memory when several ranks train."""


def attach(path: str | os.PathLike[str]) -> mmap.mmap:
    """The ring of another process, which changes as that goes on."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)


def read(memory: bytes | mmap.mmap) -> Flight:
    """What a ring has. Records that are being written while it is read may be missing.

    >>> recorder = Recorder()
    >>> _ = recorder.begin("gather", "blocks.0"), recorder.begin("copy"), recorder.end("copy")
    >>> [event.title for event in read(recorder.snapshot()).open()["MainThread"]]
    ["gather of unit 'blocks.0'"]
    """
    data = bytes(memory[:])
    if len(data) != SIZE or not (data.startswith(_MAGIC) or not any(data[: _HEADER.size])):
        raise ValueError("not a flight recorder's file")
    _, version, rank, pid, used, wall = _HEADER.unpack_from(data)
    if version > _VERSION:
        raise ValueError(f"a flight recorder's file of version {version}, which is newer than this")
    (step,) = _STEP.unpack_from(data, _STEP_AT)
    names = _read_names(data, used)
    events = []
    for at in range(_RECORDS_AT, SIZE, _RECORD.size):
        when, what, unit, thread, mark, turn = _RECORD.unpack_from(data, at)
        if when and max(what, unit, thread) < len(names) and mark in _MARKS:
            named = names[thread], Mark(mark), names[what], names[unit]
            events.append(Event(when, *named, turn))
    # Of a ring in order every event is later than the one before, except where the ring begins.
    first = next((i for i in range(1, len(events)) if events[i].at_s < events[i - 1].at_s), 0)
    in_order = sorted(events[first:] + events[:first], key=lambda event: event.at_s)
    return Flight(rank, pid, wall, step, tuple(in_order))


def read_folder(folder: Path) -> list[Flight]:
    """The flights of a run's ranks, in order of the ranks."""
    found = [read(path.read_bytes()) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return sorted(found, key=lambda flight: flight.rank)


def _read_names(data: bytes, used: int) -> list[str]:
    names, at, end = [""], _NAMES_AT, _NAMES_AT + min(used, _NAMES_BYTES)
    while at + _LENGTH.size <= end:
        (length,) = _LENGTH.unpack_from(data, at)
        text = data[at + _LENGTH.size : at + _LENGTH.size + length]
        names.append(text.decode("utf-8", "replace"))
        at += _LENGTH.size + length
    return names
