"""Files of ``torch.save``: their tensors without their data, which is read piece by piece at need.

Such a file is a zip without compression: ``data.pkl`` describes the tensors, and each storage is a
record of its own, read by its offset. Data is read rather than mapped: memory stays what is asked
for, and a file that was cut is an error instead of a signal.
"""

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.foreign.names import PLAIN, STORAGE_DTYPES, UNTYPED_STORAGE
from shardwise.checkpoint.foreign.pickles import (
    MAX_PICKLE_BYTES,
    Allowed,
    Maker,
    Named,
    loads,
    shown,
)
from shardwise.core.checksum import crc32
from shardwise.core.errors import UsageError

PIECE_BYTES = 1 << 22
"""What checks of checksums read at once."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\x03\x04"
_NO_ZIP = (
    zipfile.BadZipFile, OSError, EOFError, ValueError, OverflowError, NotImplementedError,
    struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class Window:
    """A file, or a part of one, as a checkpoint's index names it."""

    path: Path
    begin: int = 0
    length: int | None = None
    """None: to the end of the file."""

    def __str__(self) -> str:
        return f"'{self.path}'" + (f" (at byte {self.begin})" if self.begin else "")

    @cached_property
    def num_bytes(self) -> int:
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise _unreadable(self, error) from error
        length = size - self.begin if self.length is None else self.length
        if self.begin < 0 or length < 0 or self.begin + length > size:
            raise UsageError(
                f"'{self.path}' has {size} bytes, but the checkpoint has data at bytes "
                f"{self.begin} to {self.begin + length} of it; copy or save it again."
            )
        return length

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``begin`` of the window on."""
        done = 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin + begin)
                while done < len(target):
                    count = file.readinto(target[done:])
                    if not count:
                        break
                    done += count
        except OSError as error:
            raise _unreadable(self, error) from error
        if done < len(target) or begin + done > self.num_bytes:
            raise UsageError(
                f"{self} ends before its data does: {done} of {len(target)} bytes were there; "
                "copy or save it again."
            )

    def read(self, begin: int, length: int) -> bytes:
        found = bytearray(length)
        self.read_into(begin, memoryview(found))
        return bytes(found)


def _unreadable(window: Window, error: OSError) -> UsageError:
    return UsageError(f"'{window.path}' cannot be read: {error.strerror or error}.")


@dataclass(frozen=True)
class Stored:
    """A record of a zip: where its bytes are, and their checksum."""

    name: str
    begin: int
    num_bytes: int
    crc: int


class TorchFile:
    """What ``torch.save`` wrote, with lazy tensors instead of tensors."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.records = {record.name: record for record in _records(window)}
        self._prefix = self._find_prefix()
        order = self.records.get(f"{self._prefix}byteorder")
        if order and window.read(order.begin, min(order.num_bytes, 8)) != b"little":
            raise UsageError(f"{window} was written by a big-endian machine and cannot be read.")

    @cached_property
    def value(self) -> Any:
        """The saved object, with ``LazyTensor`` for tensors; nothing is executed."""
        record = self.records[f"{self._prefix}data.pkl"]
        if record.num_bytes > MAX_PICKLE_BYTES:
            raise UsageError(f"{self.window} has a pickle of {record.num_bytes} bytes; not read.")
        for _ in self._check(record):
            pass
        data = self.window.read(record.begin, record.num_bytes)
        return loads(data, f"{self.window}", _NAMES, self._storage)

    @property
    def has_checksums(self) -> bool:
        """False where the writer was told to leave them out: then they are all zero."""
        return any(record.crc for record in self.records.values())

    def verify(self) -> Iterator[int]:
        """Compare all records with their checksums; yields the bytes that were read."""
        for record in self.records.values():
            yield from self._check(record)

    def _check(self, record: Stored) -> Iterator[int]:
        crc, at = 0, 0
        while at < record.num_bytes:
            piece = self.window.read(record.begin + at, min(PIECE_BYTES, record.num_bytes - at))
            crc, at = crc32(piece, crc), at + len(piece)
            yield len(piece)
        if crc != record.crc and self.has_checksums:
            raise UsageError(
                f"{self.window} is damaged: record '{shown(record.name)}' does not match its "
                "checksum; copy or save it again."
            )

    def _find_prefix(self) -> str:
        found = [name for name in self.records if name.endswith("/data.pkl")]
        if len(found) != 1:
            raise UsageError(f"{self.window} is a zip, but not one of torch.save.")
        return found[0].removesuffix("data.pkl")

    def _storage(self, reference: Any) -> "Storage":
        """A storage as the pickle refers to it: ('storage', type, key, device, elements)."""
        kind, storage_type, key, _, numel = reference
        if kind != "storage" or not isinstance(key, str) or type(numel) is not int:
            raise TypeError("a reference to what is no storage")
        record = self.records.get(f"{self._prefix}data/{key}")
        if record is None:
            raise UsageError(f"{self.window} does not have its record 'data/{shown(key)}'.")
        dtype = _storage_dtype(storage_type)
        if numel < 0 or numel * dtype.itemsize != record.num_bytes:
            raise UsageError(
                f"{self.window} is damaged: record '{shown(record.name)}' has {record.num_bytes} "
                f"bytes instead of those of {numel} elements of {dtype}; copy or save it again."
            )
        return Storage(self, record, dtype)


def _storage_dtype(storage_type: Any) -> torch.dtype:
    name = storage_type.name if isinstance(storage_type, Named) else ""
    if name == UNTYPED_STORAGE:
        return torch.uint8
    return STORAGE_DTYPES[name.removeprefix("torch.")]


