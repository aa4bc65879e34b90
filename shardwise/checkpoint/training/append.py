"""A new file that is written from front to back, beside the caller.

Threads write full buffers while the next is filled. Where the file system has direct I/O the page
cache is not used: it would cost a copy, and what it holds would compete with the tiers for memory.
"""

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

BUFFER_BYTES = 4 << 20
_WRITERS = 2
_BUFFERS = 2 * _WRITERS


class Appender:
    """After an error it is useless, and its folder is discarded."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        self._file, self._is_direct = _create(path)
        self._threads = ThreadPoolExecutor(_WRITERS, "shardwise-checkpoint")
        self._writing: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._buffer, self._filled, self._sent = mmap.mmap(-1, BUFFER_BYTES), 0, 0

    def write(self, data: bytes | memoryview) -> None:
        self.position += len(data)
        while data:
            part = data[: BUFFER_BYTES - self._filled]
            target = np.frombuffer(self._buffer, np.uint8, len(part), self._filled)
            target[:] = np.frombuffer(part, np.uint8)  # without the GIL
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._send()
                self._buffer, self._filled = self._next(), 0

    def align(self, multiple: int) -> None:
        self.write(bytes(-self.position % multiple))

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        if self._is_direct:  # whole pages; what is too much is cut off
            self._filled += -self._filled % mmap.PAGESIZE
        self._send()
        while self._writing:
            self._writing.popleft()[0].result()
        os.ftruncate(self._file, self.position)
        os.fsync(self._file)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        os.close(self._file)

    def _send(self) -> None:
        """Begin to write the buffer."""
        view = memoryview(self._buffer)[: self._filled]
        writing = self._threads.submit(self._write, view, self._sent)
        self._writing.append((writing, self._buffer))
        self._sent += self._filled

    def _next(self) -> mmap.mmap:
        if len(self._writing) < _BUFFERS - 1:
            return mmap.mmap(-1, BUFFER_BYTES)
        writing, buffer = self._writing.popleft()
        writing.result()
        return buffer

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def _create(path: Path) -> tuple[int, bool]:
    """A new file, and whether writes to it are direct."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems refuse after they have made it
    return os.open(path, flags, 0o644), False
