"""What a checkpoint of others has, in one form: tensors by name, read in pieces, and what is left.

A reader of a layout makes this from descriptions alone; data is read when it is asked for, so that
memory stays what a caller asks for at once.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.checkpoint.foreign.zips import LazyTensor


class Readable(Protocol):
    """A tensor whose elements are read in row-major order."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def flat(self, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to ``end``."""


@dataclass(frozen=True)
class Piece:
    """Elements of a stored tensor."""

    source: LazyTensor
    begin: int
    numel: int


@dataclass(frozen=True)
class Joined:
    """A tensor whose elements are pieces of others, one after another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((piece.numel for piece in self.pieces), initial=0))

    def flat(self, begin: int, end: int) -> torch.Tensor:
        found = torch.empty(end - begin, dtype=self.dtype)
        at = begin
        while at < end:
            place = bisect_right(self._starts, at) - 1
            piece, first = self.pieces[place], at - self._starts[place]
            count = min(piece.numel - first, end - at)
            source = piece.source.flat(piece.begin + first, piece.begin + first + count)
            found[at - begin : at - begin + count] = source
            at += count
        return found


def cut(sources: Sequence[LazyTensor], begin: int, numel: int) -> list[Piece] | None:
    """Elements ``begin`` and following of tensors laid end to end; None if there are too few."""
    found, at = [], 0
    for source in sources:
        first, last = max(begin, at), min(begin + numel, at + source.numel)
        if first < last:
            found.append(Piece(source, first - at, last - first))
        at += source.numel
    return found if begin + numel <= at else None


State = Readable | int | float
"""A state of the optimizer: of each element, or one number."""


@dataclass(frozen=True)
class ForeignTensor:
    """A parameter or buffer, with what its optimizer knew of it."""

    name: str
    value: Readable
    """A parameter's master weights, where the checkpoint has them."""
    trained: bool = False
    states: dict[str, State] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters of its group."""

    @property
    def numel(self) -> int:
        return math.prod(self.value.shape)

    @property
    def num_bytes(self) -> int:
        """With the states of each element."""
        values = [self.value, *self.states.values()]
        return sum(
            math.prod(value.shape) * value.dtype.itemsize
            for value in values
            if not isinstance(value, int | float)
        )


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another library."""

    kind: str
    """What wrote it, for people."""
    path: Path
    tensors: tuple[ForeignTensor, ...]
    aliases: dict[str, str]
    """Further names of tied parameters, and the name under which each is stored."""
    step: int | None
    left: tuple[str, ...]
    """What was found and cannot be taken over."""
    verify: Callable[[], Iterator[int]]
    """Compares all files with the checksums in them; yields the bytes that were read."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Number:
    """A number as torch's optimizers keep it, such as Adam's step."""

    value: int | float
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def flat(self, begin: int, end: int) -> torch.Tensor:
        return torch.tensor([float(self.value)], dtype=self.dtype)[begin:end]


def readable(state: State) -> Readable:
    """A state as a tensor."""
    return Number(state) if isinstance(state, int | float) else state


_OF_A_PROGRAM = {"foreach", "fused", "capturable", "differentiable", "bias_correction", "params"}


def lasting_options(tensor: ForeignTensor) -> dict[str, Any]:
    """Hyper-parameters without those that say how an optimizer computes: the one that loads the
    checkpoint has its own."""
    return {key: value for key, value in tensor.options.items() if key not in _OF_A_PROGRAM}


def plain_options(group: dict[Any, Any]) -> dict[str, Any]:
    """Hyper-parameters of a group that are plain values: numbers, texts, and tuples of them."""
    found = {}
    for key, value in group.items():
        if isinstance(value, LazyTensor):
            value = value.full().item() if value.numel == 1 else None
        if isinstance(key, str) and key != "params" and _is_plain(value):
            found[key] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) < 100 and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


def number(value: Any) -> int | float | None:
    """A number, be it a tensor of one element, or None."""
    if isinstance(value, LazyTensor) and value.numel == 1 and not value.dtype.is_complex:
        value = value.full().item()
    return value if isinstance(value, int | float) else None
