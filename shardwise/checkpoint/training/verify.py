"""Compares every byte of a checkpoint with what was saved.

Data is compared with its checksums. What is around it (the zips' headers and directories, padding)
follows from dtypes, shapes and checksums alone, and is made anew. Imports no torch.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from shardwise.checkpoint.training.blob import head, tail
from shardwise.checkpoint.training.boxes import box_of
from shardwise.checkpoint.training.checksums import block_bytes, combined, num_blocks
from shardwise.checkpoint.training.index import INDEX_FILE, Chunk, Extent, Index, Tensor, read_index
from shardwise.core.errors import UsageError

Progress = Callable[[int], None]
"""Told of bytes that were compared."""


@dataclass(frozen=True)
class _Part:
    """Some bytes of a file, and what they are."""

    begin: int
    end: int
    what: str
    chunk: Chunk | None = None
    tensor: Tensor | None = None
    extent: Extent | None = None


def faults(folder: Path, progress: Progress = lambda _: None) -> list[str]:
    """What is wrong with a checkpoint, as sentences; empty if nothing is."""
    try:
        index = read_index(folder)
    except UsageError as error:
        return [str(error)]
    found: list[str] = []
    progress((folder / INDEX_FILE).stat().st_size)
    for number, file in enumerate(index.files):
        found += _faults_of_file(folder / file.name, index, number, progress)
    named = {file.name for file in index.files}
    for extent in index.extents:
        if extent.file not in named:
            found += _faults_of_extent(folder / extent.file, extent, progress)
    return found


def total_bytes(folder: Path) -> int:
    """What ``faults`` will compare."""
    return sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())


def _faults_of_extent(path: Path, extent: Extent, progress: Progress) -> list[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        return [f"'{path}' cannot be read: {error.strerror}."]
    progress(len(data))
    if len(data) != extent.num_bytes or zlib.crc32(data) != extent.crc:
        return [f"'{path}' is damaged."]
    return []


def _faults_of_file(path: Path, index: Index, number: int, progress: Progress) -> list[str]:
    file = index.files[number]
    try:
        with path.open("rb", buffering=0) as opened:
            opened.seek(file.table)
            table = _read(opened, file.num_bytes - file.table)
            if zlib.crc32(table) != file.table_crc:
                return [f"'{path}' is damaged: its table of checksums is not the one saved."]
            progress(len(table))
            opened.seek(0)
            return [
                f"'{path}' is damaged between bytes {begin} and {end}: {what}."
                for begin, end, what in _compare(opened, _parts(index, number), table, progress)
            ]
    except OSError as error:
        return [f"'{path}' cannot be read: {error.strerror}."]


def _parts(index: Index, number: int) -> list[_Part]:
    """What a file is made of, in order; the gaps between are padding."""
    file = index.files[number]
    found = [_Part(file.table, file.num_bytes, "the table of checksums")]
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file == number:
                box, item = box_of(tensor.shape, chunk.start, chunk.stop), tensor.item_bytes
                end = chunk.data + chunk.numel * item
                end += len(tail(tensor.dtype, box.sizes, item, 0))
                found.append(_Part(chunk.blob, end, f"part of '{name}'", chunk, tensor))
    for extent in index.extents:
        if extent.file == file.name:
            end = extent.offset + extent.num_bytes
            found.append(_Part(extent.offset, end, "a value for other readers", extent=extent))
    return sorted(found, key=lambda part: part.begin)


def _compare(
    opened: RawIOBase, parts: list[_Part], table: bytes, progress: Progress
) -> Iterator[tuple[int, int, str]]:
    at = 0
    for part in parts:
        if part.begin < at:
            yield part.begin, at, f"{part.what} begins inside another part"
            return
        if _read(opened, part.begin - at).strip(b"\0"):
            yield at, part.begin, "padding"
        at = part.end
        if part.chunk is not None and part.tensor is not None:
            yield from _compare_chunk(opened, part, part.chunk, part.tensor, table)
        elif part.extent is not None:
            crc = zlib.crc32(_read(opened, part.extent.num_bytes))
            if crc != part.extent.crc:
                yield part.begin, part.end, part.what
        progress(part.end - part.begin if part.chunk or part.extent else 0)


def _compare_chunk(
    opened: RawIOBase, part: _Part, chunk: Chunk, tensor: Tensor, table: bytes
) -> Iterator[tuple[int, int, str]]:
    box, item = box_of(tensor.shape, chunk.start, chunk.stop), tensor.item_bytes
    before = head(tensor.dtype, box.sizes, item)
    if _read(opened, chunk.data - chunk.blob) != before:
        yield chunk.blob, chunk.data, f"{part.what}, before its data"
    total, whole = chunk.numel * item, 0
    size = block_bytes(total)
    checks = struct.unpack_from(f"<{num_blocks(total)}I", table, 4 * chunk.first_check)
    for number, expected in enumerate(checks):
        begin, end = number * size, min(total, (number + 1) * size)
        if zlib.crc32(_read(opened, end - begin)) != expected:
            yield chunk.data + begin, chunk.data + end, part.what
        whole = combined(whole, expected, end - begin)
    after = tail(tensor.dtype, box.sizes, item, whole)
    if _read(opened, len(after)) != after:
        yield chunk.data + total, part.end, f"{part.what}, after its data"


def _read(opened: RawIOBase, nbytes: int) -> bytes:
    """Exactly so many bytes, or fewer at the end of the file."""
    found = b""
    while len(found) < nbytes:
        data = opened.read(nbytes - len(found))
        if not data:
            break
        found += data
    return found
