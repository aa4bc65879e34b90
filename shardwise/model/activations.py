"""How many bytes of activations a forward leaves for backward, without running it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from shardwise.core.topology import Topology
from shardwise.core.work import Saved
from shardwise.model.inspect import Members, find_members
from shardwise.model.projection import in_tiles
from shardwise.model.tiling import cut
from shardwise.plan.plan import Plan

SMALL_BYTES = 1 << 16
"""Inputs of units that are smaller stay in memory: moving them would cost more than they take."""


def saved_bytes(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module], Any],
    plan: Plan | None = None,
    topology: Topology | None = None,
) -> Saved:
    """What autograd saves in ``run(model)``, parameters and buffers aside; units are the plan's.

    With a topology, its layers are in the plan's tiles. Both callables run on fake tensors: shapes,
    dtypes and the choice of kernels are real, memory is not touched.
    """
    plan = plan or Plan()
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as installed:
        model = build()
        seen = _Seen({_storage(t) for t in (*model.parameters(), *model.buffers())})
        units = find_members(model, plan)
        if topology is not None:
            units = [unit for unit in cut(model, units, plan, topology) if not _tile(unit)]
        for unit in units[1:]:
            for handle in (
                unit.module.register_forward_pre_hook(seen.begin, with_kwargs=True),
                unit.module.register_forward_hook(seen.end, always_call=True),
            ):
                installed.callback(handle.remove)
        with torch.autograd.graph.saved_tensors_hooks(seen.save, lambda tensor: tensor):
            result = run(model)  # kept alive: storages must not be reused while counting
        del result
    return seen.summary()


def _tile(unit: Members) -> bool:
    """Whether a unit is a tile, whose layer computes in tiles from now on."""
    if unit.whole is None:
        return False
    for layer in unit.whole.users:
        layer.forward = partial(in_tiles, unit.whole, layer)  # type: ignore[method-assign]
    return True


@dataclass
class _Call:
    """The outermost call of a unit."""

    inputs: dict[int, torch.Tensor]
    """By storage, and held: a storage must not be reused while counting."""
    inner: dict[int, int] = field(default_factory=dict)
    """What is saved in it, by storage."""

    @property
    def moved_bytes(self) -> int:
        return sum(t.nbytes for t in self.inputs.values() if t.nbytes >= SMALL_BYTES)

    @property
    def inner_bytes(self) -> int:
        return sum(size for storage, size in self.inner.items() if storage not in self.inputs)


class _Seen:
    """What was saved in a forward, and where."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._root: dict[int, int] = {}
        self._calls: list[_Call] = []
        self._depth = 0

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # units inside of it are recomputed with it
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            inputs = {_storage(t): t for t in tensors if _storage(t) not in self._own}
            self._calls.append(_Call(inputs))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in self._own:
            saved = self._calls[-1].inner if self._depth else self._root
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def summary(self) -> Saved:
        total = dict(self._root)
        inputs: dict[int, torch.Tensor] = {}
        for call in self._calls:
            total |= call.inner
            inputs |= {s: t for s, t in call.inputs.items() if s not in self._root}
        small = [t for t in inputs.values() if t.nbytes < SMALL_BYTES]
        return Saved(
            total=sum(total.values()),
            root=sum(self._root.values()),
            checkpoints=_held_bytes(list(inputs.values())),
            small=_held_bytes(small),
            largest_unit=max((call.inner_bytes for call in self._calls), default=0),
            largest_input=max((call.moved_bytes for call in self._calls), default=0),
        )


def _held_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
