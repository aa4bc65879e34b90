"""Folders of torch's distributed checkpoint (DCP): what their ``.metadata`` says, and their data.

FSDP2, torchtitan and accelerate write them. ``.metadata`` is a pickle: it is read by our own
unpickler, and every fact in it is checked before anything relies on it: shapes, offsets, that
chunks tile their tensor, and that files lie inside the folder.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from shardwise.checkpoint.foreign.names import PLAIN
from shardwise.checkpoint.foreign.pickles import MAX_PICKLE_BYTES, Record, loads, shown
from shardwise.checkpoint.foreign.zips import LazyTensor, TorchFile, Window, is_size
from shardwise.core.errors import UsageError

METADATA_FILE = ".metadata"
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Place:
    """Where the bytes of a chunk or an object are: a part of a file in the folder."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, saved on its own."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class DcpTensor:
    """A tensor: its boxes cover it exactly."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class DcpFolder:
    """The contents of a folder by the names in it."""

    path: Path
    tensors: dict[str, DcpTensor]
    objects: dict[str, Place]
    """What is no tensor, such as hyper-parameters."""
    paths: dict[str, KeyPath]
    """The keys of the nested state_dict that led to each name, where the writer kept them."""

    def chunk(self, chunk: Chunk, dtype: torch.dtype) -> LazyTensor:
        """The data of a chunk, which is not read yet."""
        found = self._load(chunk.place)
        if not isinstance(found, LazyTensor):
            raise UsageError(f"{self._window(chunk.place)} has no tensor where one should be.")
        if found.shape != chunk.sizes or found.dtype != dtype:
            raise UsageError(
                f"{self._window(chunk.place)} has a tensor of shape {list(found.shape)} and "
                f"{found.dtype}, but '{METADATA_FILE}' says {list(chunk.sizes)} and {dtype}; copy "
                "or save the folder again."
            )
        return found

    def read_object(self, name: str) -> Any:
        """A value that is no tensor; tensors inside it are lazy."""
        return self._load(self.objects[name])

    def read_box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A box of a tensor, from the chunks that it meets; of these only the rows it needs."""
        tensor = self.tensors[name]
        if _meet((0,) * len(tensor.shape), tensor.shape, offsets, sizes) != _ends(offsets, sizes):
            raise IndexError(f"box {sizes} at {offsets} of a tensor of shape {tensor.shape}")
        found = torch.empty(sizes, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            met = _meet(chunk.offsets, chunk.sizes, offsets, sizes)
            if met is not None:
                rows = _rows(self.chunk(chunk, tensor.dtype), _shifted(met, chunk.offsets))
                found[tuple(_shifted(met, offsets))] = rows
        return found

    def verify(self) -> Iterator[int]:
        """Compare all data with the checksums in it; yields the bytes that were read."""
        places = [chunk.place for tensor in self.tensors.values() for chunk in tensor.chunks]
        for place in (*places, *self.objects.values()):
            yield from TorchFile(self._window(place)).verify()

    def _load(self, place: Place) -> Any:
        return TorchFile(self._window(place)).value

    def _window(self, place: Place) -> Window:
        return Window(inside(self.path, place.file), place.begin, place.length)


def inside(folder: Path, name: str) -> Path:
    """A file of a folder; a name that leads out of it is refused, by links too."""
    parts = PurePosixPath(name).parts
    path = folder / name
    if (
        not parts
        or "\\" in name
        or "\0" in name
        or ".." in parts
        or PurePosixPath(name).is_absolute()
        or not path.resolve().is_relative_to(folder.resolve())
    ):
        raise UsageError(
            f"'{folder}' refers to '{shown(name)}', which leads out of the folder; nothing was "
            "read from there."
        )
    return path


def _meet(
    left: tuple[int, ...], left_sizes: tuple[int, ...], right: tuple[int, ...],
    right_sizes: tuple[int, ...],
) -> list[tuple[int, int]] | None:  # fmt: skip
    """What two boxes share: begin and end in each dimension, or None."""
    met = [
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(left, left_sizes, right, right_sizes, strict=True)
    ]
    return met if all(begin < end for begin, end in met) else None


def _ends(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, int]] | None:
    return None if 0 in sizes else [(o, o + n) for o, n in zip(offsets, sizes, strict=True)]


def _shifted(box: list[tuple[int, int]], offsets: tuple[int, ...]) -> list[slice]:
    return [slice(b - o, e - o) for (b, e), o in zip(box, offsets, strict=True)]


def _rows(lazy: LazyTensor, box: list[slice]) -> torch.Tensor:
    """A box of a lazy tensor: of the first dimension that is cut, only its rows are read."""
    cut, begin = 0, 0
    while cut < len(box) - 1 and box[cut].stop - box[cut].start == 1:
        begin += box[cut].start * math.prod(lazy.shape[cut + 1 :])
        cut += 1
    if not box:
        return lazy.full()
    inner = lazy.shape[cut + 1 :]
    width = math.prod(inner)
    rows = lazy.flat(begin + box[cut].start * width, begin + box[cut].stop * width)
    found = rows.view(-1, *inner)[(slice(None), *box[cut + 1 :])]
    return found.reshape([part.stop - part.start for part in box])


