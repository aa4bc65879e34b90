"""Where every element of every state lives: flats, and the slots of parameters in them.

A unit's parameters of one (dtype, requires_grad) are laid end to end in one *flat*, padded so that
every rung of the ladder cuts it evenly. This module does not use torch: dtypes are names, sizes
are element counts.
"""

from dataclasses import dataclass
from math import prod

from shardwise.core.topology import Interval

ALIGN = 16
"""Every shard is a multiple of this many elements, so that shards start on cache lines."""

BLOCK_ALIGN = 256
"""Large shards are a multiple of this, so that they have whole blocks of the usual wire formats."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the planner sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its flat."""

    param: ParamSpec
    interval: Interval


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """One flat buffer of a unit: its slots in order and its padded size."""

    slots: tuple[Slot, ...]
    numel: int
    """Elements including padding; divisible by ALIGN times the number of ranks."""

    @property
    def dtype(self) -> str:
        return self.slots[0].param.dtype

    @property
    def requires_grad(self) -> bool:
        return self.slots[0].param.requires_grad


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A group of parameters that is gathered, reduced and updated together."""

    name: str
    flats: tuple[FlatSpec, ...]
    inside: bool = False
    """Whether it is a tile of a layer in a block: then another unit's forward computes with it."""

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(slot.param.numel for flat in self.flats for slot in flat.slots)

    @property
    def shape(self) -> tuple[tuple[int, str, bool], ...]:
        """All that a plan's operations on it depend on; equal for alike units."""
        return tuple((flat.numel, flat.dtype, flat.requires_grad) for flat in self.flats)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The units of a model, root first, then in the order of the module tree."""

    units: tuple[UnitSpec, ...]
    used_again: tuple[str, ...] = ()
    """Tiles of tied weights, once for each further layer that computes with them."""

    @property
    def order(self) -> tuple[str, ...]:
        """The units in the order in which a forward is expected to use them."""
        return (*(unit.name for unit in self.units), *self.used_again)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


def padded(numel: int, world: int) -> int:
    """The size of a flat with ``numel`` elements on ``world`` ranks; never zero.

    >>> padded(100, 4)
    128
    """
    large = numel >= 64 * BLOCK_ALIGN * world  # keeps padding below two per cent
    quantum = (BLOCK_ALIGN if large else ALIGN) * world
    return max(1, -(-numel // quantum)) * quantum


def lay_out(name: str, params: list[ParamSpec], world: int, *, inside: bool = False) -> UnitSpec:
    """Lay a unit's parameters into flats, one for each (dtype, requires_grad) that occurs."""
    kinds: dict[tuple[str, bool], list[ParamSpec]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
    flats = []
    for members in kinds.values():
        slots, offset = [], 0
        for param in members:
            slots.append(Slot(param, Interval(offset, offset + param.numel)))
            offset += param.numel
        flats.append(FlatSpec(tuple(slots), padded(offset, world)))
    return UnitSpec(name, tuple(flats), inside)


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element, by the dtype's torch name."""
