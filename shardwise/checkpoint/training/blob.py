"""A tensor as ``torch.save`` writes it, but streamed: a head, the data, a tail.

Torch's reader of distributed checkpoints loads every box as a file of ``torch.save``: a zip file
with a small pickle that names dtype and shape, and the data uncompressed. Head and tail depend on
dtype, shape and the data's CRC-32 alone, so that a check can make them anew and compare. Imports no
torch: the pickle is written opcode by opcode.
"""

import struct
import zlib
from dataclasses import dataclass

ALIGN = 64
"""Blobs and their data begin at multiples of this."""
STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage",
    "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip
"""Torch's storage classes by dtype; newer dtypes have none and are written untyped."""
_NAME = "archive/"
_DATA = _NAME + "data/0"
_DATE = (0, 0x21)
"""No time, and the first day that zip knows: equal tensors are equal bytes."""
_LATE = 1 << 3
"""Zip's flag for a CRC that follows the data."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    crc: int
    nbytes: int
    at: int
    flags: int = 0


def head(dtype: str, sizes: tuple[int, ...], item_bytes: int) -> bytes:
    """All bytes before the data."""
    return _head(dtype, sizes, item_bytes)[0]


def tail(dtype: str, sizes: tuple[int, ...], item_bytes: int, crc: int) -> bytes:
    """All bytes after the data, whose CRC-32 is ``crc``."""
    before, entries = _head(dtype, sizes, item_bytes)
    nbytes = item_bytes
    for size in sizes:
        nbytes *= size
    data = _Entry(_DATA, crc, nbytes, entries[-1].at, _LATE)
    entries = [*entries[:-1], data]
    after = struct.pack("<4sIII", b"PK\x07\x08", crc, nbytes, nbytes)
    directory = b"".join(_central(entry) for entry in entries)
    end = struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(entries), len(entries), len(directory),
        len(before) + nbytes + len(after), 0,
    )  # fmt: skip
    return after + directory + end


def _head(dtype: str, sizes: tuple[int, ...], item_bytes: int) -> tuple[bytes, list[_Entry]]:
    out, entries = b"", []
    for name, content in (
        ("data.pkl", _pickle(dtype, sizes, item_bytes)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        entry = _Entry(_NAME + name, zlib.crc32(content), len(content), len(out))
        entries.append(entry)
        out += _local(entry, b"") + content
    entry = _Entry(_DATA, 0, 0, len(out), _LATE)
    entries.append(entry)
    bare = len(out) + len(_local(entry, b"")) + 4
    padding = -bare % ALIGN
    extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding  # as torch pads
    return out + _local(entry, extra), entries


def _local(entry: _Entry, extra: bytes) -> bytes:
    name = entry.name.encode()
    fields = struct.pack(
        "<4sHHHHHIIIHH", b"PK\x03\x04", 20, entry.flags, 0, *_DATE, entry.crc, entry.nbytes,
        entry.nbytes, len(name), len(extra),
    )  # fmt: skip
    return fields + name + extra


def _central(entry: _Entry) -> bytes:
    name = entry.name.encode()
    fields = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 20, 20, entry.flags, 0, *_DATE, entry.crc,
        entry.nbytes, entry.nbytes, len(name), 0, 0, 0, 0, 0, entry.at,
    )  # fmt: skip
    return fields + name


# --- the pickle -------------------------------------------------------------------------------


def _pickle(dtype: str, sizes: tuple[int, ...], item_bytes: int) -> bytes:
    """What ``torch.save`` pickles for a contiguous CPU tensor, as opcodes of protocol 2."""
    numel, strides = 1, []
    for size in reversed(sizes):
        strides.append(numel)
        numel *= size
    typed = STORAGES.get(dtype)
    rebuild = "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
    storage = _global("torch", typed) if typed else _global("torch.storage", "UntypedStorage")
    units = numel if typed else numel * item_bytes
    place = _tuple(
        _text("storage"), storage, _text("0"), _text("cpu"),
        _int(units),
    )  # fmt: skip
    arguments = [
        place + b"Q",  # a persistent id: the data is in another file of the archive
        _int(0),
        _tuple(*map(_int, sizes)),
        _tuple(*map(_int, reversed(strides))),
        b"\x89",  # requires no gradient
        _global("collections", "OrderedDict") + b")R",
    ]
    if not typed:
        arguments.append(_global("torch", dtype))
    return b"\x80\x02" + _global("torch._utils", rebuild) + _tuple(*arguments) + b"R."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _int(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    encoded = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"
