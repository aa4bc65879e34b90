"""Pickles that run something when Python's own unpickler reads them, for the tests of ours."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import torch


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


class Evaluates:
    """The same by ``eval``, whose name a reader might admit with the other builtins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return eval, (f"__import__('os').mkdir({str(self.path)!r})",)


def evil_pickles(mark: Path) -> dict[str, bytes]:
    """Pickles by what they try; all of them make the folder ``mark`` or take the process down."""
    touch = pickle.dumps(Touch(mark), protocol=2)
    name = b"cposix\nmkdir\n"
    text = str(mark).encode()
    argument = b"X" + struct.pack("<I", len(text)) + text
    return {
        "a function": touch,
        "a function, newer protocol": pickle.dumps(Touch(mark), protocol=5),
        "eval": pickle.dumps(Evaluates(mark), protocol=2),
        "deep in a dict": pickle.dumps({"model": [1, {"x": (Touch(mark),)}]}, protocol=4),
        "as an object": b"\x80\x02(" + name + argument + b"o.",
        "as an instance": b"\x80\x02(" + argument + b"iposix\nmkdir\n.",
        "as a class's new": b"\x80\x02" + name + argument + b"\x85\x81.",
        "by getattr": b"\x80\x02cbuiltins\ngetattr\nctorch\nSize\nX\x08\x00\x00\x00__dict__\x86R.",
        "dotted": b"\x80\x04\x8c\x0bcollections\x8c\x13OrderedDict.__init__\x93.",
        "a setting of a name's attributes": b"\x80\x02ctorch\nSize\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
        "a registered extension": b"\x80\x02\x82\x01.",
    }


def memo_bomb() -> bytes:
    """Asks for a memo of 2**32 entries, which Python's own unpickler allocates."""
    return b"\x80\x02Nr\xff\xff\xff\xff."


def nest(depth: int) -> bytes:
    """Tuples in tuples, as a key: their hash alone overflows the C stack."""
    return b"\x80\x02})" + b"\x85" * depth + b"K\x01s."


def zip_with(data: bytes, **records: bytes) -> bytes:
    """A zip as torch.save makes it, with any pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", b"little")
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
