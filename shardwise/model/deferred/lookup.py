"""Finds the history of a tensor, or the reason why it has none.

Cells have histories. Those of registered parameters are also kept as they were at the end of the
context: a parameter that was cast later (`model.to(dtype)`) has a new storage, and one that was
written to later has values that were not recorded.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.core.errors import UsageError
from shardwise.model.deferred.history import Cell, Ref, cell_of, ref_to
from shardwise.model.deferred.operators import plain_torch


class Record(NamedTuple):
    """What to replay for a tensor."""

    ref: Ref
    seed: int
    version: int


_parameters = WeakIdKeyDictionary()
"""Registered parameters, with their records at the end of the context; None before that."""


def require(tensor: Tensor) -> Record:
    """The record of a deferred tensor; raises if `materialize` cannot compute its values."""
    found, left, shape = _find(tensor), _parameters.get(tensor), tuple(tensor.shape)
    if not tensor.is_meta:
        raise UsageError(f"a tensor of shape {shape} is not deferred: it already has its values")
    if found is None:
        raise UsageError(
            f"a meta tensor of shape {shape} has no recorded initialisation: create, copy and cast "
            "it inside `deferred_init()`, or load its values"
        )
    if left and left.ref.write is found.ref.write and left.version != _version(tensor):
        raise UsageError(
            f"a deferred parameter of shape {shape} was written to after `deferred_init()`, where "
            "nothing is recorded: initialise it inside the context, or materialise it first"
        )
    return found


def _find(tensor: Tensor) -> Record | None:
    if cell := cell_of(tensor):
        return _record_of(tensor, cell)
    left = _parameters.get(tensor)
    if left is None or not tensor.is_meta or tensor.dtype == left.ref.layout.dtype:
        return None
    return left if tensor.shape == left.ref.layout.size else None


def _record_of(tensor: Tensor, cell: Cell) -> Record:
    return Record(ref_to(tensor, cell), cell.seed, _version(tensor))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def remember(module: Any, name: str, parameter: Tensor | None) -> None:
    """A hook for modules that register a parameter."""
    with plain_torch():
        if parameter is not None and cell_of(parameter):
            _parameters[parameter] = None


def end_context() -> None:
    """Keep the records of parameters as they are now."""
    with plain_torch():  # some may be guarded by now: bypass the guard
        for parameter, left in list(_parameters.items()):
            cell = cell_of(parameter)
            if cell is not None and (left is None or left.ref.write is not cell.write):
                _parameters[parameter] = _record_of(parameter, cell)


def forget(tensor: Tensor) -> None:
    """Drop the records of a parameter, once it has its values.

    Otherwise its history, with real tensors that were copied into it, lives as long as it does, and
    the weak reference to it prevents `torch.utils.swap_tensors`.
    """
    _parameters.pop(tensor, None)


def is_deferred(tensor: Tensor) -> bool:
    """Whether the tensor is on the meta device and `materialize` can compute its values."""
    with plain_torch():
        return _find(tensor) is not None


def deferred_seed(tensor: Tensor) -> int:
    """The base seed of the context in which the tensor was made."""
    with plain_torch():
        return require(tensor).seed
