"""What one thread of the host tells another.

Only a thread that has waited for a stream knows that its work is over. The detector keeps this
knowledge for each thread, and passes it on where Python's own tools do: when a thread starts or is
joined, when a lock is released and then taken (so with queues, events, conditions, futures, pools),
and around a backward, whose threads share the knowledge of the main one.
"""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch


def watch(device: ModuleType) -> None:
    """Makes locks, threads and queues of this process pass on what they order."""
    _Watched.device = device
    _watch_threads()
    _watch_locks()
    _watch_queues()
    _watch_backward()


class _Watched:
    device: ModuleType


def _knowledge() -> Any:
    return _Watched.device.knowledge()


def _learn(told: Any) -> None:
    if told is not None:
        _Watched.device.learn(told)


def _watch_threads() -> None:
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join
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

    del run
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
        _learn(self._told)
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

    def _is_owned(self) -> bool:
        return self._lock._is_owned()

    def _release_save(self) -> Any:
        self._told = _knowledge()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        _learn(self._told)


def _watch_locks() -> None:
    threading.Lock = _Lock
    threading.RLock = _RLock


def _watch_queues() -> None:
    # A queue written in C passes things on without a lock that could be seen.
    class SimpleQueue(queue._PySimpleQueue):
        def __init__(self) -> None:
            super().__init__()
            self._lock = _Lock()

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            with self._lock:
                pass
            super().put(item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            item = super().get(block, timeout)
            with self._lock:
                return item

    queue.SimpleQueue = SimpleQueue
    submit = ThreadPoolExecutor.submit

    def submitted(self: ThreadPoolExecutor, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        told = _knowledge()

        def told_work() -> Any:
            _learn(told)
            return work(*args, **kwargs)

        return submit(self, told_work)

    ThreadPoolExecutor.submit = submitted


def _watch_backward() -> None:
    run = torch.autograd.graph._engine_run_backward
    del run
