"""Finds the tensors in the arguments and results of modules."""

from collections.abc import Mapping, Sequence
from types import FunctionType

import torch
from torch import nn


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in nested containers, dataclasses and plain objects."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif depth < _MAX_DEPTH and not isinstance(item, _OPAQUE) and id(item) not in seen:
            seen.add(id(item))
            pending += [(inner, depth + 1) for inner in _items(item)]
    return found


_MAX_DEPTH = 6
_OPAQUE = (type(None), str, bytes, int, float, type, nn.Module, FunctionType)
"""Types that are not searched: no forward hides a result in them."""


def _items(value: object) -> list[object]:
    """The items of a container, or the attributes of any other object."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    found = [getattr(value, name) for name in slots if hasattr(value, name)]
    return found + list(getattr(value, "__dict__", {}).values())


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
