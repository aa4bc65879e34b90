"""A new file that is written from front to back, beside the program and past the page cache.

What is appended is copied into one of a few buffers; a full one is written by a thread, with direct
I/O where the file system has it, while the next is filled. Imports no torch.
"""

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

_BUFFER_BYTES = 1 << 22
_BUFFERS = 3


class Appender:
    """Appends to a new file; after an error it is useless, and its folder is discarded."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct = self._file
        """For whole buffers; past the page cache if possible."""
        with suppress(OSError):
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        self._idle: list[mmap.mmap] = []
        self._made = self._used = 0
        self._buffer: mmap.mmap | None = None
        self._begun = 0
        """Where in the file the current buffer will be."""
        self._writes: deque[Future[mmap.mmap]] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shardwise-checkpoint")

    def write(self, data: bytes | memoryview) -> None:
        """Append; returns when ``data`` may change."""
        left = memoryview(data)
        self.position += len(left)
        while left:
            if self._buffer is None:
                self._buffer, self._used = self._take(), 0
            part = left[: _BUFFER_BYTES - self._used]
            target = np.frombuffer(self._buffer, np.uint8, len(part), self._used)
            target[:] = np.frombuffer(part, np.uint8)  # without the GIL
            self._used, left = self._used + len(part), left[len(part) :]
            if self._used == _BUFFER_BYTES:
                self._submit()

    def align(self, multiple: int) -> None:
        self.write(bytes(-self.position % multiple))

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        while self._writes:
            self._idle.append(self._writes.popleft().result())
        if self._buffer is not None and self._used:
            self._put(self._file, self._buffer, self._used, self._begun)
        self._buffer = None
        os.fsync(self._file)

    def close(self) -> None:
        """Give everything back; what was not synchronised may be lost."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._buffer = None
        self._idle.clear()
        self._writes.clear()
        if self._direct != self._file:
            os.close(self._direct)
        os.close(self._file)

    def _take(self) -> mmap.mmap:
        if self._idle:
            return self._idle.pop()
        if self._made < _BUFFERS:
            self._made += 1
            return mmap.mmap(-1, _BUFFER_BYTES)
        return self._writes.popleft().result()

    def _submit(self) -> None:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        self._writes.append(
            self._writer.submit(self._put, self._direct, buffer, _BUFFER_BYTES, self._begun)
        )
        self._begun += _BUFFER_BYTES

    def _put(self, file: int, buffer: mmap.mmap, nbytes: int, offset: int) -> mmap.mmap:
        try:
            with memoryview(buffer) as whole:
                done = 0
                while done < nbytes:
                    try:
                        done += os.pwrite(file, whole[done:nbytes], offset + done)
                    except OSError as error:  # some file systems refuse direct I/O only here
                        if error.errno != errno.EINVAL or file == self._file:
                            raise
                    file = self._file  # what is left may not begin on a page
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return buffer
