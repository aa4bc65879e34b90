"""Taking over the user's optimizer: the same object, stepping on the parts that this rank owns.

The optimizer keeps its class, its groups and its hyper-parameters, and its groups go on listing
the model's parameters. Only while ``step`` runs are they replaced by this rank's parts of the
master weights; between steps the state of a parameter is the state of its part. Because that is
done by torch's own step hooks, schedulers and wrappers built before or after keep working.

An optimizer that was built after ``shard`` is taken over when it first steps.
"""

import functools
import hashlib
import inspect
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Set
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.core.errors import UsageError
from shardwise.core.ticket import Ticket
from shardwise.plans.schedule import Kind, Phase, Trigger
from shardwise.runtime.flat import ParamSlot
from shardwise.runtime.optimizer.windows import WindowedUpdate
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import grads
from shardwise.runtime.surface.face import (
    TILES,
    State,
    show_state,
    shown_state,
    tile_state,
    whole_state,
)
from shardwise.runtime.unit import Unit
from shardwise.tier.memory import trim_heap
from shardwise.tier.rest import PartOf, Resident

_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop",
    "Rprop", "Adagrad", "Adadelta", "Adamax", "ASGD",
)  # fmt: skip
_REFUSED = {
    "Adafactor": "it factors second moments over the rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "it needs inner products over all parameters and evaluates the loss itself",
    "SparseAdam": "it needs sparse gradients of whole matrices",
}
_NOTE = "shardwise"


