"""The safetensors format: headers are written before the data, and read without it.

A file is eight bytes (little-endian: the length of the header), the header as JSON, and the data of
all tensors without gaps. The writer of safetensors needs all tensors at once; here the header is
made from names, dtypes and shapes alone, so the data can follow piece by piece, in any order.
Imports no torch.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.core.errors import UsageError

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
"""The dtypes that this package reads and writes, by their names in a header."""
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_LONGEST_HEADER_BYTES = 100_000_000
"""safetensors refuses longer headers."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    """The header of a file: its tensors in the order of their data, and its metadata."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors)


@dataclass(frozen=True)
class Layout:
    """A header as bytes, and where the data of each tensor begins."""

    encoded: bytes
    offsets: dict[str, int]
    file_bytes: int


def arrange(tensors: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """The order in which data is aligned without gaps: widest elements first."""
    return tuple(sorted(tensors, key=lambda info: -ITEM_BYTES[info.dtype]))


def lay_out(header: Header) -> Layout:
    """The bytes of a header, and the place of every tensor after it.

    >>> layout = lay_out(Header((TensorInfo("a", "F32", (2,)), TensorInfo("b", "U8", ()))))
    >>> len(layout.encoded) % 8, layout.offsets["b"] - layout.offsets["a"]
    (0, 8)
    """
    entries: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    begins, at = {}, 0
    for info in header.tensors:
        begins[info.name] = at
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [at, at + info.num_bytes],
        }
        at += info.num_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    encoded = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    offsets = {name: len(encoded) + begin for name, begin in begins.items()}
    return Layout(encoded, offsets, len(encoded) + at)


def read_header(path: Path) -> Header:
    """Read and check the header of a file, without its data."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_LONGEST_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
                raise ValueError("it does not begin with the length of a header")
            text = file.read(length)
        header = _parse(text, file_bytes - _LENGTH_BYTES - length)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"'{path}' is not a complete safetensors file ({error}); write or copy it again."
        ) from error
    return header


def _parse(text: bytes, data_bytes: int) -> Header:
    entries = json.loads(text)
    metadata = entries.pop("__metadata__", {})
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    tensors, at = [], 0
    for name, entry in ordered:
        if entry["dtype"] not in ITEM_BYTES:
            raise ValueError(f"tensor '{name}' has the unknown dtype {entry['dtype']}")
        info = TensorInfo(name, entry["dtype"], tuple(entry["shape"]))
        if entry["data_offsets"] != [at, at + info.num_bytes]:
            raise ValueError(f"the data of tensor '{name}' does not match its shape and place")
        at += info.num_bytes
        tensors.append(info)
    if at != data_bytes:
        raise ValueError(f"its tensors have {at} bytes of data, but the file has {data_bytes}")
    return Header(tuple(tensors), metadata)
