"""Moves between memory and a file, executed by a few threads beside compute.

A move is cut into blocks, which the threads take one at a time. Python's vectored reads and writes
release the GIL, so threads are enough to keep a disk busy.

Order: a move waits for earlier moves of its record that overlap with it, unless both are reads. All
other moves run concurrently. Reads have priority, because they will be waited for; but while reads
are queued, one block is always being written, so that writes progress and free their memory.
"""

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from shardwise.core.errors import UsageError
from shardwise.core.meter import THREAD
from shardwise.device.streams import Mark, block_host_until

BLOCK_BYTES = 8 << 20
"""Bytes per system call. After each call a thread needs the GIL and a core, and waits for them on a
busy machine: there 8 MiB read faster than 1, 2 or 4, and wrote as fast as 4."""

_WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def view_memory(address: int, nbytes: int) -> memoryview:
    """Memory as a buffer, without a copy; the caller must keep the memory alive."""
    view: memoryview = _view(address, nbytes, _WRITABLE)
    return view


class Scratch:
    """Page-aligned memory of one thread, of one block. It takes no memory until it is used."""

    def __init__(self, block_bytes: int) -> None:
        memory = mmap.mmap(-1, block_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.view = memoryview(memory)


class Move:
    """A read or a write of a range of a record, and the ticket for it."""

    def __init__(
        self,
        work: Callable[["Move", int, int, Scratch], None],
        tensor: torch.Tensor,
        begin: int,
        after_work: Mark = None,
        *,
        writes: bool,
    ) -> None:
        self.work, self.writes = work, writes
        self.after_work = after_work
        """The end of a device's work that uses the memory: a thread waits for it, no caller."""
        self.tensor = tensor
        self.meter = THREAD.meter
        """Of the operation that this is a part of."""
        self.address = tensor.data_ptr()
        self.begin, self.end = begin, begin + tensor.nbytes
        self.span = (self.begin, self.end)
        """The range of the record that it touches, in whole units: partial ones are rewritten."""
        self.blocks: list[tuple[int, int]] = []
        """Its blocks, in bytes of the record."""
        self.num_left = 0
        """The number of blocks that are not done."""
        self.num_before = 0
        """The number of moves that must be done first."""
        self.after: list[Move] = []
        """Moves that wait for this one."""
        self.active: list[Move] = []
        """The moves of its record that are not done."""
        self._error: BaseException | None = None
        self._done = threading.Event()

    def conflicts(self, other: "Move") -> bool:
        overlaps = self.span[0] < other.span[1] and other.span[0] < self.span[1]
        return overlaps and (self.writes or other.writes)

    def fail(self, error: BaseException) -> None:
        if self._error is None:  # the first error is the cause
            self._error = error

    def finish(self) -> None:
        del self.tensor, self.work  # a ticket that is kept must not keep memory or the store alive
        self._done.set()

    def block_host(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    order_stream = block_host  # a stream cannot wait for a disk

    def settle(self) -> None:
        """Wait until it is done or has failed."""
        self._done.wait()


class Movers:
    """The threads, and the queues of blocks."""

    def __init__(self, num_threads: int, block_bytes: int, name: str) -> None:
        self._block_bytes = block_bytes
        self._changed = threading.Condition()
        self._reads: deque[tuple[Move, int, int]] = deque()
        self._writes: deque[tuple[Move, int, int]] = deque()
        self._num_writing = 0
        self._wrote_last = False
        self._ending = False
        self._threads = [
            threading.Thread(target=self._run, name=f"shardwise-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, move: Move, active: list[Move]) -> None:
        """Queue a move behind the moves in ``active`` that conflict with it; adds it to them."""
        with self._changed:
            if self._ending:
                raise UsageError("A store was closed while a move was submitted to it.")
            for earlier in active:
                if move.conflicts(earlier):
                    earlier.after.append(move)
                    move.num_before += 1
            active.append(move)
            move.active = active
            if move.num_before == 0:
                self._release(move)

    def snapshot(self, active: list[Move]) -> list[Move]:
        """The moves that are not done."""
        with self._changed:
            return list(active)

    def end(self) -> None:
        """Finish the queued moves, and end the threads."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if threading.current_thread() not in self._threads:  # one may collect a dropped store
            for thread in self._threads:
                thread.join()

    def abandon(self) -> None:
        """End the threads after their current blocks: the other moves are no longer needed."""
        with self._changed:
            self._reads.clear()
            self._writes.clear()
        self.end()

    def _release(self, move: Move) -> None:
        queue = self._writes if move.writes else self._reads
        queue.extend((move, begin, end) for begin, end in move.blocks)
        self._changed.notify(len(move.blocks))

    def _run(self) -> None:
        scratch = Scratch(self._block_bytes)
        while (block := self._take()) is not None:
            move, begin, end = block
            try:
                block_host_until(move.after_work)
                move.work(move, begin, end, scratch)
            except BaseException as error:  # raised by the ticket
                move.fail(error)
            self._finish_block(move)
            del block, move  # the move may own large buffers

    def _take(self) -> tuple[Move, int, int] | None:
        with self._changed:
            while not self._reads and not self._writes:
                if self._ending:
                    return None
                self._changed.wait()
            write = bool(self._writes) and (
                not self._reads or (self._num_writing == 0 and not self._wrote_last)
            )
            self._wrote_last = write  # so that a single thread alternates
            self._num_writing += write
            return (self._writes if write else self._reads).popleft()

    def _finish_block(self, move: Move) -> None:
        with self._changed:
            self._num_writing -= move.writes
            move.num_left -= 1
            if move.num_left:
                return
            move.active.remove(move)
            for later in move.after:
                later.num_before -= 1
                if later.num_before == 0:
                    self._release(later)
            move.after.clear()
        move.finish()


def read_into(file: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all buffers from a file; short reads are continued."""
    _move_all(os.preadv, file, buffers, offset, "the file ended early")


def write_from(file: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers to a file; short writes are continued."""
    _move_all(os.pwritev, file, buffers, offset, "nothing more could be written")


def _move_all(
    call: Callable[[int, list[memoryview], int], int],
    file: int,
    buffers: Sequence[memoryview],
    offset: int,
    at_zero: str,
) -> None:
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        moved = call(file, left, offset)
        if moved == 0:
            raise OSError(at_zero)
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
