"""What forward leaves for backward: all of it, or only what units start from, perhaps on a tier.

[Note: Recomputation]
Under every setting but ``keep``, the outermost call of a unit other than the root runs under
torch's checkpoint: autograd saves the call's inputs only, and the first gradient that needs more
runs the forward again. By then the gradient has reached the call's outputs, so that ``hooks.py``
has the unit gathered. Recomputation repeats what forward did, and nothing else:

- dropout: torch restores the generators' states
- arguments that forward changes (a cache of keys, a list that it appends to): forward gets the
  caller's objects, recomputation gets copies of what they were before
- buffers that forward changes (running statistics): recomputation starts from what forward
  started from, and leaves no trace
- not repeated faithfully: other attributes of modules, and an input that is written in place
  after it was saved (torch's error says so, or, where it rests on a tier, the old values serve)

A call inside a checkpoint of the model's own is recomputed by that one, so ours stays away. Under
torch.compile the forwards of units run eagerly, as torch's checkpoint recomputes eagerly.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.errors import UsageError
from shardwise.runtime.activations.offload import Moved, Offload, OnDisk, OnHost
from shardwise.runtime.forward import in_autograd
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import guard
from shardwise.runtime.tensors import tensors_in
from shardwise.tier.pool import Pool
from shardwise.tier.store import Store


def install(runtime: Runtime, store: Store | None, pool: Pool | None = None) -> "Activations":
    """Makes a model's activations follow its plan; once, after ``hooks.install``.

    ``store`` is where activations="nvme" rests them; ``pool`` has host memory (pinned on CUDA) for
    buffers; None: one without a budget. The result, also at ``runtime.activations``, has counters
    for people in ``moved``.
    """
    setting = runtime.plan.activations
    if setting == "nvme" and store is None:
        raise UsageError(
            "activations = 'nvme' in the plan needs a store on disk, and there is none: set "
            "tiers.path to a folder."
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
    """A unit's forward that saves its inputs only; hides the module's own.

    See [Note: Recomputation]. Neither it nor its module can be copied: a copy would run the
    original.
    """

    def __init__(self, unit: str, module: nn.Module, activations: "Activations") -> None:
        self._unit, self._module, self._activations = unit, module, activations
        self._hidden = module.__dict__.get("forward")  # of somebody else who hides the class's
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
        self._removed = True  # should somebody have hidden this one and still call it
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
        first = [(args, kwargs)]  # taken out by forward: a graph must not hold what it made

        def call(*tensors: torch.Tensor) -> Any:
            if first:
                args, kwargs = first.pop()
                return forward(*args, **kwargs)
            again, keywords = inputs.again(tensors)
            with buffers.replaced(started_from):
                return forward(*again, **keywords)

        with activations.outermost():
            result = checkpoint(call, *inputs.tensors(), use_reentrant=False)
        buffers.learn(started_from)
        return result


class _Inputs:
    """A call's arguments without their tensors, which autograd saves: ``again`` puts those back."""

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
        """What autograd is to save; forgotten here."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def again(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], dict[str, Any]]:
        memo: dict[int, Any] = {id(value): value for value in self._as_it_is}
        memo |= {id(place): tensor for place, tensor in zip(self._places, tensors, strict=True)}
        return copy.deepcopy(self._args, memo), copy.deepcopy(self._kwargs, memo)

    def _copied(self, value: Any, memo: dict[int, Any]) -> Any:
        if not isinstance(value, nn.Module):
            try:
                return copy.deepcopy(value, memo)
            except Exception:  # a handle, a generator: it has no second copy
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
    """The buffers that a unit's forward changes, learned from its first call in a mode."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._known: dict[tuple[bool, ...], list[tuple[nn.Module, str]]] = {}

    def copies(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        names = self._known.get(self._mode())
        if names is None:
            names = [(m, n) for m in self._modules for n, b in m._buffers.items() if b is not None]
        return {(m, n): _copy(b) for m, n in names if (b := m._buffers.get(n)) is not None}

    def learn(self, before: dict[tuple[nn.Module, str], torch.Tensor]) -> None:
        """Forgets the copies of buffers that the first call left as they were."""
        if self._mode() not in self._known:
            for (module, name), value in list(before.items()):
                now = module._buffers.get(name)
                if now is not None and torch.equal(now, value):
                    del before[module, name]
            self._known[self._mode()] = list(before)

    @contextlib.contextmanager
    def replaced(self, values: dict[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
        """Inside, buffers are copies of ``values``."""
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
    """Whether forward runs inside a torch checkpoint, whose hooks then are the innermost ones."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__qualname__", "").startswith("_checkpoint_hook")


class Activations:
    """The activations of one sharded model."""

    def __init__(self, runtime: Runtime, store: Store | None, pool: Pool | None) -> None:
        device, setting = runtime.grid.device, runtime.plan.activations
        self.moved = Moved()
        """Counters for people."""
        self._setting = setting
        self._inside = self._warned = False
        self._offload: Offload | None = None
        pool = pool or Pool(torch.device("cpu"), pinned=device.type == "cuda")
        if store is not None:
            self._offload = Offload(OnDisk(store, pool, device, self.moved), runtime)
        elif setting == "cpu" and device.type == "cuda":  # otherwise there is one memory only
            self._offload = Offload(OnHost(pool, device, self.moved), runtime)

    @property
    def num_resting(self) -> int:
        """Inputs that rest on a tier now; none between steps."""
        self.reap()
        return self._offload.num_resting if self._offload else 0

    def begin_call(self, unit: str) -> bool:
        """Whether a call of a unit is one to recompute."""
        if self._inside or not torch.is_grad_enabled() or in_autograd():
            return False
        if _in_checkpoint():
            self.moved.recomputed_by_model += 1
            self._warn(unit)
            return False
        return True

    @contextlib.contextmanager
    def outermost(self) -> Iterator[None]:
        """Around the checkpoint of one call."""
        self._inside = True
        try:
            with self._offload.hooks() if self._offload else contextlib.nullcontext():
                yield
        finally:
            self._inside = False

    def reap(self) -> None:
        """Takes back room and memory of inputs whose graphs are gone."""
        if self._offload:
            self._offload.reap()

    def close(self) -> None:
        """Gives the store's room back."""
        if self._offload:
            self._offload.close()

    def _warn(self, unit: str) -> None:
        if self._offload and not self._warned:
            self._warned = True
            warnings.warn(
                f"Unit '{unit}' is called inside a checkpoint of the model's own, which keeps its "
                f"inputs in memory instead of on {self._setting}; turn it off "
                "(gradient_checkpointing_disable() in transformers).",
                stacklevel=2,
            )
