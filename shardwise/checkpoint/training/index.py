"""The index of a checkpoint: what is in it, and where, as JSON that needs no pickle to read.

The first line has the length and the checksum of the rest. Names of files are checked: none leaves
the checkpoint's folder. Imports no torch.

[Note: Files of a checkpoint]
__R_0.distcp     the tensors that rank R wrote, each box as a file of ``torch.save``; at the end the
                 checksums of their blocks, four bytes each
.metadata        what torch's distributed checkpoints read: a pickle, which shardwise never loads
shardwise.json   this index: tensors and their boxes, values, the sizes and checksums of all files
"""

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from shardwise.checkpoint.training.checksums import num_blocks
from shardwise.core.checksum import crc32
from shardwise.core.errors import UsageError
from shardwise.core.layout import DTYPE_BYTES

INDEX_FILE = "shardwise.json"
METADATA_FILE = ".metadata"
FORMAT = "shardwise checkpoint"
VERSION = 1
ITEM_BYTES = {
    **DTYPE_BYTES, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that is one run of its elements, and where its data is."""

    file: int
    blob: int
    """Where the file of ``torch.save`` begins that has the box."""
    data: int
    """Where its data begins."""
    start: int
    """Its first element in the tensor."""
    numel: int
    first_check: int
    """The number of its first checksum in the file's table."""

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, and its chunks in the order of their elements."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.numel * self.item_bytes


@dataclass(frozen=True, slots=True)
class File:
    """A file with tensors: its length, and the table of checksums at its end."""

    name: str
    num_bytes: int
    table: int
    table_crc: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that are checked as a whole."""

    file: str
    offset: int
    num_bytes: int
    crc: int


@dataclass
class Index:
    """All that a checkpoint has."""

    files: list[File] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tensors: tied parameters."""
    values: dict[str, Any] = field(default_factory=dict)
    """What is no tensor, as ``plain.encode`` writes it."""
    extents: list[Extent] = field(default_factory=list)
    """The other bytes: pickled values for torch's readers, and their index."""
    digest: int = 0
    """The checksum of the whole index that was read."""

    def find(self, name: str) -> Tensor | None:
        """A tensor by any of its names."""
        return self.tensors.get(self.aliases.get(name, name))

    def to_bytes(self) -> bytes:
        body = {
            "files": [[f.name, f.num_bytes, f.table, f.table_crc] for f in self.files],
            "tensors": {
                name: [tensor.dtype, list(tensor.shape), [_numbers(c) for c in tensor.chunks]]
                for name, tensor in self.tensors.items()
            },
            "aliases": self.aliases,
            "values": self.values,
            "extents": [[e.file, e.offset, e.num_bytes, e.crc] for e in self.extents],
        }
        encoded = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return _first_line(encoded) + encoded

    @classmethod
    def from_bytes(cls, data: bytes) -> "Index":
        """Parse and check; raises ValueError for anything that ``to_bytes`` does not write."""
        line, newline, encoded = data.partition(b"\n")
        if line + newline != _first_line(encoded):
            raise ValueError("its checksum does not match, or it was written by another version")
        try:
            index = _parse(json.loads(encoded))
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        index.digest = crc32(encoded)
        return index


def read_index(folder: Path) -> Index:
    """The index of a checkpoint's folder, with the sizes of its files compared."""
    path = folder / INDEX_FILE
    try:
        index = Index.from_bytes(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"'{folder}' has no '{INDEX_FILE}': others wrote it, or it is damaged; 'shardwise "
            "import' makes a checkpoint of it."
            if (folder / METADATA_FILE).is_file()
            else f"'{folder}' is no checkpoint: it has no '{INDEX_FILE}'."
        ) from error
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"'{path}' is damaged ({error}).") from error
    for file in index.files:
        try:
            found = (folder / file.name).stat().st_size
        except FileNotFoundError as error:
            raise UsageError(
                f"Checkpoint '{folder}' is damaged: its file '{file.name}' is missing."
            ) from error
        except OSError as error:
            raise UsageError(
                f"'{folder / file.name}' of the checkpoint cannot be read: {error.strerror}."
            ) from error
        if found != file.num_bytes:
            raise UsageError(
                f"'{folder / file.name}' is damaged: it has {found} bytes instead of "
                f"{file.num_bytes}."
            )
    return index


def _first_line(encoded: bytes) -> bytes:
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "bytes": len(encoded),
        "crc32": f"{crc32(encoded):08x}",
    }
    return json.dumps(fields).encode() + b"\n"


def _numbers(chunk: Chunk) -> list[int]:
    return [chunk.file, chunk.blob, chunk.data, chunk.start, chunk.numel, chunk.first_check]


def _parse(body: dict[str, Any]) -> Index:
    files = [File(check_name(name), *map(_count, rest)) for name, *rest in body["files"]]
    tensors = {name: _tensor(files, name, *entry) for name, entry in body["tensors"].items()}
    aliases = {str(alias): str(name) for alias, name in body["aliases"].items()}
    if unknown := sorted(set(aliases.values()) - tensors.keys()):
        raise ValueError(f"another name of '{unknown[0]}', which it does not have")
    extents = [Extent(check_name(name), *map(_count, rest)) for name, *rest in body["extents"]]
    return Index(files, tensors, aliases, dict(body["values"]), extents)


def _tensor(files: list[File], name: str, dtype: str, shape: Any, chunks: Any) -> Tensor:
    tensor = Tensor(dtype, tuple(map(_count, shape)), tuple(Chunk(*map(_count, c)) for c in chunks))
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor '{name}' has the unknown dtype {dtype}")
    at = 0
    for chunk in tensor.chunks:
        nbytes = chunk.numel * tensor.item_bytes
        file = files[chunk.file]
        checks = 4 * (chunk.first_check + num_blocks(nbytes))
        if chunk.start != at or chunk.data + nbytes > file.table:
            raise ValueError(f"a chunk of tensor '{name}' is out of place")
        if file.table + checks > file.num_bytes:
            raise ValueError(f"tensor '{name}' has too few checksums")
        at = chunk.stop
    if at != tensor.numel:
        raise ValueError(f"tensor '{name}' has {at} of {tensor.numel} elements")
    return tensor


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def check_name(name: Any) -> str:
    """The name of a file of a checkpoint's own folder; anything else could leave it."""
    if not isinstance(name, str) or not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint's folder")
    return name
