"""Taking over the user's optimizer: the same object, stepping on the parts that this rank owns.

The optimizer keeps its class, its groups and its hyper-parameters, and its groups go on listing
the model's parameters. Only while ``step`` runs are they replaced by this rank's parts of the
master weights; between steps the state of a parameter is the state of its part. Because that is
done by torch's own step hooks, schedulers and wrappers built before or after keep working.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.plan.schedule import Kind, Op, Phase, Trigger
from shardwise.runtime import grads
from shardwise.runtime.flat import ParamSlot
from shardwise.runtime.runtime import Runtime

_ELEMENTWISE = "SGD Adam AdamW NAdam RAdam RMSprop Rprop Adagrad Adadelta Adamax ASGD".split()
_REFUSED = {
    "Adafactor": "it factors second moments over the rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "it needs inner products over all parameters and evaluates the loss itself",
    "SparseAdam": "it needs sparse gradients of whole matrices",
}
_NOTE = "shardwise"


def check_elementwise(optimizer: Optimizer, assume: bool) -> None:
    """Refuses optimizers whose update of an element depends on other elements."""
    for base in type(optimizer).__mro__:
        if reason := _REFUSED.get(base.__name__):
            raise UsageError(
                f"{type(optimizer).__name__} cannot run on parts of parameters: {reason}; use an "
                f"element-wise optimizer ({', '.join(_ELEMENTWISE)})."
            )
        if base.__name__ in _ELEMENTWISE and base.__module__.startswith("torch.optim"):
            break
    else:
        if not assume:
            raise UsageError(
                f"shardwise does not know whether {type(optimizer).__name__} updates every element "
                "on its own; if it does, pass elementwise=True to shardwise.shard."
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError("A differentiable optimizer cannot be sharded; build it without that.")


class OptimizerTakeover:
    """One user optimizer on one sharded model."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer) -> None:
        self._runtime, self._optimizer = runtime, optimizer
        self._slots = {slot.parameter: slot for slot in runtime.slots}
        self._parts: dict[ParamSlot, nn.Parameter] = {}
        self._swapped: list[tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]] = []
        self._check_groups(optimizer.param_groups)
        for unit in runtime.units:
            for flat in unit.trained:
                if flat.master is None:
                    flat.make_master()
        for slot in runtime.trained_slots:
            if (part := slot.master_part()) is not None:
                self._parts[slot] = nn.Parameter(part)
        self._cut_state()
        self._install()

    # --- step ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        args, kwargs = _run_closure(args, kwargs)
        runtime = self._runtime
        runtime.require_idle("optimizer.step()")
        if runtime.accumulated:
            raise UsageError(
                "optimizer.step() after a backward under no_sync: run the last micro-batch of a "
                "step outside shardwise.no_sync, so that gradients are reduced."
            )
        if runtime.opened:
            raise UsageError("optimizer.step() cannot run inside shardwise.full_params.")
        self._check_groups(optimizer.param_groups)
        runtime.release_all()
        grads.read(runtime.trained_slots)
        self._swap_in()
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._swap_out()
        runtime = self._runtime
        for unit in runtime.units:
            if unit.trained:
                unit_refresh = unit.op(Phase.ONLY, Trigger.STEP, Kind.REFRESH)
                runtime.emit(Op(Kind.STEP, unit.name))
                unit.refresh(unit_refresh)
                runtime.emit(unit_refresh)

    def _swap_in(self) -> None:
        """Groups list parts, and states belong to parts."""
        optimizer = self._optimizer
        state: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, value in optimizer.state.items():
            slot = self._slots.get(parameter) if isinstance(parameter, nn.Parameter) else None
            part = self._parts.get(slot) if slot is not None else None
            state[parameter if slot is None else part] = value
        state.pop(None, None)
        for group in optimizer.param_groups:
            parts: list[torch.Tensor] = []
            for parameter in group["params"]:
                slot = self._slots.get(parameter)
                if slot is None:
                    parts.append(parameter)
                elif (part := self._parts.get(slot)) is not None:
                    part.grad = slot.grad_part() if slot.has_grad else None
                    parts.append(part)
            changed = _fused_options(optimizer, group, parts)
            self._swapped.append((group, group["params"], {k: group[k] for k in changed}))
            group.update(changed)
            group["params"] = parts
        optimizer.state = state

    def _swap_out(self) -> None:
        optimizer = self._optimizer
        for group, parameters, options in self._swapped:
            group["params"] = parameters
            group.update(options)
        self._swapped.clear()
        owners = {part: slot.parameter for slot, part in self._parts.items()}
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in optimizer.state.items():
            state[owners.get(key, key)] = value
        for part in self._parts.values():
            part.grad = None
        optimizer.state = state

    # --- state --------------------------------------------------------------------------------

    def _cut_state(self) -> None:
        """States that exist already (Adagrad's, or of earlier steps) become states of parts."""
        for parameter, state in list(self._optimizer.state.items()):
            if slot := self._slots.get(parameter):
                if slot in self._parts:
                    self._optimizer.state[parameter] = self._cut(slot, state)
                else:
                    del self._optimizer.state[parameter]

    def _cut(self, slot: ParamSlot, state: dict[str, Any]) -> dict[str, Any]:
        part = self._parts[slot]
        shape = slot.spec.param.shape
        own = slot.segment.relative_to(slot.spec.interval.start)

        def cut(key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_meta:
                raise UsageError(
                    f"The optimizer made its state '{key}' before the deferred model had memory; "
                    "build this optimizer after shardwise.shard and shard again with it, or build "
                    "the model without deferred_init."
                )
            dtype = part.dtype if value.is_floating_point() and value.dim() else value.dtype
            if tuple(value.shape) == shape and value.dim():
                return value.detach().reshape(-1)[own].to(dtype).clone()
            if value.dim() == 0 or value.numel() == part.numel():
                return value.detach().clone()
            raise UsageError(
                f"State '{key}' of '{slot.name}' has shape {tuple(value.shape)}, which is neither "
                f"the parameter's {shape} nor this rank's part ({part.numel()} elements)."
            )

        return {key: cut(key, value) for key, value in state.items()}

    def _layout_digest(self) -> str:
        text = "|".join(
            f"{slot.name}:{slot.segment.start}-{slot.segment.stop}" for slot in self._slots.values()
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _note_layout(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[_NOTE] = {"layout": self._layout_digest(), "rank": self._runtime.grid.place.rank}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        note = state_dict.get(_NOTE)
        if note is not None and note["layout"] != self._layout_digest():
            raise UsageError(
                f"This optimizer state was taken on rank {note['rank']} under another layout; "
                "states of parts load only under the plan and on the rank they come from."
            )
        # Kept aside: torch casts states to the parameter's dtype, which may be narrower.
        self._loading = state_dict["state"]

    def _after_load(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, state in self._loading.items():
            slot = self._slots.get(parameters[index])
            if slot is not None:
                if slot in self._parts:
                    optimizer.state[parameters[index]] = self._cut(slot, state)
                else:
                    optimizer.state.pop(parameters[index], None)
        self._loading = {}

    # --- installation -------------------------------------------------------------------------

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            for parameter in group["params"]:
                slot = self._slots.get(parameter)
                if slot is None and getattr(parameter, "is_meta", False):
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
        add_group = optimizer.add_param_group

        def add_param_group(group: dict[str, Any]) -> None:
            params = group["params"]
            for parameter in [params] if isinstance(params, torch.Tensor) else list(params):
                slot = self._slots.get(parameter)
                if slot is not None and not slot.spec.param.requires_grad:
                    raise UsageError(
                        f"'{slot.name}' was frozen when the model was sharded and has no gradient "
                        "memory; shardwise.unshard(model), unfreeze it and shard again."
                    )
            add_group(group)

        optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
        removers.append(lambda: optimizer.__dict__.pop("add_param_group", None))


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


def _fused_options(
    optimizer: Optimizer, group: dict[str, Any], parts: list[torch.Tensor]
) -> dict[str, Any]:
    """torch's fused kernel where it has one and the user did not choose."""
    chosen = group.get("foreach") is not None or group.get("fused") is not None
    if "fused" not in group or chosen or group.get("capturable"):
        return {}
    same_kind = len({(p.device.type, p.is_floating_point()) for p in parts}) <= 1
    if not (same_kind and all(p.is_floating_point() for p in parts)):
        return {}
    return {"fused": True}
