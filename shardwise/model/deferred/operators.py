"""Operators as the dispatcher sees them: properties by their schema, and their arguments."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class Traits(NamedTuple):
    """Properties of an operator, by its schema."""

    names: tuple[str, ...]
    writes: frozenset[str]
    fills: bool  # what it writes does not depend on the old values
    creates: bool  # all results are new tensors
    is_view: bool
    asks: bool  # returns and writes no tensor, so it needs values
    shape_only: bool  # does not need the values of its inputs
    uninitialised: bool
    random: bool


_FILLS = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_FILLS |= {"log_normal_", "cauchy_", "geometric_"}


@functools.cache
def traits_of(func: Any) -> Traits:
    name, names = func._schema.name.split("::")[1], [a.name for a in func._schema.arguments]
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    results = [r for r in func._schema.returns if "Tensor" in str(r.type)]
    aliased = any(result.alias_info for result in results)
    return Traits(
        names=tuple(names),
        writes=frozenset(a.name for a in written),
        fills=name in _FILLS or all(a.is_out for a in written),
        creates=bool(results) and not aliased and not written,
        is_view=(aliased and not written) or torch.Tag.inplace_view in func.tags,
        asks=not results and not written,
        shape_only="device" in names and (name.startswith("new_") or name.endswith("_like")),
        uninitialised=not written and name.startswith(("empty", "new_empty")),
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply `fn` to the leaves of an operator's arguments, much faster than torch's pytree."""
    if isinstance(value, list | tuple):
        return [map_leaves(fn, item) for item in value]
    if isinstance(value, dict):
        return {name: map_leaves(fn, item) for name, item in value.items()}
    return fn(value)


def leaves(kind: type, *values: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None, values)
    return found


def tensors_in(*values: Any) -> list[Tensor]:
    return leaves(Tensor, *values)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, operators run plainly: without modes, subclasses and autograd."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield
