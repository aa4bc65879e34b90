"""Reads intervals of a checkpoint's tensors, and checks every byte that it reads."""

import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from shardwise.checkpoint.training.checksums import block_bytes, num_blocks
from shardwise.checkpoint.training.index import Chunk, Index, Tensor, read_index
from shardwise.core.checksum import crc32
from shardwise.core.errors import UsageError

_OPEN_FILES = 64


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
        self._last: tuple[Chunk, int, bytearray] | None = None
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

    def expect(self, name: str, start: int, stop: int) -> None:
        """Ask the system to read elements that will be read soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        tensor = self.index.find(name)
        assert tensor is not None, name
        for chunk, begin, end in _runs(tensor, start, stop):
            os.posix_fadvise(
                self._open(chunk.file), chunk.data + begin, end - begin, os.POSIX_FADV_WILLNEED
            )

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor of the saved dtype with elements from ``start`` on."""
        tensor = self.index.find(name)
        assert tensor is not None, name
        assert str(out.dtype) == f"torch.{tensor.dtype}", name
        target = out.view(torch.uint8).numpy().data if out.numel() else memoryview(b"")
        for chunk, begin, end in _runs(tensor, start, start + out.numel()):
            self._read(name, tensor, chunk, begin, target[: end - begin])
            target = target[end - begin :]

    def _read(
        self, name: str, tensor: Tensor, chunk: Chunk, begin: int, target: memoryview
    ) -> None:
        """Bytes of a chunk: whole blocks go to their place, others through a buffer."""
        total = chunk.numel * tensor.item_bytes
        size = block_bytes(total)
        while target:
            number, inside = divmod(begin, size)
            ends = begin + len(target) == total
            whole = len(target) if ends else len(target) // size * size
            if not inside and whole:
                part = target[:whole]
                self._read_blocks(name, tensor, chunk, number, part)
            else:
                if self._last is None or self._last[:2] != (chunk, number):
                    data = bytearray(min(size, total - number * size))
                    self._read_blocks(name, tensor, chunk, number, memoryview(data))
                    self._last = (chunk, number, data)
                block = self._last[2]
                part = target[: len(block) - inside]
                part[:] = block[inside : inside + len(part)]
            target, begin = target[len(part) :], begin + len(part)

    def _read_blocks(
        self, name: str, tensor: Tensor, chunk: Chunk, first: int, target: memoryview
    ) -> None:
        """Read whole blocks, and check them."""
        total = chunk.numel * tensor.item_bytes
        size = block_bytes(total)
        begin, count = chunk.data + first * size, -(-len(target) // size)
        self._fill(chunk.file, begin, target)
        self.bytes_read += len(target)
        for number, expected in enumerate(self._checks(chunk, total, first, first + count)):
            block = target[number * size : (number + 1) * size]
            if crc32(block) != expected:
                at = begin + number * size
                raise DamagedError(
                    f"'{self.folder / self.index.files[chunk.file].name}' is damaged between bytes "
                    f"{at} and {at + len(block)}, which are part of '{name}'."
                )

    def _checks(self, chunk: Chunk, total: int, first: int, stop: int) -> tuple[int, ...]:
        file = self.index.files[chunk.file]
        table = self._tables.get(chunk.file)
        if table is None:
            data = bytearray(file.num_bytes - file.table)
            self._fill(chunk.file, file.table, memoryview(data))
            if crc32(data) != file.table_crc:
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


def _runs(tensor: Tensor, start: int, stop: int) -> Iterator[tuple[Chunk, int, int]]:
    """The chunks that have the elements of an interval, with the bytes of each."""
    place = bisect_right(tensor.chunks, start, key=lambda chunk: chunk.start) - 1
    while start < stop:
        chunk = tensor.chunks[place]
        end = min(stop, chunk.stop)
        item = tensor.item_bytes
        yield chunk, (start - chunk.start) * item, (end - chunk.start) * item
        start, place = end, place + 1