def check_elementwise(optimizer: Optimizer, assume: bool) -> None:
    """Refuses optimizers whose update of an element depends on other elements."""
    kind = type(optimizer)
    for base in kind.__mro__:
        if reason := _REFUSED.get(base.__name__):
            raise UsageError(
                f"{kind.__name__} cannot run on parts of parameters: {reason}; use an "
                f"element-wise optimizer ({', '.join(_ELEMENTWISE)})."
            )
    if not assume and not _is_known(kind):
        raise UsageError(
            f"shardwise does not know whether {kind.__name__} updates every element on its own; "
            "if it does, pass elementwise=True to shardwise.shard."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError("A differentiable optimizer cannot be sharded; build it without that.")


def _is_known(kind: type[Optimizer]) -> bool:
    """Whether its step is that of one of torch's element-wise classes."""
    for base in kind.__mro__:
        if base.__name__ in _ELEMENTWISE and base.__module__.startswith("torch.optim"):
            # torch wraps the step of every class that is instantiated: compare what is inside.
            return inspect.unwrap(kind.step) is inspect.unwrap(base.step)
    return False


def watch(runtime: Runtime, assume_elementwise: bool) -> None:
    """Optimizers of this model's parameters that nobody passed to shard are taken over, too."""
    watched = weakref.ref(runtime)

    def before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        runtime = watched()
        if runtime is None or optimizer in runtime.optimizers:
            return
        parameters = {face.parameter for face in runtime.faces}
        if any(p in parameters for group in optimizer.param_groups for p in group["params"]):
            check_elementwise(optimizer, assume_elementwise)
            runtime.require_stepped(f"The first step of another {type(optimizer).__name__}")
            # Its own hooks come after the global ones, so they run in this very step already.
            OptimizerTakeover(runtime, optimizer)

    remove = register_optimizer_step_pre_hook(before_any_step).remove
    runtime.removers.append(remove)
    weakref.finalize(runtime, remove)


class OptimizerTakeover:
    """One user optimizer on one sharded model."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer) -> None:
        self._runtime, self._optimizer = runtime, optimizer
        self._faces = {face.parameter: face for face in runtime.faces}
        self._parts: dict[ParamSlot, nn.Parameter] = {}
        """What stands in for each trained slot during a step; empty if this rank has none of it.

        Also empty where the update goes through windows: there nothing happens in the step itself.
        """
        self._swapped: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """During a step: the groups, each with the options that were changed."""
        self._depth = 0
        """How many steps run inside each other: a subclass may call its base's, hooks and all."""
        self._stepped = False
        self._loading: dict[ParamSlot, State | None] = {}
        self._check_groups(optimizer.param_groups)
        for unit in runtime.units:
            for flat in unit.trained:
                if flat.master is None:
                    flat.make_master()
        windowed = [slot for slot in runtime.trained_slots if slot.flat.updates_in_windows]
        self._windows = WindowedUpdate(runtime, optimizer, windowed)
        for slot in runtime.trained_slots:
            self._parts[slot] = nn.Parameter(_part_of(slot))
        self._windows.reserve()
        for slot, state in self._cut_all(optimizer.state).items():
            self._set_state(slot, state)
        self._install()
        runtime.optimizers[optimizer] = weakref.ref(self)

    # --- step ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._depth:
            self._depth += 1
            return None
        args, kwargs = _run_closure(args, kwargs)
        runtime = self._runtime
        runtime.require_idle("optimizer.step()", before_step=True)
        self._windows.check_unchanged()
        if runtime.opened:
            raise UsageError("optimizer.step() cannot run inside shardwise.full_params.")
        grads.read(runtime)
        if runtime.accumulated:
            raise UsageError(
                "optimizer.step() after a backward under no_sync: run the last micro-batch of a "
                "step outside shardwise.no_sync, so that gradients are reduced."
            )
        self._check_groups(optimizer.param_groups)
        runtime.release_all()
        self._swap_in()
        self._depth = 1
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        if self._depth == 1:
            self._end_step()
        elif self._depth:
            self._depth -= 1

    def _recover(self) -> None:
        """A step that raised before it was guarded (see ``watch``) is brought to its end."""
        if self._depth:
            self._end_step(raised=True)

    def _end_step(self, *, raised: bool = False) -> None:
        self._swap_out()
        # Until windows are updated, hooks of a step inside a step are not those of a new one.
        self._depth = 1
        try:
            self._update_and_refresh(raised)
        finally:
            self._depth = 0

    def _update_and_refresh(self, raised: bool) -> None:
        if not self._stepped:
            # The states that the optimizer has just made lie between holes of the first backward;
            # what the next passes do not reuse would count as memory for ever.
            self._stepped = True
            trim_heap()
        runtime = self._runtime
        if not raised:
            self._windows.check_unchanged()  # a hook of the user's may have run since
            self._windows.begin()
        for unit in runtime.units:
            if unit.trained:
                unit_refresh = unit.op(Phase.ONLY, Trigger.STEP, Kind.REFRESH)
                early = unit in self.updated
                updated = self._windows.update(unit) if early or not raised else set()
                if not early:
                    runtime.emit(unit.update_op)
                unit.refresh(unit_refresh, updated)
                runtime.emit(unit_refresh)
        if not raised:  # otherwise what backward has updated still waits for the rest
            self._windows.end()
            runtime.stepped()

    @property
    def updated(self) -> Set[Unit]:
        """Units whose update of this step was made in backward."""
        return self._windows.updated

    def update_in_backward(self, unit: Unit, reduced: Ticket) -> Ticket:
        return self._windows.update_in_backward(unit, reduced)

    def _swap_in(self) -> None:
        """Groups list parts, and states belong to parts."""
        optimizer = self._optimizer
        for slot, part in self._parts.items():
            part.grad = _grad_of(slot, part)
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in optimizer.state.items():
            parts = self._parts_of(key)
            if len(parts) > 1:
                states = {part: tile_state(value, slot) for slot, part in parts.items()}
                state.update({part: own for part, own in states.items() if own})
            else:
                state[next(iter(parts.values()), key)] = value
        optimizer.state = state
        for group in optimizer.param_groups:
            parts = [part for p in group["params"] for part in self._parts_of(p).values() or [p]]
            states = [state.get(part, {}) for part in parts]
            changed = fused_options(group, parts, states)
            self._swapped.append((group, {key: group[key] for key in changed}))
            group.update(changed, params=parts)

    def _swap_out(self) -> None:
        owners = {part: slot for slot, part in self._parts.items()}

        def owner(part: nn.Parameter) -> nn.Parameter:
            return owners[part].face.parameter if part in owners else part

        for group, options in self._swapped:
            # One by one, so that several sharded models can share an optimizer.
            params = dict.fromkeys(owner(part) for part in group["params"])
            group.update(options, params=list(params))
        self._swapped.clear()
        stepped, self._optimizer.state = self._optimizer.state, defaultdict(dict)
        for key, value in stepped.items():
            if key in owners:
                show_state(self._optimizer, owners[key], value)
            else:
                self._optimizer.state[key] = value
        for part in owners:
            part.grad = None

    def _parts_of(self, parameter: Any) -> dict[ParamSlot, nn.Parameter]:
        """What stands in for a parameter during a step; nothing for one that is not ours."""
        face = self._faces.get(parameter)
        slots = face.slots if face is not None else ()
        return {slot: self._parts[slot] for slot in slots if slot in self._parts}

    # --- state --------------------------------------------------------------------------------

    def _cut_all(self, states: Any) -> dict[ParamSlot, State | None]:
        """This rank's share of the states of this model's parameters; None where it has none."""
        found: dict[ParamSlot, State | None] = {}
        for parameter, state in states.items():
            face = self._faces.get(parameter)
            for slot in face.slots if face is not None else ():
                has_any = slot.spec.param.requires_grad and slot.segment.numel
                own = tile_state(state, slot) or None if TILES in state else state
                found[slot] = self._cut(slot, own) if has_any and own is not None else None
        return found

    def _cut(self, slot: ParamSlot, state: State) -> State:
        """The state of a part, out of the whole parameter's or of the same part's."""
        shape, part_shape = tuple(slot.face.parameter.shape), slot.part_shape

        def cut(key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_meta:
                raise UsageError(
                    f"The optimizer made its state '{key}' before the deferred model had memory; "
                    "build it after shardwise.shard, inside shardwise.full_params(model), or build "
                    "the model without deferred_init."
                )
            value = value.detach()
            if tuple(value.shape) == shape:
                # As torch does on loading: states have their parameter's dtype, except "step".
                like_part = value.is_floating_point() and key != "step"
                dtype = slot.flat.dtypes.master if like_part else value.dtype
                return value.reshape(-1)[slot.own].reshape(part_shape).to(dtype, copy=True)
            if value.dim() == 0 or value.shape == part_shape:
                return value.clone()
            raise UsageError(
                f"State '{key}' of '{slot.name}' has shape {tuple(value.shape)}, which is neither "
                f"the parameter's {shape} nor this rank's part ({slot.segment.numel} elements)."
            )

        return {key: cut(key, value) for key, value in state.items()}

    def state_of(self, slot: ParamSlot) -> State:
        """The state of a parameter's part, wherever it rests."""
        if self._windows.covers(slot):
            return self._windows.state_of(slot)
        return shown_state(self._optimizer, slot)

    def _set_state(self, slot: ParamSlot, state: State | None) -> None:
        if self._windows.covers(slot):
            self._windows.set_state(slot, state)
        else:
            show_state(self._optimizer, slot, state)

    def _layout_digest(self) -> str:
        text = "|".join(
            f"{slot.name}:{slot.segment.start}-{slot.segment.stop}" for slot in self._runtime.slots
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _note_layout(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._runtime.require_stepped("optimizer.state_dict()")
        listed = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for index, parameter in enumerate(listed):
            slots = face.slots if (face := self._faces.get(parameter)) is not None else []
            if index in state_dict["state"] and any(self._windows.covers(slot) for slot in slots):
                # In place of tensors without values: what a state dict is for is values.
                states = [self.state_of(slot) for slot in slots]
                tiled = slots[0].face.is_tiled
                state_dict["state"][index] = whole_state(states) if tiled else states[0]
        state_dict[_NOTE] = {"layout": self._layout_digest(), "rank": self._runtime.grid.place.rank}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Cuts before anything is replaced, so that a refused state leaves the optimizer as it was.

        Also because torch then casts states to the parameter's dtype, which may be narrower.
        """
        note = state_dict.get(_NOTE)
        if note is not None and note["layout"] != self._layout_digest():
            raise UsageError(
                f"This optimizer state was taken on rank {note['rank']} under another layout; "
                "states of parts load only under the plan and on the rank they come from."
            )
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        parameters = dict(zip(saved, ours, strict=False))  # torch itself checks the numbers
        states = state_dict["state"]
        self._loading = self._cut_all({p: states[i] for i, p in parameters.items() if i in states})

    def _after_load(self, optimizer: Optimizer) -> None:
        for slot, state in self._loading.items():
            self._set_state(slot, state)
        self._loading = {}
        self._forget_updates()

    def _forget_updates(self) -> None:
        """What the last backward updated is not to be completed by a step."""
        self._windows.end()
        self._runtime.stepped()

    def _drop_states(self) -> None:
        self._forget_updates()
        for slot in self._parts:
            self._set_state(slot, None)
        self._windows.free()

    # --- installation -------------------------------------------------------------------------

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            for parameter in group["params"]:
                if parameter not in self._faces and getattr(parameter, "is_meta", False):
                    raise UsageError(
                        "The optimizer has a parameter on the meta device that is not in the "
                        "model; build the optimizer from model.parameters()."
                    )

    def _install(self) -> None:
        optimizer, removers = self._optimizer, self._runtime.removers
        handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._note_layout),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        )
        removers += [handle.remove for handle in handles]
        removers.append(self._drop_states)  # states of parts mean nothing to plain parameters
        self._runtime.recoveries.append(self._recover)
        self._wrap("step", self._guarded_step(optimizer.step))
        self._wrap("zero_grad", self._recovered(optimizer.zero_grad))
        self._wrap("add_param_group", self._checked_add(optimizer.add_param_group))

    def _guarded_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)  # schedulers leave marks on it
        def guarded(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._recover()
            try:
                return step(*args, **kwargs)
            finally:
                if self._depth:
                    # step raised, and torch runs no post hook then. Ranks that did not raise
                    # refresh now, so this one does, too.
                    self._end_step(raised=True)

        return guarded

    def _recovered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def recovered(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._recover()
            return method(*args, **kwargs)

        return recovered

    def _checked_add(self, add: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @functools.wraps(add)
        def checked(_: Optimizer, param_group: dict[str, Any]) -> None:
            params = param_group["params"]
            if not isinstance(params, torch.Tensor):
                params = list(params)  # may be a generator
            for item in [params] if isinstance(params, torch.Tensor) else params:
                parameter = item[1] if isinstance(item, tuple) else item
                face = self._faces.get(parameter)
                if face is not None and not face.slots[0].spec.param.requires_grad:
                    raise UsageError(
                        f"'{face.name}' was frozen when the model was sharded and has no gradient "
                        "memory; shardwise.unshard(model), unfreeze it and shard again."
                    )
            add({**param_group, "params": params})

        return checked

    def _wrap(self, name: str, function: Callable[..., Any]) -> None:
        """Shadows a method on this one object; undone unless somebody wrapped it once more."""
        attributes = self._optimizer.__dict__
        before = attributes.get(name)
        # A bound method: schedulers that wrap step look for its function.
        method = attributes[name] = types.MethodType(function, self._optimizer)

        def restore() -> None:
            if attributes.get(name) is method:
                del attributes[name]
                if before is not None:
                    attributes[name] = before

        self._runtime.removers.append(restore)


def _part_of(slot: ParamSlot) -> torch.Tensor:
    """This rank's elements of a parameter's master: flat, but a scalar stays one.

    So its states have the shapes that they have in a plain process, whatever they are.
    """
    flat = slot.flat
    part = None
    if not flat.updates_in_windows:
        assert isinstance(flat.master, Resident | PartOf)
        part = slot.of(flat.master.tensor, flat.optim_at)
    if part is None:
        return torch.empty(0, dtype=flat.dtypes.master, device=slot.parameter.device)
    return part.view(()) if slot.spec.param.shape == () else part


def _grad_of(slot: ParamSlot, part: nn.Parameter) -> torch.Tensor | None:
    flat = slot.flat
    if not slot.has_grad or flat.updates_in_windows or not isinstance(flat.reduced, Resident):
        return None
    grad = slot.of(flat.reduced.tensor if flat.reduced_valid else None, flat.optim_at)
    return None if grad is None else grad.view(part.shape)


def _run_closure(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Runs a closure before parameters are exchanged for parts; step then only returns its loss."""
    closure: Callable[[], Any] | None = kwargs.get("closure") or (
        args[1] if len(args) > 1 else None
    )
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    done = lambda: loss  # noqa: E731
    if kwargs.get("closure"):
        return args, {**kwargs, "closure": done}
    return (args[0], done, *args[2:]), kwargs


def fused_options(
    group: dict[str, Any], parts: list[torch.Tensor], states: list[dict[str, Any]]
) -> dict[str, Any]:
    """torch's fused kernel where it has one and the user did not choose."""
    chosen = group.get("foreach") is not None or group.get("fused") is not None
    if "fused" not in group or chosen or group.get("capturable"):
        return {}
    same_kind = len({(p.device.type, p.is_floating_point()) for p in parts}) <= 1
    if not (same_kind and all(p.is_floating_point() for p in parts)):
        return {}
    moving = [state for part, state in zip(parts, states, strict=True) if part.grad is not None]
    if len({state.get("momentum_buffer") is None for state in moving}) > 1:
        return {}  # fused SGD cannot begin some momentum buffers while it continues others
    return {"fused": True}
