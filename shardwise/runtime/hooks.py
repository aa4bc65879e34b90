"""Moments of modules and autograd, turned into the runtime's verbs, and nothing else."""

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
        """Whether gradients leave through its inputs, which then says that it is over."""
        self._missing = 0
        self._inputs: dict[int, object] = {}
        """While the forward runs: the autograd nodes of its inputs, by the tensors' ids."""
        self._handles: list[RemovableHandle] = []

    def watch_inputs(self, inputs: object) -> None:
        """The call is over when autograd comes to an input that it computed before the call.

        It comes to leaves (a parameter of another unit, a recomputed call's inputs) as soon as
        their own gradient is complete, so that all of them must be reached.
        """
        watched = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        computed = [tensor for tensor in watched.values() if not tensor.is_leaf]
        self.leaves_by_inputs = bool(watched)
        self._missing = 1 if computed else len(watched)
        self._inputs = {key: tensor.grad_fn for key, tensor in watched.items()}
        for tensor in computed or watched.values():
            handle = tensor.register_hook(self._input_reached)
            if tensor.is_leaf:  # lives on after this graph: leave no hooks behind
                self._handles.append(handle)

    def watch_outputs(self, outputs: object) -> None:
        """The call's backward begins at its outputs, but for inputs that it only passed through.

        T5 hands one position bias from block to block: its gradient comes after all of them.
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
        if self._handles:  # leaves: gradients of the unit may be still to come, but no more uses
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
    """One for every forward of the module that runs; None where there will be no backward."""

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit.encloses:
            runtime.notice_interruption(running=1)
        runtime.admit(unit)  # or not, and then this call never was one
        calls.append(None)
        # What goes into a unit is no loss: its logits are computed before the unit's own pass.
        # One by one: what forward may change must stay the caller's own object.
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
            return  # it was not admitted, or an earlier hook of somebody else raised before ours
        if (call := calls.pop()) is not None:
            call.watch_outputs(output)
        runtime.forward.after(unit)

    hook_forward(runtime, unit.module, pre, post)
    runtime.forgets.append(calls.clear)


def _install_slot(runtime: Runtime, slot: ParamSlot) -> None:
    # Weakly: Python's collector cannot follow a cycle through autograd's nodes.
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

    # On the node that accumulates rather than on the parameter: there it comes after all hooks
    # of the user, whenever they were registered, so that those see the local gradient.
    with torch._C.DisableTorchFunctionSubclass():
        accumulate = torch.autograd.graph.get_gradient_edge(slot.parameter).node
    slot.accumulate = accumulate  # its hooks live as long as somebody holds it
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
    """A module with parameters of the root unit, in case it is called without the model."""

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
