"""The heart of this process, and the ends of the process, which pass through it.

One heart serves all sharded models of a process. An uncaught exception is told to the other ranks,
a regular end too; a SIGTERM is looked at before it ends anything, because launchers send it to the
others when a rank has failed. Imports no torch.
"""

import atexit
import contextlib
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from shardwise.comm.heart import Heart
from shardwise.comm.testimony import raised_by_transport
from shardwise.core.errors import ShardwiseError, SyncError
from shardwise.core.failure import Report, dump_report
from shardwise.core.flight import SUFFIX

REPORT_FILE, REPORT_TEXT = "report.json", "report.txt"


class _Process:
    """What this process has: at most one heart, and the hooks through which it may end."""

    def __init__(self) -> None:
        self.heart: Heart | None = None
        self.pid = 0
        self.folder: Path | None = None
        self.stamp = ""
        self.prints = True
        self._hook: Callable[..., object] | None = None

    def hook(self) -> None:
        """Once: from now on this process's ends pass through the heart."""
        if self.pid == os.getpid():
            return
        self.pid = os.getpid()
        atexit.register(leave)
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _end_of_child, exitpriority=0)
        os.register_at_fork(after_in_child=self._forked)
        self._hook, sys.excepthook = sys.excepthook, self._uncaught

    def hear_signals(self, heart: Heart) -> None:
        """A SIGTERM wakes the heart even while the main thread is in a collective."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _terminated):
            return  # the program has its own way
        before = signal.set_wakeup_fd(heart.wake_writer, warn_on_full_buffer=False)
        if before == -1:
            signal.signal(signal.SIGTERM, _terminated)
        else:
            signal.set_wakeup_fd(before)  # the program waits for signals itself, as asyncio does

    def _forked(self) -> None:
        """A child of this process, such as a loader of data, is no rank."""
        self.heart = None
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is _terminated:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._hook is not None:
            sys.excepthook = self._hook

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        assert self._hook is not None
        hook = self._hook
        if not issubclass(kind, KeyboardInterrupt):
            die_of(error, show=lambda: hook(kind, error, trace))
        hook(kind, error, trace)


_process = _Process()


def current() -> Heart | None:
    """The heart of this process, if it beats."""
    heart = _process.heart
    return heart if heart is not None and heart.is_beating else None


def report_to(folder: str | os.PathLike[str] | None, *, prints: bool | None = None) -> None:
    """Where the report of a failure goes; None: as before."""
    _process.folder = _process.folder if folder is None else Path(folder)
    _process.prints = _process.prints if prints is None else prints


def adopt(heart: Heart, stamp: str) -> None:
    """From now on the ends of this process pass through a heart; ``stamp`` names its reports."""
    _process.heart, _process.stamp = heart, stamp
    heart.hears_sigterm = lambda: signal.getsignal(signal.SIGTERM) is _terminated
    _process.hook()
    _process.hear_signals(heart)


def leave() -> None:
    """This rank ends, and nothing is wrong: the others expect nothing of it any more."""
    heart, _process.heart = _process.heart, None
    if heart is not None and _process.pid == os.getpid():
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) is _terminated:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        heart.leave()


def _end_of_child() -> None:
    """A process of ``multiprocessing`` ends without the hook of exceptions, and a fork also without
    ``atexit``."""
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        die_of(error, show=traceback.print_exc)
    leave()


def die_of(error: BaseException, show: Callable[[], object] | None = None) -> None:
    """Tells the other ranks that an error ends this one, and ends with them; shows it before if it
    is what began it all. Returns if there are no others."""
    heart = _process.heart
    if heart is None or _process.pid != os.getpid():
        return
    is_symptom = isinstance(error, SyncError) or raised_by_transport(error)
    heart.die_of(describe(error), show, is_symptom=is_symptom)


def on_sigterm(action: Callable[[], None]) -> None:
    """What a SIGTERM does that is no consequence of a failure: by default it ends the process. A
    handler of the program's own stays."""
    if _process.heart is not None:
        _process.heart.on_sigterm = action
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # no heart hears of it
        signal.signal(signal.SIGTERM, lambda *_: action())


def describe(error: BaseException) -> str:
    """An error in a line."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    if isinstance(error, ShardwiseError):
        return f"{type(error).__name__}: {line}"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def publish(report: Report, flights: dict[int, bytes], is_first: bool) -> None:
    """Writes the report and the flight recorders of this host; the first rank also prints it."""
    name = f"failure-{_process.stamp}"
    folder = (_process.folder or Path("shardwise-failures")) / name
    shown = str(_process.folder or folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, ring in flights.items():
            (folder / f"rank-{rank}{SUFFIX}").write_bytes(ring)
        if is_first or not (folder / REPORT_FILE).exists():  # hosts may have disks of their own
            _write(folder / REPORT_TEXT, "\n".join(report.lines()) + "\n")
            _write(folder / REPORT_FILE, dump_report(report))
    except OSError as error:
        shown = ""
        if is_first:
            print(f"shardwise: {folder} cannot be written: {error.strerror}", file=sys.stderr)
    if is_first and _process.prints:
        print("\n".join(report.lines(shown)), file=sys.stderr, flush=True)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")  # both sides of a cut link may write
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _terminated(number: int, frame: object) -> None:
    """The heart hears of the signal by the wake-up file, whatever the main thread does. Without one
    the process ends as if nobody handled it."""
    heart = _process.heart
    if heart is None or not heart.is_beating or _process.pid != os.getpid():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
