"""Reads intervals of a checkpoint's tensors, and checks every byte that it reads."""

import os
import struct
import zlib
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from shardwise.checkpoint.training.checksums import block_bytes, num_blocks
from shardwise.checkpoint.training.index import Chunk, Index, Tensor, read_index
from shardwise.core.errors import UsageError

_OPEN_FILES = 64
_AHEAD_BYTES = 1 << 24


class DamagedError(UsageError):
    """Bytes of a checkpoint are not those that were saved."""


class Reader:
    """Reads one checkpoint; not thread-safe."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index = index if index is not None else read_index(folder)
        self.bytes_read = 0
        """Data of tensors that was read from files."""
        self._files: OrderedDict[int, int] = OrderedDict()
        self._tables: dict[int, memoryview] = {}
        self._scratch = bytearray()
        self._last: tuple[Chunk, int, bytes] | None = None
        """The last block that was only used in part: the next read often begins there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor; only for small ones."""
        tensor = self.index.find(name)
        if tensor is None:
            raise UsageError(f"Checkpoint '{self.folder}' has no tensor '{name}'.")
        out = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        self.read(name, 0, out.view(-1))
        return out

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor of the saved dtype with elements from ``start`` on."""
        tensor = self.index.find(name)
        assert tensor is not None, name
        assert str(out.dtype) == f"torch.{tensor.dtype}", name
        target = out.view(torch.uint8).numpy().data if out.numel() else memoryview(b"")
        stop = start + out.numel()
        place = bisect_right(tensor.chunks, start, key=lambda chunk: chunk.start) - 1
        while start < stop:
            chunk = tensor.chunks[place]
            end = min(stop, chunk.stop)
            self._expect(tensor, chunk, start)
            begin, nbytes = start - chunk.start, (end - start) * tensor.item_bytes
            self._read(name, tensor, chunk, begin * tensor.item_bytes, target[:nbytes])
            target, start, place = target[nbytes:], end, place + 1

    def _expect(self, tensor: Tensor, chunk: Chunk, start: int) -> None:
        """Let the system read ahead, of this chunk, what is likely asked for next."""
        begin = (start - chunk.start) * tensor.item_bytes
        nbytes = min(_AHEAD_BYTES, chunk.numel * tensor.item_bytes - begin)
        if nbytes > _AHEAD_BYTES // 8 and hasattr(os, "posix_fadvise"):
            file = self._open(chunk.file)
            os.posix_fadvise(file, chunk.data + begin, nbytes, os.POSIX_FADV_WILLNEED)

    def _read(
        self, name: str, tensor: Tensor, chunk: Chunk, begin: int, target: memoryview
    ) -> None:
        """Bytes of a chunk: whole blocks are read and checked, the rest of them is dropped."""
        total = chunk.numel * tensor.item_bytes
        size = block_bytes(total)
        if self._last is not None and self._last[0] == chunk and self._last[1] == begin // size:
            block = memoryview(self._last[2])[begin % size :][: len(target)]
            target[: len(block)] = block
            target, begin = target[len(block) :], begin + len(block)
        if not target:
            return
        first, last = begin // size, (begin + len(target) - 1) // size
        origin, end = first * size, min((last + 1) * size, total)
        if len(self._scratch) < end - origin:
            self._scratch = bytearray(end - origin)
        data = memoryview(self._scratch)[: end - origin]
        self._fill(chunk.file, chunk.data + origin, data)
        self.bytes_read += len(data)
        checks = self._checks(chunk, total, first, last + 1)
        for number, expected in enumerate(checks):
            if zlib.crc32(data[number * size : (number + 1) * size]) != expected:
                at = chunk.data + origin + number * size
                raise DamagedError(
                    f"'{self.folder / self.index.files[chunk.file].name}' is damaged between bytes "
                    f"{at} and {min(at + size, chunk.data + total)}, which are part of '{name}'."
                )
        target[:] = data[begin - origin :][: len(target)]
        self._last = (chunk, last, bytes(data[(last - first) * size :]))

    def _checks(self, chunk: Chunk, total: int, first: int, stop: int) -> tuple[int, ...]:
        file = self.index.files[chunk.file]
        table = self._tables.get(chunk.file)
        if table is None:
            data = bytearray(file.num_bytes - file.table)
            self._fill(chunk.file, file.table, memoryview(data))
            if zlib.crc32(data) != file.table_crc:
                raise DamagedError(
                    f"'{self.folder / file.name}' is damaged: its table of checksums, from byte "
                    f"{file.table} on, is not the one that was saved."
                )
            table = self._tables[chunk.file] = memoryview(data)
        assert stop <= num_blocks(total)
        begin = 4 * (chunk.first_check + first)
        return struct.unpack_from(f"<{stop - first}I", table, begin)

    def _fill(self, number: int, offset: int, target: memoryview) -> None:
        name = self.index.files[number].name
        try:
            file = self._open(number)
            while target:
                got = os.preadv(file, [target], offset)
                if not got:
                    raise DamagedError(f"'{self.folder / name}' is damaged: it ends too early.")
                target, offset = target[got:], offset + got
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.folder / name)) from error

    def _open(self, number: int) -> int:
        if number in self._files:
            self._files.move_to_end(number)
        else:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            path = self.folder / self.index.files[number].name
            self._files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._files[number]
