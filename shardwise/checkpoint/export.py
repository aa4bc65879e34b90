"""Exports a sharded model as a folder of safetensors files, with one unit in memory at a time.

The place of every tensor is known before any value is gathered: rank 0 writes the headers first,
and then each parameter to its place as its unit is gathered.
"""

import copy
import json
import os
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.folder import CONFIG_FILE, INDEX_FILE, Staging, shard_name
from shardwise.checkpoint.format import Header, Layout, TensorInfo, arrange, lay_out
from shardwise.checkpoint.together import on_failure, together
from shardwise.checkpoint.values import DTYPES, Batch, Named, named_tensors, stream, value_dtype
from shardwise.core.errors import UsageError
from shardwise.runtime.runtime import Runtime

DEFAULT_SHARD_BYTES = 5_000_000_000
_NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE_NUMEL = 1 << 22
"""Elements converted and written at once, so that no whole parameter is copied."""


@dataclass(frozen=True)
class Options:
    """What to write, and how."""

    dtype: torch.dtype | None
    max_shard_bytes: int
    master: bool
    overwrite: bool

    def __post_init__(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise UsageError(f"Weights cannot be exported as {self.dtype}; give a floating dtype.")
        if self.max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes must be positive, got {self.max_shard_bytes}.")


def export_model(runtime: Runtime, path: Path, options: Options) -> None:
    """Write the folder; collective: rank 0 writes, all ranks raise its errors."""
    runtime.require_idle("export")
    tensors = named_tensors(runtime)
    shards = _cut(_infos(tensors, options), options.max_shard_bytes)
    control, writes = runtime.grid.control, runtime.grid.place.rank == 0
    writer = _Writer(tensors, shards, Staging(path, overwrite=options.overwrite))
    with on_failure(writer.staging.discard if writes else _nothing):
        together(control, "export", writer.open if writes else _nothing)
        together(
            control,
            "export of the configuration",
            (lambda: _write_config(runtime.model, writer)) if writes else _nothing,
        )
        with closing(stream(runtime, master=options.master)) as batches:
            for batch in batches:
                put = partial(writer.put, batch) if writes else _nothing
                together(control, f"export of unit '{batch.unit}'", put)
        together(control, "end of the export", writer.staging.publish if writes else _nothing)


def _nothing() -> None:
    """What the other ranks do while rank 0 writes."""


# --- where everything goes --------------------------------------------------------------------


def _infos(tensors: list[Named], options: Options) -> list[TensorInfo]:
    found = []
    for tensor in tensors:
        dtype = tensor.tensor.dtype
        if tensor.slots:
            dtype = value_dtype(tensor.slots[0], master=options.master)
        if options.dtype is not None and dtype.is_floating_point:
            dtype = options.dtype
        if dtype not in _NAMES_OF_DTYPES:
            raise UsageError(
                f"'{tensor.name}' has dtype {dtype}, which safetensors files cannot have; convert "
                "it before the export."
            )
        found.append(TensorInfo(tensor.name, _NAMES_OF_DTYPES[dtype], tensor.shape))
    return found


def _cut(infos: list[TensorInfo], max_bytes: int) -> list[list[TensorInfo]]:
    """Divide the model, in its order, into files; a tensor that is too large gets its own file."""
    shards: list[list[TensorInfo]] = [[]]
    used = 0
    for info in infos:
        if shards[-1] and used + info.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(info)
        used += info.num_bytes
    return shards


# --- rank 0 -----------------------------------------------------------------------------------


class _Writer:
    """The files of one export, and the place of every tensor in them."""

    def __init__(
        self, tensors: list[Named], shards: list[list[TensorInfo]], staging: Staging
    ) -> None:
        self.staging = staging
        self._tensors = tensors
        self._shards = {shard_name(i, len(shards)): shard for i, shard in enumerate(shards)}
        self._infos = {info.name: info for shard in shards for info in shard}
        self._first_names = {slot: t.name for t in tensors for slot in t.slots}
        self._places: dict[str, tuple[Path, int]] = {}

    @property
    def param_dtypes(self) -> list[torch.dtype]:
        """The dtypes that parameters have in the files, in the model's order."""
        return [DTYPES[self._infos[name].dtype] for name in self._param_names]

    @property
    def _param_names(self) -> list[str]:
        return [tensor.name for tensor in self._tensors if tensor.slots]

    def open(self) -> None:
        """Create the folder with headers, buffers, and the index."""
        aliases = {t.name: t.names[1:] for t in self._tensors}
        layouts: dict[str, Layout] = {}
        for file, shard in self._shards.items():
            ties = {alias: info.name for info in shard for alias in aliases[info.name]}
            # transformers requires `format`; ties are noted as safetensors does.
            layouts[file] = lay_out(Header(arrange(shard), {"format": "pt", **ties}))
        self.staging.open(sum(layout.file_bytes for layout in layouts.values()))
        for file, layout in layouts.items():
            self._begin_file(self.staging.path / file, layout)
        if len(self._shards) > 1:
            self._write_index()
        self._put([(t.name, 0, t.tensor.detach()) for t in self._tensors if not t.slots])

    def put(self, batch: Batch) -> None:
        """Write the parameters of a unit to their places."""
        self._put([(self._first_names[slot], slot.start, value) for slot, value in batch.values])

    def _begin_file(self, path: Path, layout: Layout) -> None:
        for name, offset in layout.offsets.items():
            self._places[name] = (path, offset)
        with path.open("xb") as file:
            file.truncate(layout.file_bytes)
            _write_at(file.fileno(), 0, memoryview(layout.encoded), path)

    def _write_index(self) -> None:
        index = {
            "metadata": {
                "total_parameters": sum(self._infos[n].numel for n in self._param_names),
                "total_size": sum(info.num_bytes for info in self._infos.values()),
            },
            "weight_map": {
                info.name: file for file, shard in self._shards.items() for info in shard
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.staging.path / INDEX_FILE).write_text(text, encoding="utf-8")

    def _put(self, values: list[tuple[str, int, torch.Tensor]]) -> None:
        """Write tensors, each from one of its elements on, and wait for the disk.

        Waiting for everything only at the end might exceed the other ranks' time limit.
        """
        by_file: dict[Path, list[tuple[str, int, torch.Tensor]]] = {}
        for item in values:
            by_file.setdefault(self._places[item[0]][0], []).append(item)
        for path, items in by_file.items():
            with path.open("r+b", buffering=0) as file:
                for item in items:
                    self._write(file.fileno(), *item)
                os.fsync(file.fileno())

    def _write(self, descriptor: int, name: str, start: int, value: torch.Tensor) -> None:
        (path, offset), info = self._places[name], self._infos[name]
        assert start + value.numel() <= info.numel, name
        offset += start * DTYPES[info.dtype].itemsize
        for piece in value.reshape(-1).split(_PIECE_NUMEL):
            converted = piece.to(device="cpu", dtype=DTYPES[info.dtype]).contiguous()
            data = memoryview(converted.view(torch.uint8).numpy())
            _write_at(descriptor, offset, data, path)
            offset += len(data)


def _write_at(descriptor: int, offset: int, data: memoryview, path: Path) -> None:
    """Write all of the data; short writes are continued."""
    try:
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_config(model: Any, writer: _Writer) -> None:
    """Write the model's configuration as its own library does, if it has one."""
    config: Any = getattr(model, "config", None)
    folder = writer.staging.path
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)  # the user's object is not changed
        config.architectures = [type(model).__name__]
        floating = [dtype for dtype in writer.param_dtypes if dtype.is_floating_point]
        if floating:
            config.dtype = str(floating[0]).removeprefix("torch.")
        config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
    elif hasattr(config, "to_json_string"):
        text = config.to_json_string()
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