# --- .metadata --------------------------------------------------------------------------------


def is_dcp(path: Path) -> bool:
    """Whether a folder is one of DCP."""
    return (path / METADATA_FILE).is_file()


def read_dcp(path: Path) -> DcpFolder:
    """The contents of a folder, from its ``.metadata``; executes nothing."""
    file = inside(path, METADATA_FILE)
    window = Window(file)
    if window.num_bytes > MAX_PICKLE_BYTES:
        raise UsageError(f"'{file}' has {window.num_bytes} bytes, too many to read.")
    metadata = loads(window.read(0, window.num_bytes), f"'{file}'", PLAIN)
    try:
        return _Reading(path, metadata).folder()
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise UsageError(
            f"'{file}' is not the metadata of a distributed checkpoint, or is damaged ({error}); "
            "copy or save the folder again."
        ) from error


class _Reading:
    """Checks of what the unpickler found, on the way to a ``DcpFolder``."""

    def __init__(self, path: Path, metadata: Any) -> None:
        self.path = path
        self.metadata = _record(metadata, "Metadata")
        self.places = dict(self._all_places())

    def folder(self) -> DcpFolder:
        tensors, objects = {}, {}
        for name, entry in _dict(self.metadata.get("state_dict_metadata")).items():
            if not isinstance(name, str):
                raise TypeError("a name that is no string")
            if _kind(entry) == "BytesStorageMetadata":
                objects[name] = self._place(name, None)
            else:
                tensors[name] = self._tensor(name, _record(entry, "TensorStorageMetadata"))
        return DcpFolder(self.path, tensors, objects, self._paths())

    def _all_places(self) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Place]]:
        for index, info in _dict(self.metadata.get("storage_data")).items():
            index, info = _record(index, "MetadataIndex"), _record(info, "_StorageInfo")
            offset = index.get("offset")
            key = (_text(index.get("fqn")), None if offset is None else _sizes(offset))
            if info.get("transform_descriptors"):
                raise UsageError(
                    f"'{self.path}' was written with extensions that transform its bytes, which "
                    "are not read; save it without."
                )
            begin, length = _sizes((info.get("offset"), info.get("length")))
            yield key, Place(_text(info.get("relative_path")), begin, length)

    def _place(self, name: str, offset: tuple[int, ...] | None) -> Place:
        found = self.places.get((name, offset))
        if found is None:
            where = f" at {list(offset)}" if offset else ""
            raise UsageError(
                f"'{self.path / METADATA_FILE}' is damaged: it does not say where "
                f"'{shown(name)}'{where} is stored; copy or save the folder again."
            )
        inside(self.path, found.file)
        return found

    def _tensor(self, name: str, entry: Record) -> DcpTensor:
        dtype = _dtype(_record(entry.get("properties"), "TensorProperties"))
        shape = _sizes(entry.get("size"))
        boxes = []
        for box in _list(entry.get("chunks")):
            record = _record(box, "ChunkStorageMetadata")
            boxes.append((_sizes(record.get("offsets")), _sizes(record.get("sizes"))))
        if len(boxes) > 1:
            boxes = [box for box in boxes if 0 not in box[1]]
        if not _tile(shape, boxes):
            raise UsageError(
                f"'{self.path / METADATA_FILE}' is damaged: the chunks of '{shown(name)}' do not "
                f"cover its shape {list(shape)} exactly once; copy or save the folder again."
            )
        places = [(box, self._place(name, box[0])) for box in boxes]
        return DcpTensor(name, dtype, shape, tuple(Chunk(*box, place) for box, place in places))

    def _paths(self) -> dict[str, KeyPath]:
        found = {}
        for name, keys in _dict(self.metadata.get("planner_data") or {}).items():
            if isinstance(keys, tuple) and all(isinstance(key, str | int) for key in keys):
                found[_text(name)] = keys
        return found


def _dtype(properties: Record) -> torch.dtype:
    state = properties.state
    found = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
    if not isinstance(found, torch.dtype):
        raise TypeError("a tensor without a dtype")
    return found


def _kind(value: Any) -> str:
    return value.name.rpartition(".")[2] if isinstance(value, Record) else ""


def _record(value: Any, kind: str) -> Record:
    if not isinstance(value, Record) or _kind(value) != kind:
        raise TypeError(f"no {kind} where one should be")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError("no dict where one should be")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list where one should be")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no string where one should be")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 64 or not all(map(is_size, value)):
        raise TypeError("no sizes where some should be")
    return value


def _tile(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes cover a shape exactly once: inside it, its volume, none meets another."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if any(o + n > total for o, n, total in zip(offsets, sizes, shape, strict=True)):
            return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    if len(boxes) < 2:
        return True
    # Along the dimension that was cut most only neighbours can meet.
    dim = max(range(len(shape)), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][dim]):
        active = [box for box in active if box[0][dim] + box[1][dim] > offsets[dim]]
        if any(_meet(offsets, sizes, *box) for box in active):
            return False
        active.append((offsets, sizes))
    return True
