"""The names that checkpoints of torch, FSDP2 and DeepSpeed use, and what stands for each of them.

Nothing here is a function or class of another library: dtypes are constants, and everything that a
file may call is a small function below, or makes an inert ``Record``.
"""

import struct
from pathlib import PurePosixPath
from typing import Any

import torch

from shardwise.checkpoint.foreign.pickles import Allowed, Maker, Mapping_, Named, Record, is_key

DTYPE_NAMES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
STORAGE_DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
"""dtypes by the names that torch.save gives to storages."""
UNTYPED_STORAGE = "torch.storage.UntypedStorage"

_METADATA = "torch.distributed.checkpoint.metadata"
_DCP_RECORDS = (
    f"{_METADATA}.Metadata", f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.StorageMeta",
    f"{_METADATA}.BytesStorageMetadata", f"{_METADATA}.ChunkStorageMetadata",
    f"{_METADATA}.TensorProperties", f"{_METADATA}.MetadataIndex",
    f"{_METADATA}._MEM_FORMAT_ENCODING", "torch.distributed.checkpoint.filesystem._StorageInfo",
)  # fmt: skip
_DEEPSPEED_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.utils.tensor_fragment.tensor_fragment",
    "argparse.Namespace",
)
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
_NUMPY_CODES = {
    "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q",
    "u4": "I", "u2": "H", "u1": "B", "b1": "?",
}  # fmt: skip


def _size(values: Any = ()) -> tuple[int, ...]:
    """torch.Size."""
    found = tuple(values) if isinstance(values, list | tuple) else None
    if found is None or not all(type(value) is int for value in found):
        raise TypeError("a size that has not only integers")
    return found


def _mapping(*args: Any) -> Mapping_:
    """OrderedDict, defaultdict and Counter: empty, or with a list of pairs, or with a dict."""
    found = Mapping_()
    content = next((arg for arg in args if isinstance(arg, list | tuple | dict)), ())
    pairs = content.items() if isinstance(content, dict) else content
    for key, value in pairs:
        if not is_key(key):
            raise TypeError("a key that is not plain")
        found[key] = value
    return found


def _set(values: Any = ()) -> set[Any]:
    if not isinstance(values, list | tuple) or not all(map(is_key, values)):
        raise TypeError("a set of what is not plain")
    return set(values)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """_codecs.encode, as Python 2's protocols write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes of an unknown kind")
    return text.encode("latin1")


def _bytes(value: Any = b"", *_: Any) -> bytes:
    """Bytes and bytearrays, but not ``bytes(10**12)``."""
    return _encode(value) if isinstance(value, str) else bytes(memoryview(value))


def _path(*parts: Any) -> str:
    """A path as text; nothing is opened by it."""
    return str(PurePosixPath(*(part for part in parts if isinstance(part, str))))


def _layout(name: Any) -> str:
    return str(name) if isinstance(name, str) else "unknown"


def _numpy_scalar(dtype: Any, raw: Any = b"") -> int | float | bool:
    """A number of numpy; ``dtype`` is the record of a numpy.dtype."""
    code = dtype.args[0] if isinstance(dtype, Record) and dtype.args else None
    if code not in _NUMPY_CODES or not isinstance(raw, bytes):
        raise TypeError("a numpy number of an unknown kind")
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    value: int | float | bool = struct.unpack(
        (">" if order == ">" else "<") + _NUMPY_CODES[code], raw
    )[0]
    return value


def _recorded(name: str) -> Maker:
    return Maker(lambda *args: Record(name, args))


def _plain_names() -> dict[str, object]:
    found: dict[str, object] = {
        "torch.Size": Maker(_size),
        "torch.serialization._get_layout": Maker(_layout),
        "torch.device": Maker(lambda *args: "cpu"),
        "_codecs.encode": Maker(_encode),
    }
    found |= {f"torch.{name}": getattr(torch, name) for name in DTYPE_NAMES}
    found |= {f"torch.{name}": Named(f"torch.{name}") for name in STORAGE_DTYPES}
    for name in ("collections.OrderedDict", "collections.defaultdict", "collections.Counter"):
        found[name] = Maker(_mapping)
    for module in ("builtins", "__builtin__"):
        found[f"{module}.complex"] = Maker(lambda real, imaginary: complex(real, imaginary))
        found |= {f"{module}.{name}": Maker(_set) for name in ("set", "frozenset")}
        found |= {f"{module}.{name}": Maker(_bytes) for name in ("bytes", "bytearray")}
        found |= {f"{module}.{name}": Named(name) for name in ("dict", "list", "int", "float")}
    for module in ("pathlib", "pathlib._local"):
        found |= {f"{module}.{name}": Maker(_path) for name in _PATHS}
    for package in ("numpy._core", "numpy.core"):
        found[f"{package}.multiarray.scalar"] = Maker(_numpy_scalar)
        found[f"{package}.multiarray._reconstruct"] = _recorded("numpy.ndarray")
    found["numpy.dtype"] = _recorded("numpy.dtype")
    found["numpy.ndarray"] = Named("numpy.ndarray")
    found |= {name: _recorded(name) for name in (*_DCP_RECORDS, *_DEEPSPEED_RECORDS)}
    return found


PLAIN: Allowed = _plain_names()
"""Names of everything but tensors, which the reader of zip files adds."""
