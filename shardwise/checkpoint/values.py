"""The tensors of a sharded model: names, ties, and their values one unit after another."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.runtime.flat import Flat
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import access

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""torch's dtypes by their names in safetensors files."""


@dataclass(frozen=True)
class Named:
    """A parameter or persistent buffer under all its names, the first one first."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    slots: list[ParamSlot]
    """Its slots: several if it is cut into tiles; none for buffers, which all ranks have."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def named_tensors(runtime: Runtime) -> list[Named]:
    """The tensors of the model's state_dict, each once."""
    model = runtime.model
    slots = {id(face.parameter): face.slots for face in runtime.faces}
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    for name, buffer in _persistent_buffers(model):
        names.setdefault(id(buffer), []).append(name)
        tensors[id(buffer)] = buffer
    return [Named(tuple(names[key]), tensors[key], slots.get(key, [])) for key in tensors]


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def value_dtype(slot: ParamSlot, *, master: bool) -> torch.dtype:
    """The dtype in which ``stream`` yields a parameter."""
    dtypes = slot.flat.dtypes
    return dtypes.master if master and _has_master(slot.flat) else dtypes.compute


@dataclass(frozen=True)
class Batch:
    """The slots of a unit with their full values, which are valid until the next batch."""

    unit: str
    values: list[tuple[ParamSlot, torch.Tensor]]


def stream(runtime: Runtime, *, master: bool) -> Generator[Batch, None, None]:
    """Full values of all parameters, with one unit gathered at a time; collective.

    Only rank 0 gets values; on other ranks a batch may be empty. On rank 0 the masters of a unit
    are briefly in memory twice: as gathered, and as yielded.
    """
    keeps = runtime.grid.place.rank == 0
    for unit in runtime.units:
        if master and any(_has_master(flat) for flat in unit.flats):
            values = access.collect_master(runtime, unit, keeps)
            yield Batch(unit.name, list(values.items()))
            values.clear()
        elif unit.slots:
            with access.gathered(runtime, unit):
                yield Batch(unit.name, [(s, s.parameter.detach()) for s in unit.slots])


def _has_master(flat: Flat) -> bool:
    return flat.has_master and flat.spec.requires_grad
