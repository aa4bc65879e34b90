"""Activations between forward and backward: all kept, or recomputed from the inputs of units.

[Note: Recomputation]
Under every setting but ``keep``, the outermost call of a unit other than the root runs under
torch's checkpoint: autograd saves only the call's inputs, and the first gradient that needs more
runs the forward again. By then the gradient has reached the call's outputs, so ``hooks.py`` has had
the unit gathered. Recomputation repeats exactly what forward did:

- dropout: torch restores the states of the random generators
- arguments that forward changes (a key cache, a list that it appends to): forward gets the caller's
  objects, recomputation gets copies made before forward
- buffers that forward changes (running statistics): recomputation starts from the same values as
  forward, and its changes are discarded
- not repeated: changes of other module attributes, and of an input that is written in place after
  it was saved (torch raises an error; if the input rests on a tier, the saved values are used)

A call inside the model's own checkpoint is recomputed by that checkpoint, so it gets none of ours.
Under torch.compile the forwards of units run eagerly, because torch's checkpoint does.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.errors import UsageError
from shardwise.device.abilities import separate_memory
from shardwise.runtime.activations.homes import Moved, OnDisk, OnHost
from shardwise.runtime.activations.offload import Offload
from shardwise.runtime.forward import in_autograd
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import guard
from shardwise.runtime.tensors import tensors_in
from shardwise.tier.pool import Pool
from shardwise.tier.store import Store


def install(runtime: Runtime, store: Store | None, pool: Pool | None = None) -> "Activations":
    """Makes a model's activations follow its plan; call it once, after ``hooks.install``.

    ``store`` holds the inputs under activations="nvme". ``pool`` has host memory (pinned on CUDA)
    for buffers; None: a pool without a budget. The result is also ``runtime.activations``, and its
    counters are in ``moved``.
    """
    setting = runtime.plan.activations
    if setting == "nvme" and store is None:
        raise UsageError(
            "activations = 'nvme' in the plan needs a store on disk, and there is none; set "
            "tiers.path to a folder on a fast disk."
        )
    activations = Activations(runtime, store if setting == "nvme" else None, pool)
    runtime.activations = activations
    if setting == "keep":
        return activations
    for unit in runtime.units:
        if unit is not runtime.root and not unit.is_tile:
            shadow = _Shadow(unit.name, unit.module, activations)
            runtime.removers.append(shadow.remove)
    runtime.recoveries.append(activations.reap)
    runtime.removers.append(activations.close)
    return activations


# --- recomputation --------------------------------------------------------------------------------


class _Shadow:
    """A unit's forward that saves only its inputs; see [Note: Recomputation].

    Neither it nor its module can be copied: a copy would run the original's forward.
    """

    def __init__(self, unit: str, module: nn.Module, activations: "Activations") -> None:
        self._unit, self._module, self._activations = unit, module, activations
        self._hidden = module.__dict__.get("forward")  # somebody else's forward
        self._forward = module.forward
        self._buffers = _ChangingBuffers(module)
        self._removed = False
        functools.update_wrapper(self, self._forward, updated=())  # signatures stay readable
        self._run = torch.compiler.disable(self._recomputing)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> None:
        raise guard.refuse_copy(type(self._module).__name__)

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]

    def remove(self) -> None:
        self._removed = True  # somebody may have hidden this one and still call it
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]
            if self._hidden is not None:
                self._module.__dict__["forward"] = self._hidden

    def _recomputing(self, *args: Any, **kwargs: Any) -> Any:
        forward, activations = self._forward, self._activations
        if self._removed or not activations.begin_call(self._unit):
            return forward(*args, **kwargs)
        inputs = _Inputs(args, kwargs)
        buffers = self._buffers
        started_from = buffers.copies()
        first = [(args, kwargs)]  # popped by forward: the graph must not keep these alive
        saved: list[Callable[[], None]] = []

        def call(*tensors: torch.Tensor) -> Any:
            if first:
                while saved:  # checkpoint has saved all inputs by now
                    saved.pop()()
                args, kwargs = first.pop()
                return forward(*args, **kwargs)
            again, keywords = inputs.again(tensors)
            with buffers.replaced(started_from):
                return forward(*again, **keywords)

        with activations.outermost(self._unit, saved):
            result = checkpoint(call, *inputs.tensors(), use_reentrant=False)
        buffers.learn(started_from)
        return result


class _Inputs:
    """A call's arguments without tensors. Autograd saves the tensors; ``again`` puts them back."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors: list[torch.Tensor] = [
            tensor for tensor in _plain_tensors((args, kwargs)) if not _is_parameter(tensor)
        ]
        self._places = [_Place() for _ in self._tensors]
        self._as_it_is: list[object] = []
        memo = dict(zip(map(id, self._tensors), self._places, strict=True))
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in memo:
                self._keep(tensor, memo)
        self._args = [self._copied(value, memo) for value in args]
        self._kwargs = {name: self._copied(value, memo) for name, value in kwargs.items()}

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that autograd is to save; they are not kept here."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def again(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], dict[str, Any]]:
        """Copies of the arguments for recomputation, with these tensors in their places."""
        memo: dict[int, Any] = {id(value): value for value in self._as_it_is}
        memo |= {id(place): tensor for place, tensor in zip(self._places, tensors, strict=True)}
        return copy.deepcopy(self._args, memo), copy.deepcopy(self._kwargs, memo)

    def _copied(self, value: Any, memo: dict[int, Any]) -> Any:
        if not isinstance(value, nn.Module):
            try:
                return copy.deepcopy(value, memo)
            except Exception:  # a handle or a generator cannot be copied
                pass
        return self._keep(value, memo)

    def _keep(self, value: Any, memo: dict[int, Any]) -> Any:
        memo[id(value)] = value
        self._as_it_is.append(value)
        return value


