"""Writes what a checkpoint of others has as one of ours, streamed, in one process."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.folder import sync
from shardwise.checkpoint.foreign.contents import (
    Foreign,
    ForeignTensor,
    Readable,
    lasting_options,
    readable,
)
from shardwise.checkpoint.foreign.deepspeed import read_deepspeed
from shardwise.checkpoint.foreign.deepspeed_files import LATEST_FILE, is_deepspeed
from shardwise.checkpoint.foreign.folders import is_folders, read_folders
from shardwise.checkpoint.training import dcp
from shardwise.checkpoint.training.contents import MODEL, OPTIM, WINDOW_BYTES, bytes_of, dtype_name
from shardwise.checkpoint.training.index import (
    INDEX_FILE,
    ITEM_BYTES,
    METADATA_FILE,
    Chunk,
    Extent,
    Index,
    Tensor,
)
from shardwise.checkpoint.training.place import Target
from shardwise.checkpoint.training.plain import encode
from shardwise.checkpoint.training.write import RankFile, blob_bytes
from shardwise.core.errors import UsageError

Advance = Callable[[int], None]
"""Told about bytes that were checked or written."""


@dataclass(frozen=True)
class Imported:
    """What an import wrote."""

    source: Foreign
    out: Path
    states: tuple[str, ...]
    """Names of the optimizer's states, such as exp_avg."""
    groups: int
    """Sets of parameters with equal hyper-parameters."""


def open_foreign(path: Path) -> Foreign:
    """The contents of a checkpoint of any known kind, without its data; executes nothing."""
    if not path.is_dir():
        raise UsageError(f"There is no folder '{path}'; give that of a checkpoint.")
    try:
        if (path / INDEX_FILE).is_file() or _has_series(path):
            raise UsageError(f"'{path}' is a checkpoint of shardwise already; give it to sw.load.")
        if is_folders(path):
            return read_folders(path)
        if is_deepspeed(path):
            return read_deepspeed(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    raise UsageError(
        f"'{path}' is no checkpoint that can be imported; give a folder of DeepSpeed (with "
        "'latest' or '*_model_states.pt'), of torch's distributed checkpoints (with '.metadata'), "
        "or of accelerate (with 'pytorch_model_fsdp_0')."
    )


def _has_series(path: Path) -> bool:
    """Whether ``latest`` names one of our checkpoints."""
    file = path / LATEST_FILE
    if not file.is_file():
        return False
    name = file.read_bytes()[:256].decode(errors="replace").strip()
    return "/" not in name and "\0" not in name and (path / name / INDEX_FILE).is_file()


def work_bytes(source: Foreign) -> int:
    """About what ``convert`` reports as progress: everything is checked, then written."""
    return 2 * source.num_bytes


def convert(source: Foreign, out: Path, advance: Advance = lambda _: None) -> Imported:
    """Check all of a checkpoint and write it as one of ours; ``out`` appears when it is whole."""
    target = Target(out)
    _check_place(source.path.resolve(), target.path)
    for name, dtype in ((t.name, t.value.dtype) for t in source.tensors):
        if dtype_name(dtype) not in ITEM_BYTES:
            raise UsageError(f"'{name}' has dtype {dtype}, which our checkpoints do not keep.")
    for count in source.verify():
        advance(count)
    writing = _Writing(source, target, advance)
    try:
        target.open(writing.num_bytes())
        writing.write()
        target.publish()
    except OSError as error:
        target.discard()
        where = error.filename or target.path
        raise UsageError(
            f"'{where}' cannot be written: {error.strerror or error}; nothing was left of it."
        ) from error
    except BaseException:
        target.discard()
        raise
    finally:
        writing.close()
    return Imported(source, target.path, tuple(sorted(writing.states)), len(writing.groups))


def _check_place(source: Path, out: Path) -> None:
    if out.is_relative_to(source) or source.is_relative_to(out):
        raise UsageError(f"'{out}' overlaps with what is imported; write to another folder.")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"'{out}' exists already; write to a new folder.")
    if (out.parent / LATEST_FILE).is_file() and not _has_series(out.parent):
        raise UsageError(
            f"'{out.parent / LATEST_FILE}' belongs to another program and would be replaced; write "
            "to another folder."
        )


