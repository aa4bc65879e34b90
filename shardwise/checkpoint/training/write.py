"""A rank's file of tensors, written from front to back."""

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint.training.appender import Appender
from shardwise.checkpoint.training.blob import ALIGN, head, tail
from shardwise.checkpoint.training.boxes import LARGEST_BYTES, Box, boxes, pieces
from shardwise.checkpoint.training.checksums import Blocks, num_blocks
from shardwise.checkpoint.training.index import ITEM_BYTES, Chunk, Extent, File


def runs_of(
    shape: tuple[int, ...], start: int, stop: int, item_bytes: int
) -> list[tuple[Box, int, int]]:
    """The boxes of an interval, each with its first element and its number of elements."""
    found = []
    for first, last in pieces(shape, start, stop, LARGEST_BYTES // item_bytes):
        at = first
        for box in boxes(shape, first, last):
            found.append((box, at, box.numel))
            at += box.numel
    return found


def blob_bytes(dtype: str, shape: tuple[int, ...], start: int, stop: int) -> int:
    """An upper bound of what an interval takes in a file, with its checksums."""
    item = ITEM_BYTES[dtype]
    total = 0
    for box, _, numel in runs_of(shape, start, stop, item):
        around = len(head(dtype, box.sizes, item)) + len(tail(dtype, box.sizes, item, 0))
        total += around + numel * item + ALIGN + 4 * num_blocks(numel * item)
    return total


class RankFile:
    """The tensors of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name = f"__{rank}_0.distcp"
        self.out = Appender(folder / self.name)
        self.chunks: dict[str, list[Chunk]] = {}
        self._checks: list[int] = []

    def put(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        interval: tuple[int, int],
        data: Iterable[memoryview],
    ) -> None:
        """Write the elements of an interval of a tensor; ``data`` yields their bytes in order."""
        item, parts = ITEM_BYTES[dtype], iter(data)
        left = memoryview(b"")
        for box, start, numel in runs_of(shape, *interval, item):
            self.out.align(ALIGN)
            blob = self.out.position
            self.out.write(head(dtype, box.sizes, item))
            place, nbytes = self.out.position, numel * item
            blocks, missing = Blocks(nbytes), nbytes
            while missing:
                if not left:
                    left = next(parts)
                part, left = left[:missing], left[missing:]
                blocks.feed(part)
                self.out.write(part)
                missing -= len(part)
            blocks.end()
            self.out.write(tail(dtype, box.sizes, item, blocks.whole))
            chunk = Chunk(0, blob, place, start, numel, len(self._checks))
            self.chunks.setdefault(name, []).append(chunk)
            self._checks += blocks.found
        assert not left, f"{name} has more bytes than its interval"
        assert next(parts, None) is None, f"{name} has more bytes than its interval"

    def put_bytes(self, data: bytes) -> Extent:
        """Write what only other readers read."""
        self.out.align(ALIGN)
        extent = Extent(self.name, self.out.position, len(data), zlib.crc32(data))
        self.out.write(data)
        return extent

    def finish(self) -> File:
        """Write the checksums, and wait for the disk."""
        self.out.align(ALIGN)
        table, at = struct.pack(f"<{len(self._checks)}I", *self._checks), self.out.position
        self.out.write(table)
        self.out.sync()
        self.out.close()
        return File(self.name, self.out.position, at, zlib.crc32(table))
