"""Hooks on modules and autograd that call the moments of forward and backward."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.model.projection import Unread, read
from shardwise.model.tiling import Tile
from shardwise.runtime.module_hooks import disable_autocast_cache, hook_forward
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import grads
from shardwise.runtime.tensors import tensors_in
from shardwise.runtime.unit import Unit


class Call:
    """One forward call of a unit's module, as its backward sees it."""

    def __init__(self, runtime: Runtime, unit: Unit) -> None:
        self._runtime, self._unit = runtime, unit
        self.leaves_by_inputs = False
        """Whether gradients leave through its inputs: then that ends the call's backward."""
        self._missing = 0
        self._inputs: dict[int, object] = {}
        """While the forward runs: the autograd nodes of its inputs, by the id of the tensor."""
        self._handles: list[RemovableHandle] = []

    def watch_inputs(self, inputs: object) -> None:
        """The call's backward is over when autograd reaches an input that is not a leaf.

        Autograd reaches a leaf (a parameter of another unit, an input of a recomputed call) as soon
        as that leaf's gradient is complete, so if all inputs are leaves, all must be reached.
        """
        watched = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        computed = [tensor for tensor in watched.values() if not tensor.is_leaf]
        self.leaves_by_inputs = bool(watched)
        self._missing = 1 if computed else len(watched)
        self._inputs = {key: tensor.grad_fn for key, tensor in watched.items()}
        for tensor in computed or watched.values():
            handle = tensor.register_hook(self._input_reached)
            if tensor.is_leaf:  # it outlives this graph: leave no hooks behind
                self._handles.append(handle)

    def watch_outputs(self, outputs: object) -> None:
        """The call's backward begins at its outputs, except inputs that it only passed through.

        T5 passes one position bias from block to block; its gradient comes after all blocks.
        """
        for tensor in tensors_in(outputs):
            if isinstance(tensor, Unread):
                continue  # its tiles have hooks of their own
            node = tensor.grad_fn if tensor.requires_grad else None
            if node is not None and self._inputs.get(id(tensor)) is not node:
                tensor.register_hook(self._outputs_reached)
        self._inputs.clear()

    def _outputs_reached(self, grad: torch.Tensor) -> None:
        self._runtime.backward.before(self._unit, self)

    def _input_reached(self, grad: torch.Tensor) -> None:
        self._missing -= 1
        if self._missing > 0:
            return
        if self._handles:  # leaves: no more uses follow, but gradients of the unit may
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self.leaves_by_inputs = False
            if not self._runtime.forward.uses.has_all_grads(self._unit):
                return
        self._runtime.backward.after(self._unit, self)


def install(runtime: Runtime) -> None:
    """Installs every hook; ``runtime.removers`` undo it."""
    for unit in runtime.units:
        _install_unit(runtime, unit)
        for slot in unit.slots:
            if slot.is_trained:
                install = _install_tile if unit.is_tile else _install_slot
                install(runtime, slot)
        if unit.travels:
            disable_autocast_cache(runtime, unit.module)
    for module in _lone_modules(runtime):
        _install_lone(runtime, module)
        disable_autocast_cache(runtime, module)


def _install_unit(runtime: Runtime, unit: Unit) -> None:
    calls: list[Call | None] = []
    """One per running forward of the module; None for a forward without a backward."""

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit.encloses:
            runtime.notice_interruption(running=1)
        runtime.admit(unit)  # raises if the call cannot begin
        calls.append(None)
        # An input of a unit goes to no loss, so unread logits are computed before the forward.
        # Only at the top level: forward may change the caller's containers in place.
        args = tuple(read(value) for value in args)
        kwargs = {name: read(value) for name, value in kwargs.items()}
        runtime.forward.before(unit)
        if unit.encloses:
            args, kwargs = _cast_inputs(runtime, (args, kwargs))
        if torch.is_grad_enabled():
            call = Call(runtime, unit)
            if not runtime.issuer.units[unit.index].external:
                call.watch_inputs((args, kwargs))
            calls[-1] = call
        return args, kwargs

    def post(module: nn.Module, args: Any, output: Any) -> None:
        if not calls:
            return  # it was not admitted, or another hook raised before ours
        if (call := calls.pop()) is not None:
            call.watch_outputs(output)
        runtime.forward.after(unit)

    hook_forward(runtime, unit.module, pre, post)
    runtime.forgets.append(calls.clear)


def _install_slot(runtime: Runtime, slot: ParamSlot) -> None:
    # A weak reference: Python cannot collect a cycle through autograd's nodes.
    watched = weakref.ref(slot)

    def before(grad: torch.Tensor) -> None:
        if (slot := watched()) is not None:
            backward = slot.runtime.backward
            if not backward.active or torch.is_grad_enabled():
                backward.begin()
            grads.make_room(slot)

    def after(*_: object) -> None:
        if (slot := watched()) is not None:
            slot.runtime.backward.arrive(slot, slot.parameter.grad)

    # On the accumulation node and not on the parameter: so it runs after all hooks of the user,
    # whenever those were registered, and they see the local gradient.
    with torch._C.DisableTorchFunctionSubclass():
        accumulate = torch.autograd.graph.get_gradient_edge(slot.parameter).node
    slot.accumulate = accumulate  # keeps the node alive, and so its hooks
    runtime.removers.append(accumulate.register_hook(after).remove)
    runtime.removers.append(slot.parameter.register_hook(before).remove)


def _install_tile(runtime: Runtime, slot: ParamSlot) -> None:
    tile, watched = slot.unit.module, weakref.ref(slot)
    assert isinstance(tile, Tile)

    def deliver(grad: torch.Tensor) -> None:
        if (slot := watched()) is not None:
            slot.runtime.backward.begin()
            slot.runtime.backward.arrive(slot, grad)

    tile.deliver = deliver


def _install_lone(runtime: Runtime, module: nn.Module) -> None:
    """Hooks a module with root parameters, in case it is called without the model."""

    def pre(module: nn.Module, args: Any, kwargs: Any) -> None:
        runtime.forward.before_lone()

    def post(module: nn.Module, args: Any, output: Any) -> None:
        runtime.forward.after_lone()

    hook_forward(runtime, module, pre, post)


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
    """Casts floating-point inputs to the plan's compute dtype, if it names one."""
    name = runtime.plan.precision.compute
    if name is None:
        return inputs
    dtype = getattr(torch, name)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return torch.utils._pytree.tree_map(cast, inputs)
