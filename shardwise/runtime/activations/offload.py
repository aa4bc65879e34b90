"""Inputs of units rest on a tier between forward and backward.

[Note: Inputs on a tier]
Autograd saves an input through ``pack`` and gets its values back through ``unpack``. In between it
holds a ``_Ref``, which goes with the graph, after backward or without one; with the last of an
input goes its ``_Saved``, and with that the input's space and memory. These stay in memory: tensors
smaller than ``SMALL_BYTES``, parameters and views of them, views with holes or overlaps, tensor
subclasses, and tensors inside objects other than tuples, lists and dicts (which keep them alive
anyway).

When something moves is not decided here: ``plans/inputs.py`` makes operations of what autograd
saves and takes, and the executor executes them with the verbs from here.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.core.errors import UsageError
from shardwise.core.ticket import DONE, Ticket
from shardwise.model.activations import SMALL_BYTES
from shardwise.plans.inputs import Input, InputCall
from shardwise.plans.ops import Kind, Op
from shardwise.runtime.activations.homes import Home, OnDisk, OnHost
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import Unit

_Gone = tuple[Home, Input]


class _Saved:
    """An input on the tier; it goes with the last graph that needs it."""

    def __init__(
        self, home: Home, known: Input, storage: StorageWeakRef, retired: deque[_Gone]
    ) -> None:
        self.home, self.known = home, known
        self._storage = storage  # while this is held, no other storage gets its address
        self._retired = retired

    def __del__(self) -> None:
        # Only this: it may run anywhere, even inside a lock that a release would need.
        self._retired.append((self.home, self.known))


@dataclass(eq=False)
class _Call:
    """A call of a unit while its graph lives."""

    planned: InputCall
    homes: list[Home] = field(default_factory=list)
    """Of all inputs; a home that was released has no memory."""
    num_new: int = 0
    """How many of ``homes``, the first ones, no earlier call has."""
    missing: int = 0
    """How many inputs the running recomputation still takes; 0: none runs."""


@dataclass(eq=False)
class _Ref:
    """Autograd holds this in place of an input, for one call."""

    call: _Call
    saved: _Saved


class _InMemory:
    """Autograd holds this in place of an input that stays in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def values(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise UsageError(
                f"An input of shape {tuple(self._tensor.shape)} was written in place after its "
                "unit's forward, but the unit is recomputed from it: write into a copy, or set "
                "activations = 'keep' in the plan."
            )
        return self._tensor


class Offload:
    """Keeps inputs of calls on a tier from forward to backward; see [Note: Inputs on a tier]."""

    def __init__(self, tier: OnDisk | OnHost, runtime: Runtime) -> None:
        self._tier, self._device = tier, runtime.grid.device
        self._executor, self._planned = runtime.executor, runtime.issuer.inputs
        with torch._C.DisableTorchFunctionSubclass():
            self._parameters = {s.parameter.untyped_storage()._cdata for s in runtime.slots}
        self._calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
        self._saved: weakref.WeakValueDictionary[Any, _Saved] = weakref.WeakValueDictionary()
        self._retired: deque[_Gone] = deque()
        runtime.executor.verbs |= {
            Kind.SAVE: self._save,
            Kind.RELEASE: self._release,
            Kind.LOAD: self._load,
        }

    @property
    def num_resting(self) -> int:
        return len(self._saved)

    # --- what autograd saves and takes --------------------------------------------------------

    def begin(self, unit: str) -> tuple[saved_tensors_hooks, Callable[[], None]]:
        """A call begins: hooks through which torch's checkpoint saves the call's inputs, and no
        other tensors; and what to do when all are saved."""
        self.reap()
        planned, ops = self._planned.begin(unit)
        self._executor.run(ops)
        call = self._calls[planned.index] = _Call(planned)
        hooks = saved_tensors_hooks(partial(self._pack, call), self._unpack)
        return hooks, partial(self._packed, call)

    @torch.no_grad()
    def _pack(self, call: _Call, tensor: torch.Tensor) -> _Ref | _InMemory:
        """Takes an input, if it is one to move."""
        if not self._moves(tensor):
            return _InMemory(tensor)
        storage = tensor.untyped_storage()
        where = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*where, tensor.dtype, tensor._version)
        saved = self._saved.get(key)
        if saved is None:
            home = self._tier.put(tensor)
            known = self._planned.add(call.planned, home.nbytes)
            saved = self._saved[key] = _Saved(home, known, StorageWeakRef(storage), self._retired)
            call.homes.insert(call.num_new, home)
            call.num_new += 1
        else:
            self._planned.share(call.planned, saved.known)
            call.homes.append(saved.home)
        return _Ref(call, saved)

    def _packed(self, call: _Call) -> None:
        self._executor.run(self._planned.save(call.planned))

    @torch.no_grad()
    def _unpack(self, ref: _Ref | _InMemory) -> torch.Tensor:
        """An input's values, for the recomputation of its call."""
        if isinstance(ref, _InMemory):
            return ref.values()
        call, saved = ref.call, ref.saved
        if not call.missing or not saved.known.in_memory:  # a recomputation begins
            self.reap()
            call.missing = len(call.homes)
            self._executor.run(self._planned.load(call.planned))
        call.missing -= 1
        gives_back = self._planned.take(saved.known)
        return self._tier.take(saved.home, gives_back=gives_back)

    def reap(self) -> None:
        """Releases inputs whose graphs were freed."""
        while self._retired:
            home, known = self._retired.popleft()
            self._tier.release(home)
            self._planned.forget(known)

    # --- verbs of the executor ----------------------------------------------------------------

    def _save(self, unit: Unit, op: Op) -> Ticket:
        call = self._calls[op.call]
        for home in call.homes[: call.num_new]:
            self._tier.write(home)
        return DONE

    def _load(self, unit: Unit, op: Op) -> Ticket:
        call = self._calls[op.call]
        for home in call.homes:
            self._tier.fetch(home, late=call.missing > 0)
        return DONE

    def _release(self, unit: Unit, op: Op) -> Ticket:
        call = self._calls.get(op.call)
        for home in call.homes[: call.num_new] if call is not None else ():
            self._tier.empty(home)
        return DONE

    def close(self) -> None:
        self.reap()
        self._tier.close()

    # --- inside -------------------------------------------------------------------------------

    def _moves(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.nbytes >= SMALL_BYTES
            and type(tensor) is torch.Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage()._cdata not in self._parameters
            and torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # no holes
        )
