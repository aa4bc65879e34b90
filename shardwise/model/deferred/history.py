"""What is recorded: storages without memory, and the operations that wrote into them.

All aliases of a storage (views, `nn.Parameter`, `detach`) share one cell, an attribute of the torch
storage with the same lifetime. A cell points at its last write, a write at the previous one. A
write that fills the storage has no previous one, so dead stores (`reset_parameters` before
`normal_`) are dropped while recording. No history points at a cell, so reference counts alone
release it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.model.deferred.operators import leaves
from shardwise.model.deferred.streams import Stream

_order = itertools.count()


@dataclass(slots=True, eq=False)
class Cell:
    """A storage without memory."""

    key: int
    seed: int
    device: torch.device
    """The device that the code asked for."""
    write: "Write | None" = None


@dataclass(slots=True, eq=False)
class Ref:
    """A tensor as an operation saw it: a view of a storage at one point of its history."""

    key: int
    layout: "Layout"
    write: "Write | None"
    filled: bool = False
    """The operation fills the whole storage without reading it."""


@dataclass(slots=True, eq=False)
class Op:
    func: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Ref | None]
    """The storages it creates; None for results that are not new storages."""
    stream: Stream | None = None
    """The stream of a random operation."""
    order: int = field(default_factory=lambda: next(_order))

    def refs(self) -> list[Ref]:
        return leaves(Ref, self.args, self.kwargs, self.outputs)


@dataclass(slots=True, eq=False)
class Write:
    op: Op
    before: "Write | None"


class Layout(NamedTuple):
    nbytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(t: Tensor) -> "Layout":
        nbytes, offset = t.untyped_storage().nbytes(), int(t.storage_offset())
        return Layout(nbytes, t.dtype, t.shape, t.stride(), offset, t.is_conj(), t.is_neg())

    def fills_storage(self) -> bool:
        dense = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != dense:
                return False
            dense *= size
        return dense * self.dtype.itemsize == self.nbytes


class Lost:
    """Stands for a tensor whose values were not recorded."""


def cell_of(tensor: Tensor) -> Cell | None:
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), "_shardwise_cell", None)


def make_cell(tensor: Tensor, seed: int, device: torch.device) -> Ref | None:
    """Begin the history of a new storage; None if the tensor's storage already has one."""
    if cell_of(tensor):
        return None
    cell = Cell(next(_order), seed, device)
    tensor.untyped_storage()._shardwise_cell = cell  # type: ignore[attr-defined]
    return Ref(cell.key, Layout.of(tensor), None, filled=True)


def ref_to(tensor: Tensor, cell: Cell, *, fills: bool = False) -> Ref:
    """The tensor as it is now.

    Args:
        fills: an operation will overwrite all its elements without reading the storage.
    """
    layout = Layout.of(tensor)
    filled = fills and layout.fills_storage()
    return Ref(cell.key, layout, None if filled else cell.write, filled)


def record(op: Op, written: list[Tensor]) -> None:
    """Add an operation to the histories of the storages that it writes."""
    filled = {ref.key for ref in op.refs() if ref.filled}
    for key, cell in {cell.key: cell for t in written if (cell := cell_of(t))}.items():
        cell.write = Write(op, None if key in filled else cell.write)
