"""Saves a sharded model and its optimizer: every rank writes its shards; collective.

Ranks meet after each unit, so that a failure on one is raised on all at once. The checkpoint
appears when everything of all ranks is on the disk.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.checkpoint.together import on_failure, together
from shardwise.checkpoint.training import dcp
from shardwise.checkpoint.training.background import Pending, begin, finish
from shardwise.checkpoint.training.contents import MODEL, OWN, Contents, Piece, small
from shardwise.checkpoint.training.index import (
    INDEX_FILE,
    METADATA_FILE,
    Chunk,
    Extent,
    File,
    Index,
    Tensor,
)
from shardwise.checkpoint.training.place import Target
from shardwise.checkpoint.training.plain import encode
from shardwise.checkpoint.training.ranks import own_pieces, own_values, setting
from shardwise.checkpoint.training.write import RankFile, blob_bytes
from shardwise.comm.control import Control
from shardwise.core.checksum import crc32
from shardwise.core.errors import UsageError
from shardwise.device.abilities import separate_memory
from shardwise.plans.file import dump_plan
from shardwise.runtime.runtime import Runtime


@dataclass(frozen=True)
class Request:
    """What the caller of ``sw.save`` wants to keep."""

    path: Path
    optimizer: Optimizer | None
    scheduler: Any
    step: int | None
    extra: Any
    trained: bool
    asynchronous: bool


def save_checkpoint(runtime: Runtime, request: Request) -> Pending | None:
    """Write a checkpoint; all ranks raise the errors of any."""
    runtime.require_idle("save")
    if runtime.accumulated:
        raise UsageError(
            "save cannot run after a backward under no_sync, because gradients are not saved; "
            "call it after optimizer.step()."
        )
    finish(runtime)
    for unit in runtime.units:
        unit.settle()
    runtime.grid.block_host_until_idle()
    saving = _Saving(runtime, request)
    saving.begin()
    if not request.asynchronous:
        saving.run(runtime.grid.control)
        return None
    plan, device = runtime.plan, runtime.grid.device
    if separate_memory(device) or plan.tiers.update == "backward":
        # Streams of a device order its reads with training's, and backward may change weights.
        saving.read(runtime.grid.control)
    return begin(runtime, saving.run, str(saving.target.path))


def _nothing() -> None:
    """What the other ranks do while rank 0 works."""


@dataclass
class _Part:
    """What one rank has written, for the index."""

    file: File
    chunks: dict[str, list[Chunk]]
    described: dict[str, tuple[str, tuple[int, ...]]]
    objects: dict[tuple[str | int, ...], Extent]
    extents: list[Extent]
    numbers: dict[str, dict[str, Any]]
    values: dict[str, Any]


class _Saving:
    """One rank's part of a save."""

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime, self._request = runtime, request
        self._rank = runtime.grid.place.rank
        self.target = Target(request.path)
        self.contents = Contents(runtime, request.optimizer, trained=request.trained)
        self.own: list[Piece] = []
        """What rank 0 writes for all, and what each rank keeps for itself."""
        self.part: _Part | None = None
        self._file: RankFile | None = None
        self._units: list[tuple[str, list[Piece]]] = []
        self._aliases: dict[str, str] = {}
        self._described: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._values: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._numbers: dict[str, dict[str, Any]] = {}
        self._own_values: dict[str, Any] = {}

    def begin(self) -> None:
        """Everything before shards are read: what can be refused is refused here."""
        control = self._runtime.grid.control
        with on_failure(self.abandon):
            together(control, "save", self.prepare)
            self.own += own_pieces(self._runtime, self.contents)
            needed = control.exchange(torch.tensor([self._num_bytes()]), "save").sum()
            first = partial(self.target.open, int(needed)) if self._rank == 0 else _nothing
            together(control, "save", first)
            together(control, "save", self.open)

    def read(self, control: Control) -> None:
        """Write the shards of all units."""
        with on_failure(self.abandon):
            for unit, pieces in self._units:
                together(control, f"saving of unit '{unit}'", partial(self.write, pieces))
            self._units.clear()

    def run(self, control: Control, staged: Callable[[], None] = lambda: None) -> None:
        """Write everything; ``staged`` is called when no shard will be read any more."""
        self.read(control)
        staged()
        with on_failure(self.abandon):
            together(control, "save", self.finish)
            parts = control.gather_objects(self.part, "end of a save")
            publish = partial(self.publish, parts) if parts else _nothing
            together(control, "end of the save", publish)

    def prepare(self) -> None:
        """Collect everything that can be refused, before anything is written."""
        units = self._runtime.units
        self._units = [(unit.name, list(self.contents.of_unit(unit))) for unit in units]
        self._aliases = self.contents.aliases
        self._groups = self.contents.groups()
        self._numbers = self.contents.numbers()
        self._own_values = own_values(self._runtime)
        request = self._request
        scheduler = None if request.scheduler is None else request.scheduler.state_dict()
        self._values = {
            "step": request.step,
            "extra": encode(request.extra, "extra", self._keep),
            "scheduler": encode(scheduler, "the scheduler's state", self._keep),
            "groups": [
                {
                    key: encode(value, f"the optimizer's option '{key}'", self._keep)
                    for key, value in group.items()
                }
                for group in self._groups
            ],
            "optimizer": None if request.optimizer is None else type(request.optimizer).__name__,
            "plan": dump_plan(self._runtime.plan),
            "levels": str(self._runtime.grid.place.topology),
            "world": self._runtime.grid.place.world,
            "setting": setting(self._runtime),
            "trained": request.trained,
            "config": _config_of(self._runtime.model),
            "torch": torch.__version__,
        }
        if self._rank == 0:
            whole = [*self.contents.buffers, *self.contents.empty]
            self.own += [small(f"{MODEL}.{tensor.name}", tensor.tensor) for tensor in whole]
        else:
            self.own.clear()  # tensors of values, which rank 0 writes

    def _keep(self, value: torch.Tensor) -> str:
        name = f"{OWN}.values.{len(self.own)}"
        self.own.append(small(name, value))
        return name

    def _num_bytes(self) -> int:
        """About what this rank will write."""
        every = [*self.own, *(piece for _, pieces in self._units for piece in pieces)]
        return sum(blob_bytes(p.dtype, p.shape, p.start, p.stop) for p in every)

    def open(self) -> None:
        try:
            self._file = RankFile(self.target.staging, self._rank)
        except FileNotFoundError as error:
            raise UsageError(
                f"'{self.target.staging}', which rank 0 made, is not there; give all ranks the "
                "same path, on a file system that all see."
            ) from error

    def write(self, pieces: list[Piece]) -> None:
        assert self._file is not None
        staging = self._runtime.pools.staging
        for piece in pieces:
            self._described[piece.name] = (piece.dtype, piece.shape)
            place = (piece.start, piece.stop)
            self._file.put(piece.name, piece.dtype, piece.shape, place, piece.data(staging))

    def finish(self) -> None:
        assert self._file is not None
        self.write(self.own)
        objects, extents = self._put_objects()
        self.part = _Part(
            file=self._file.finish(),
            chunks=self._file.chunks,
            described=self._described,
            objects=objects,
            extents=extents,
            numbers=self._numbers,
            values=self._own_values,
        )
        self._file = None

    def _put_objects(self) -> tuple[dict[tuple[str | int, ...], Extent], list[Extent]]:
        """Rank 0 writes the options of groups for torch's readers; equal values once."""
        assert self._file is not None
        objects: dict[tuple[str | int, ...], Extent] = {}
        written: dict[bytes, Extent] = {}

        def put(value: Any) -> Extent:
            data = dcp.pickled(value)
            if data not in written:
                written[data] = self._file.put_bytes(data)  # type: ignore[union-attr]
            return written[data]

        for name, numbers in self._numbers.items():
            for key, value in numbers.items():
                objects["optim", "state", name, key] = put(value)
        for number, group in enumerate(self._groups if self._rank == 0 else ()):
            for key, value in group.items():
                extent = put(value)
                objects["optim", "param_groups", number, key] = extent
                for name in group["params"] if key != "params" else ():
                    objects["optim", f"param_groups.{name}.{key}"] = extent
        return objects, list(written.values())

    def publish(self, parts: list[Any]) -> None:
        """Rank 0 writes the indexes, and makes the checkpoint visible."""
        index = Index(aliases=self._aliases)
        chunks: dict[str, list[Chunk]] = {}
        described: dict[str, tuple[str, tuple[int, ...]]] = {}
        objects: dict[tuple[str | int, ...], Extent] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for rank, part in enumerate(parts):
            index.files.append(part.file)
            index.extents += part.extents
            described |= part.described
            objects |= part.objects
            numbers |= part.numbers
            for name, found in part.chunks.items():
                chunks.setdefault(name, []).extend(_of_file(chunk, rank) for chunk in found)
        for name, (dtype, shape) in described.items():
            ordered = sorted(chunks.get(name, ()), key=lambda chunk: chunk.start)
            index.tensors[name] = Tensor(dtype, shape, tuple(ordered))
        index.values = {
            **self._values,
            "numbers": encode(numbers, "the optimizer's state"),
            "ranks": [part.values for part in parts],
        }
        folder = self.target.staging
        metadata = dcp.metadata_bytes(index, objects)
        index.extents.append(Extent(METADATA_FILE, 0, len(metadata), crc32(metadata)))
        _write_whole(folder / METADATA_FILE, metadata)
        _write_whole(folder / INDEX_FILE, index.to_bytes())
        self.target.publish()

    def abandon(self) -> None:
        if self._file is not None:
            self._file.out.close()
        if self._rank == 0:
            self.target.discard()


def _config_of(model: Any) -> str | None:
    """A model's configuration as its own library writes it, for an export without the model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    if hasattr(config, "architectures"):
        config = copy.deepcopy(config)  # the user's object is not changed
        config.architectures = [type(model).__name__]
    text = config.to_json_string()
    return text if isinstance(text, str) else None


def _of_file(chunk: Chunk, file: int) -> Chunk:
    return Chunk(file, chunk.blob, chunk.data, chunk.start, chunk.numel, chunk.first_check)


def _write_whole(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
