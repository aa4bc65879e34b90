"""How many bytes of activations a forward saves for backward, without running it."""

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from shardwise.core.calls import SMALL_BYTES, Call, Forward, Input
from shardwise.core.topology import Topology
from shardwise.core.work import Saved
from shardwise.model.inspect import Members, find_members
from shardwise.model.projection import in_tiles
from shardwise.model.tiling import cut
from shardwise.plans.plan import Plan

__all__ = ["SMALL_BYTES", "forward_of", "saved_bytes"]


def saved_bytes(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module], Any],
    plan: Plan | None = None,
    topology: Topology | None = None,
) -> Saved:
    """Bytes that autograd saves in ``run(model)``; see ``forward_of``."""
    return forward_of(build, run, plan or Plan(), topology).saved


def forward_of(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module], Any],
    plan: Plan,
    topology: Topology | None = None,
) -> Forward:
    """What autograd saves in ``run(model)`` without parameters and buffers, by the plan's units.

    With a topology, layers are cut into the plan's tiles. Both callables run on fake tensors:
    shapes, dtypes and the choice of kernels are real, no memory is used.
    """
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
    return seen.forward()


def _tile(unit: Members) -> bool:
    """If a unit is a tile, make its layer compute in tiles; returns whether it is one."""
    if unit.whole is None:
        return False
    for layer in unit.whole.users:
        layer.forward = partial(in_tiles, unit.whole, layer)
    return True


class _Seen:
    """Inputs and saved tensors of a forward; storages are identified by order of appearance."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._keys: dict[int, int] = {}
        self._held: list[torch.Tensor] = []  # a storage must not be reused while counting
        self._root: dict[Hashable, int] = {}
        self._calls: list[Call] = []
        self._inner: list[dict[Hashable, int]] = []
        self._depth = 0

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # units inside it are recomputed with it
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            inputs: dict[Hashable, Input] = {
                self._key(t): Input(t.nbytes, _storage_bytes(t))
                for t in tensors
                if _storage(t) not in self._own
            }
            self._inner.append({})
            self._calls.append(Call(inputs, self._inner[-1]))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in self._own:
            saved = self._inner[-1] if self._depth else self._root
            saved[self._key(tensor)] = _storage_bytes(tensor)
        return tensor

    def forward(self) -> Forward:
        return Forward(self._root, tuple(self._calls))

    def _key(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor)
        return self._keys.setdefault(_storage(tensor), len(self._keys))


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