class _Place:
    """Stands for a tensor in copies of arguments."""

    __slots__ = ()


class _ChangingBuffers:
    """The buffers that a unit's forward changes; learned per training mode from a first call."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._known: dict[tuple[bool, ...], list[tuple[nn.Module, str]]] = {}

    def copies(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """Copies of the buffers that forward may change."""
        names = self._known.get(self._mode())
        if names is None:
            names = [(m, n) for m in self._modules for n, b in m._buffers.items() if b is not None]
        return {(m, n): _copy(b) for m, n in names if (b := m._buffers.get(n)) is not None}

    def learn(self, before: dict[tuple[nn.Module, str], torch.Tensor]) -> None:
        """Forgets the copies of buffers that the first call did not change."""
        if self._mode() not in self._known:
            for (module, name), value in list(before.items()):
                now = module._buffers.get(name)
                if now is not None and torch.equal(now, value):
                    del before[module, name]
            self._known[self._mode()] = list(before)

    @contextlib.contextmanager
    def replaced(self, values: dict[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
        """Replaces buffers by copies of ``values`` inside the context."""
        now = {(module, name): module._buffers.get(name) for module, name in values}
        for (module, name), value in values.items():
            module._buffers[name] = _copy(value)
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _plain_tensors(value: object) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, each once."""
    found: dict[int, torch.Tensor] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found[id(item)] = item
        elif isinstance(item, (tuple, list)):
            pending += reversed(item)
        elif isinstance(item, Mapping):
            pending += reversed(list(item.values()))
    return list(found.values())


def _in_checkpoint() -> bool:
    """Whether forward runs inside a torch checkpoint, whose hooks are then the innermost."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__qualname__", "").startswith("_checkpoint_hook")


class Activations:
    """The activations of one sharded model."""

    def __init__(self, runtime: Runtime, store: Store | None, pool: Pool | None) -> None:
        device, setting = runtime.grid.device, runtime.plan.activations
        self.moved = Moved()
        """Counters for users."""
        self._setting = setting
        self._inside = self._warned = False
        self._offload: Offload | None = None
        pool = pool or Pool(torch.device("cpu"), beside=device)
        if store is not None:
            self._offload = Offload(OnDisk(store, pool, device, self.moved), runtime)
        elif setting == "cpu" and separate_memory(device):
            self._offload = Offload(OnHost(pool, device, self.moved), runtime)

    @property
    def num_resting(self) -> int:
        """The number of inputs on a tier now; zero between steps."""
        self.reap()
        return self._offload.num_resting if self._offload else 0

    def begin_call(self, unit: str) -> bool:
        """Whether to recompute this call of a unit."""
        if self._inside or not torch.is_grad_enabled() or in_autograd():
            return False
        if _in_checkpoint():
            self.moved.recomputed_by_model += 1
            self._warn(unit)
            return False
        return True

    @contextlib.contextmanager
    def outermost(self, unit: str, saved: list[Callable[[], None]]) -> Iterator[None]:
        """Context of the checkpoint of one call of a unit; adds to ``saved`` what is to be done
        when the call's inputs are saved."""
        self._inside = True
        try:
            with contextlib.ExitStack() as stack:
                if self._offload:
                    hooks, when_saved = self._offload.begin(unit)
                    stack.enter_context(hooks)
                    saved.append(when_saved)
                yield
        finally:
            self._inside = False

    def reap(self) -> None:
        """Frees the space and memory of inputs whose graphs were freed."""
        if self._offload:
            self._offload.reap()

    def close(self) -> None:
        """Frees the inputs' space in the store."""
        if self._offload:
            self._offload.close()

    def _warn(self, unit: str) -> None:
        if self._offload and not self._warned:
            self._warned = True
            warnings.warn(
                f"Unit '{unit}' is called inside the model's own checkpoint, which keeps its "
                f"inputs in memory instead of on tier {self._setting}; turn that off "
                "(gradient_checkpointing_disable() in transformers).",
                stacklevel=2,
            )
