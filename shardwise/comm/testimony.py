"""What a rank says about itself, or what its flight recorder says, when something has failed."""

import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from shardwise.core.failure import Doing, Statement
from shardwise.core.flight import AGREEMENT, RECORDER, Flight, read

_MOST = 6
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (_OURS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_COLLECTIVES = "distributed_c10d.py"
_COMMUNICATING = ("gather", "reduce", "replicate", "refresh", "wait for", AGREEMENT)


def own_statement(rank: int, host: str, pid: int) -> Statement:
    """What this rank is doing now."""
    flight = read(RECORDER.snapshot())
    return statement_of(flight, rank, host, pid, line=_user_line())


def statement_of(flight: Flight, rank: int, host: str, pid: int, line: str = "") -> Statement:
    """What a rank is doing, or was doing when it ended, by its flight recorder."""
    now = time.perf_counter()
    doing = [
        Doing(stack[-1].thread, stack[-1].title, now - stack[-1].at_s)
        for stack in flight.open().values()
    ]
    doing.sort(key=lambda one: (one.title.startswith("wait"), -one.for_s))
    done = [event for event in flight.events if event.what]
    last = f"{done[-1].title}, {now - done[-1].at_s:.1f} s ago" if done else ""
    step = f"after step {flight.step}" if flight.step else "in its first step"
    return Statement(rank, host, pid, tuple(doing[:_MOST]), last, line, step)


def communicates() -> bool:
    """Whether this rank is in an exchange with others, or waits for one."""
    begun = read(RECORDER.snapshot()).open().values()
    if any(event.what.startswith(_COMMUNICATING) for stack in begun for event in stack):
        return True
    return any(frame.f_code.co_filename.endswith(_COLLECTIVES) for frame in _main_frames())


def raised_by_transport(error: BaseException | None) -> bool:
    """Whether an error comes from torch.distributed: its cause is probably another rank."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.endswith(_COLLECTIVES):
                return isinstance(error, RuntimeError)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return False


def _main_frames() -> Iterator[FrameType]:
    """The frames of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_line() -> str:
    """Where the user's program is: the innermost place that is in no library."""
    for frame in _main_frames():
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
    return ""
