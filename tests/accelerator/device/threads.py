"""What one thread of the host tells another.

Only a thread that has waited for a stream knows that its work is over. The detector keeps this
knowledge for each thread, and passes it on where Python's own tools do: when a thread starts or is
joined, and when a lock is released and then taken. Everything else in ``threading``, ``queue`` and
``concurrent.futures`` is made of locks, so it passes on what its locks do. A backward and the
threads of autograd share what they know while it runs.

What threads learn in another way (a flag that one polls, a pipe) is not seen: such code would be
reported, although on a real device it may be right.
"""

import functools
import queue
import threading
from types import ModuleType
from typing import Any

import torch


def watch(device: ModuleType) -> None:
    """Makes threads, locks and queues of this process that are made from now on pass on what they
    order, and backwards from now on."""
    _Watched.device = device
    device.begin_thread(device.knowledge())  # this thread, usually the main one
    _watch_threads()
    threading.Lock = _Lock
    threading.RLock = _RLock
    # The one written in C has no lock that could be watched; this one has the same methods.
    queue.SimpleQueue = queue._PySimpleQueue
    _watch_backward()


class _Watched:
    device: ModuleType


def _knowledge() -> Any:
    return _Watched.device.knowledge()


def _learn(told: Any) -> None:
    if told is not None:
        _Watched.device.learn(told)


def _watch_threads() -> None:
    start, join = threading.Thread.start, threading.Thread.join
    bootstrap = threading.Thread._bootstrap_inner

    def started(self: threading.Thread) -> None:
        self._told = _knowledge()
        start(self)

    def begun(self: threading.Thread) -> None:
        _Watched.device.begin_thread(self._told)
        try:
            bootstrap(self)
        finally:
            self._told_at_end = _knowledge()

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            _learn(getattr(self, "_told_at_end", None))

    threading.Thread.start = started
    threading.Thread._bootstrap_inner = begun
    threading.Thread.join = joined


class _Lock:
    """A lock that tells who takes it what those knew who had it before."""

    _make = staticmethod(threading.Lock)

    def __init__(self) -> None:
        self._lock = self._make()
        self._told: Any = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._lock.acquire(blocking, timeout)
        if got:
            _learn(self._told)
        return got

    def release(self) -> None:
        _learn(self._told)  # another thread may release a lock than the one that took it
        self._told = _knowledge()
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


class _RLock(_Lock):
    _make = staticmethod(threading.RLock)

    # What conditions ask of a lock that one thread may take several times.
    def _is_owned(self) -> bool:
        return self._lock._is_owned()

    def _release_save(self) -> Any:
        self._told = _knowledge()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        _learn(self._told)


def _watch_backward() -> None:
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        _Watched.device.begin_backward()
        try:
            return run(*args, **kwargs)
        finally:
            _Watched.device.end_backward()

    torch.autograd.graph._engine_run_backward = watched
    torch.autograd._engine_run_backward = watched  # imported by name
