"""Moments of modules and autograd, turned into the runtime's verbs, and nothing else."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.runtime.flat import ParamSlot
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import Unit


class Call:
    """One forward call of a unit's module, as its backward sees it."""

    def __init__(self, runtime: Runtime, unit: Unit) -> None:
        self._runtime, self._unit = runtime, unit
        self.leaves_by_inputs = False
        """Whether gradients leave through its inputs, which then says that it is over."""

    def watch_inputs(self, inputs: object) -> None:
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                handle = tensor.register_hook(self._inputs_reached)
                self.leaves_by_inputs = True
                if tensor.is_leaf:  # lives on after this graph: leave no hooks behind
                    self._remove_after(handle)

    def watch_outputs(self, outputs: object) -> None:
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._outputs_reached)

    def _outputs_reached(self, grad: torch.Tensor) -> None:
        self._runtime.before_backward(self._unit, self)

    def _inputs_reached(self, grad: torch.Tensor) -> None:
        self._runtime.after_backward(self._unit, self)
        for handle in self.__dict__.pop("handles", ()):
            handle.remove()

    def _remove_after(self, handle: RemovableHandle) -> None:
        self.__dict__.setdefault("handles", []).append(handle)


def install(runtime: Runtime) -> None:
    """Installs every hook; ``runtime.removers`` undo it."""
    for unit in runtime.units:
        _install_unit(runtime, unit)
        for slot in unit.slots:
            if slot.spec.param.requires_grad:
                _install_slot(runtime, slot)
    for module in _lone_modules(runtime):
        _install_lone(runtime, module)


def _install_unit(runtime: Runtime, unit: Unit) -> None:
    calls: list[Call] = []

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        runtime.before_forward(unit)
        if unit.encloses:
            args, kwargs = _cast_inputs(runtime, (args, kwargs))
        if torch.is_grad_enabled():
            call = Call(runtime, unit)
            if not unit.external:
                call.watch_inputs((args, kwargs))
            calls.append(call)
        return (args, kwargs) if unit.encloses else None

    def post(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and calls:
            calls.pop().watch_outputs(output)
        runtime.after_forward(unit)

    _hook_forward(runtime, unit.module, pre, post)


def _install_slot(runtime: Runtime, slot: ParamSlot) -> None:
    def before(grad: torch.Tensor) -> None:
        runtime.begin_backward()

    def after(parameter: torch.Tensor) -> None:
        runtime.backward.arrive(slot)

    runtime.removers.append(slot.parameter.register_hook(before).remove)
    runtime.removers.append(slot.parameter.register_post_accumulate_grad_hook(after).remove)


def _install_lone(runtime: Runtime, module: nn.Module) -> None:
    """A module with parameters of the root unit, in case it is called without the model."""

    def pre(module: nn.Module, args: Any, kwargs: Any) -> None:
        runtime.before_lone_forward()

    def post(module: nn.Module, args: Any, output: Any) -> None:
        runtime.after_lone_forward()

    _hook_forward(runtime, module, pre, post)


def _hook_forward(
    runtime: Runtime, module: nn.Module, pre: Callable[..., Any], post: Callable[..., Any]
) -> None:
    disable = torch.compiler.disable
    handles = (
        module.register_forward_pre_hook(disable(pre), with_kwargs=True),
        # Also after an exception: a pass that failed must not look as if it were still running.
        module.register_forward_hook(disable(post), always_call=True),
    )
    runtime.removers += [handle.remove for handle in handles]


def _lone_modules(runtime: Runtime) -> list[nn.Module]:
    if not runtime.root.travels:
        return []
    owned = {slot.parameter for slot in runtime.root.slots}
    return [
        module
        for module in runtime.model.modules()
        if module is not runtime.model
        and any(p in owned for p in module._parameters.values() if p is not None)
    ]


def _cast_inputs(runtime: Runtime, inputs: Any) -> Any:
    """Floating point inputs take the compute dtype where the plan names one."""
    name = runtime.plan.precision.compute
    if name is None:
        return inputs
    dtype = getattr(torch, name)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return torch.utils._pytree.tree_map(cast, inputs)


def tensors_in(value: object, depth: int = 4) -> Iterator[torch.Tensor]:
    """All tensors in nested containers, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float, nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():
            yield from tensors_in(item, depth - 1)