class _Writing:
    """One file with all tensors, and the two indexes."""

    def __init__(self, source: Foreign, target: Target, advance: Advance) -> None:
        self._source, self._target, self._advance = source, target, advance
        self._file: RankFile | None = None
        self._described: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.states: set[str] = set()
        self.groups = list(_groups(source.tensors))

    def num_bytes(self) -> int:
        return sum(
            blob_bytes(dtype_name(value.dtype), value.shape, 0, _numel(value))
            for tensor in self._source.tensors
            for _, value in self._values(tensor)
        )

    def _values(self, tensor: ForeignTensor) -> Iterator[tuple[str, Readable]]:
        """A tensor and its states by their names in our checkpoints."""
        yield f"{MODEL}.{tensor.name}", tensor.value
        for key, state in tensor.states.items():
            self.states.add(key)
            yield f"{OPTIM}.{tensor.name}.{key}", readable(state)

    def write(self) -> None:
        self._file = file = RankFile(self._target.staging, 0)
        for tensor in self._source.tensors:
            for name, value in self._values(tensor):
                dtype, shape = dtype_name(value.dtype), value.shape
                self._described[name] = (dtype, shape)
                file.put(name, dtype, shape, (0, _numel(value)), self._windows(value))
        objects, extents = self._put_options(file)
        index = Index([file.finish()], {}, self._aliases(), self._all_values(), extents)
        self._file = None
        for name, (dtype, shape) in self._described.items():
            chunks: list[Chunk] = file.chunks.get(name, [])
            index.tensors[name] = Tensor(dtype, shape, tuple(chunks))
        metadata = dcp.metadata_bytes(index, objects)
        index.extents.append(Extent(METADATA_FILE, 0, len(metadata), zlib.crc32(metadata)))
        for name, data in ((METADATA_FILE, metadata), (INDEX_FILE, index.to_bytes())):
            path = self._target.staging / name
            path.write_bytes(data)
            sync(path)

    def close(self) -> None:
        if self._file is not None:
            self._file.out.close()

    def _windows(self, value: Readable) -> Iterator[memoryview]:
        step = max(1, WINDOW_BYTES // value.dtype.itemsize)
        for begin in range(0, _numel(value), step):
            window = value.flat(begin, min(begin + step, _numel(value)))
            yield bytes_of(window)
            self._advance(window.nbytes)

    def _put_options(self, file: RankFile) -> tuple[dcp.Objects, list[Extent]]:
        """Hyper-parameters for torch's readers."""
        objects: dcp.Objects = {}
        extents = []
        for number, group in enumerate(self.groups):
            for key, value in group.items():
                extent = file.put_bytes(dcp.pickled(value))
                extents.append(extent)
                objects["optim", "param_groups", number, key] = extent
                for name in group["params"] if key != "params" else ():
                    objects["optim", f"param_groups.{name}.{key}"] = extent
        return objects, extents

    def _aliases(self) -> dict[str, str]:
        stored = {tensor.name for tensor in self._source.tensors}
        return {
            f"{MODEL}.{alias}": f"{MODEL}.{name}"
            for alias, name in self._source.aliases.items()
            if name in stored and alias not in stored
        }

    def _all_values(self) -> dict[str, Any]:
        """What ``sw.save`` keeps beside tensors, as far as others have it."""
        return {
            "step": self._source.step,
            "extra": None,
            "scheduler": None,
            "groups": [
                {key: encode(value, f"the option '{key}'") for key, value in group.items()}
                for group in self.groups
            ],
            "optimizer": None,  # any that has these states
            "plan": "",
            "levels": "",
            "world": 0,
            "setting": None,
            "trained": False,
            "torch": torch.__version__,
            "imported": self._source.kind,
            "numbers": {},
            "ranks": [],
        }


def _groups(tensors: tuple[ForeignTensor, ...]) -> Iterator[dict[str, Any]]:
    """Trained parameters with equal hyper-parameters, in their order."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        if tensor.trained:
            options = lasting_options(tensor)
            group = found.setdefault(repr(sorted(options.items())), {**options, "params": []})
            group["params"].append(tensor.name)
    yield from found.values()


def _numel(value: Readable) -> int:
    return torch.Size(value.shape).numel()