class _WindowFile(io.RawIOBase):
    """A window as the file object that ``zipfile`` wants."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._window.num_bytes}
        if base[whence] + offset < 0:
            raise OSError("before the beginning")
        self._at = base[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        length = max(0, min(len(target), self._window.num_bytes - self._at))
        self._window.read_into(self._at, memoryview(target)[:length])
        self._at += length
        return length


def _records(window: Window) -> Iterator[Stored]:
    """The records of a zip, from its directory; each is checked to lie in the file."""
    if window.num_bytes < len(_MAGIC) or window.read(0, len(_MAGIC)) != _MAGIC:
        raise UsageError(
            f"{window} is not a file of torch.save, or of its old format before torch 1.6; copy "
            "it again, or load and save it with torch."
        )
    try:
        with zipfile.ZipFile(io.BufferedReader(_WindowFile(window))) as archive:
            infos = archive.infolist()
    except _NO_ZIP as error:
        raise UsageError(
            f"{window} is cut or damaged: it has no directory of its records ({error}); copy or "
            "save it again."
        ) from error
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise UsageError(
                f"{window} has the compressed record '{shown(info.filename)}'; not read."
            )
        yield Stored(info.filename, _data_begin(window, info), info.file_size, info.CRC)


def _data_begin(window: Window, info: zipfile.ZipInfo) -> int:
    """Where a record's data begins: behind its own header, which may be padded."""
    damaged = UsageError(
        f"{window} is damaged: record '{shown(info.filename)}' is not where the directory says; "
        "copy or save it again."
    )
    begin = info.header_offset
    if not 0 <= begin <= window.num_bytes - _LOCAL_HEADER.size:
        raise damaged
    magic, name, extra = _LOCAL_HEADER.unpack(window.read(begin, _LOCAL_HEADER.size))
    data = begin + _LOCAL_HEADER.size + name + extra
    if magic != _MAGIC or data + info.file_size > window.num_bytes:
        raise damaged
    return int(data)


# --- tensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Storage:
    """A storage: its bytes are in the file."""

    file: TorchFile
    record: Stored
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor in a file; its data is read when it is asked for."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    """In elements of ``dtype``."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True

    def flat(self, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to ``end`` in row-major order; reads no others if contiguous."""
        if not 0 <= begin <= end <= self.numel:
            raise IndexError(f"elements {begin} to {end} of {self.numel}")
        if self.is_contiguous or not self.numel:
            return self._span(self.offset + begin, end - begin)
        return self.full().reshape(-1)[begin:end]

    def full(self) -> torch.Tensor:
        """The whole tensor."""
        if self.is_contiguous or not self.numel:
            return self._span(self.offset, self.numel).view(self.shape)
        span = self._span(self.offset, _span(self.shape, self.stride))
        return span.as_strided(self.shape, self.stride).contiguous()

    def _span(self, begin: int, length: int) -> torch.Tensor:
        found = torch.empty(length, dtype=self.dtype)
        if length:
            place = self.storage.record.begin + begin * self.dtype.itemsize
            target = found.view(torch.uint8).numpy().data
            self.storage.file.window.read_into(place, target)
        return found


def is_size(value: Any) -> bool:
    """Whether a value from a file can be a size or an offset."""
    return type(value) is int and 0 <= value < 1 << 63


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> LazyTensor:
    """_rebuild_tensor and _rebuild_tensor_v2."""
    return _typed(storage, storage.dtype, offset, shape, stride)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> LazyTensor:
    """_rebuild_tensor_v3: of a dtype that has no storage of its own."""
    return _typed(storage, dtype, offset, shape, stride)


def _typed(storage: Any, dtype: Any, offset: Any, shape: Any, stride: Any) -> LazyTensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a storage")
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or len(shape) > 64 or not all(map(is_size, numbers)):
        raise TypeError("a tensor without a shape")
    room = storage.record.num_bytes // dtype.itemsize
    shape, stride = tuple(shape), tuple(stride)
    # A tensor that was expanded would also fit, but one of a few bytes could fill all memory.
    if offset + _span(shape, stride) > room or math.prod(shape) > room:
        raise UsageError(
            f"{storage.file.window} is damaged: a tensor of shape {list(shape)} is larger than its "
            f"storage of {room} elements; copy or save it again."
        )
    return LazyTensor(storage, dtype, offset, shape, stride)


def _parameter(data: Any, *_: Any) -> LazyTensor:
    if not isinstance(data, LazyTensor):
        raise TypeError("a parameter that is no tensor")
    return data


def _of_type(function: Any, kind: Any, args: Any, state: Any = None) -> LazyTensor:
    """_rebuild_from_type_v2: a tensor with attributes, which are dropped."""
    if not isinstance(function, Maker) or function.make not in (_tensor, _tensor_v3, _parameter):
        raise TypeError("a tensor that is made in an unknown way")
    found: LazyTensor = function.make(*args)
    return found


_NAMES: Allowed = {
    **PLAIN,
    UNTYPED_STORAGE: Named(UNTYPED_STORAGE),
    "torch._utils._rebuild_tensor": Maker(_tensor),
    "torch._utils._rebuild_tensor_v2": Maker(_tensor),
    "torch._utils._rebuild_tensor_v3": Maker(_tensor_v3),
    "torch._utils._rebuild_parameter": Maker(_parameter),
    "torch._utils._rebuild_parameter_with_state": Maker(_parameter),
    "torch._tensor._rebuild_from_type_v2": Maker(_of_type),
    "torch.nn.parameter.Parameter": Named("torch.nn.parameter.Parameter"),
    "torch.Tensor": Named("torch.Tensor"),
}
