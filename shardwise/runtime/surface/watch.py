"""Follows or refuses what users do to a sharded model's parameters directly.

A guarded parameter notices access by itself. The parameters of units that rest in full are ordinary
ones, so before a pass, a step or a copy the runtime compares them with what it laid out:

- replaced by another Parameter, frozen or unfrozen, of another dtype or shape: refused
- given other memory (``p.data = value``): the values are copied, and the old memory is restored
- written in place (``p.mul_(2)``, ``load_state_dict``): a master copy of another dtype follows

``model.to()`` and ``load_state_dict`` are checked before they begin, so that none stops halfway.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface.face import Face
from shardwise.tier.rest import use

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


class Watch:
    """Compares the parameters of one model with what was laid out."""

    def __init__(self, runtime: "Runtime") -> None:
        faces = {face.parameter: face for face in runtime.faces}
        self._places = [
            (module._parameters, name, faces[parameter])
            for module in runtime.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._resident = [
            _Resident(slot) for unit in runtime.units if not unit.travels for slot in unit.slots
        ]
        for module in runtime.model.modules():
            _refuse_casts(runtime, module)
            _watch_loading(runtime, module, faces)

    def look(self) -> None:
        """Follows or refuses changes since the last look; they must be the same on all ranks."""
        for parameters, name, face in self._places:
            if parameters.get(name) is not face.parameter:
                raise UsageError(
                    f"Parameter '{face.name}' was replaced after shardwise.shard; write into it "
                    "instead (p.copy_(value), load_state_dict), or shardwise.unshard(model) first."
                )
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for resident in self._resident:
                resident.look()


class _Resident:
    """A parameter of a unit that rests in full."""

    def __init__(self, slot: ParamSlot) -> None:
        self._slot = slot
        self._home = slot.flat.params.view(slot.spec)
        self._version = slot.parameter._version

    def look(self) -> None:
        slot, parameter = self._slot, self._slot.parameter
        if parameter.requires_grad != slot.spec.param.requires_grad:
            raise UsageError(
                f"requires_grad of '{slot.name}' changed while it is sharded; freeze or unfreeze "
                "before shardwise.shard, or shardwise.unshard(model) first."
            )
        if parameter.data_ptr() != self._home.data_ptr() or parameter.dtype != self._home.dtype:
            self._bring_home()
        elif parameter._version != self._version:
            self._follow()
        self._version = parameter._version

    def _bring_home(self) -> None:
        slot, parameter = self._slot, self._slot.parameter
        value = parameter.data
        if (value.shape, value.dtype) != (self._home.shape, self._home.dtype):
            raise UsageError(
                f"Parameter '{slot.name}' is sharded as {self._home.dtype} of shape "
                f"{tuple(self._home.shape)} and became {value.dtype} of shape "
                f"{tuple(value.shape)}; do that before shardwise.shard."
            )
        slot.runtime.write(slot, value)
        parameter.data = self._home

    def _follow(self) -> None:
        """A master of another dtype takes the changed elements; the others keep their precision."""
        flat = self._slot.flat
        if flat.params.master is None or not flat.has_master or not self._slot.segment.numel:
            return
        start = self._slot.spec.interval.start
        value = self._home.reshape(-1)[self._slot.segment.relative_to(start)]
        with use(flat.params.master, writes=True) as whole:
            master = self._slot.of(whole, flat.optim_at)
            assert master is not None
            value = value.to(master.device)  # the master may rest beside the device
            changed = master.to(value.dtype) != value
            master.copy_(torch.where(changed, value.to(master.dtype), master))


def _refuse_casts(runtime: "Runtime", module: nn.Module) -> None:
    """Refuses ``.to()``, ``.half()`` and the like, which all go through ``_apply``."""
    apply: Callable[..., nn.Module] = module._apply

    def checked(fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        kinds = {(p.dtype, p.device): p for p in module.parameters()}
        for (dtype, device), parameter in kinds.items():
            probe = torch.empty(1, dtype=dtype, device=device)
            if fn(probe) is not probe:
                name = next(n for n, p in module.named_parameters() if p is parameter)
                raise UsageError(
                    f"{type(module).__name__} (parameter '{name}', {dtype} on {device}) is sharded "
                    "and cannot be moved or cast: do that before shardwise.shard, or set the "
                    "plan's precision."
                )
        return apply(fn, *args, **kwargs)

    module._apply = checked  # type: ignore[method-assign]
    runtime.removers.append(lambda: module.__dict__.pop("_apply", None))


def _watch_loading(runtime: "Runtime", module: nn.Module, faces: dict[nn.Parameter, Face]) -> None:
    """Master weights take loaded values before these are rounded to P's dtype."""

    def before(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would replace sharded parameters; load without "
                "assign, which copies into every rank's shards."
            )
        for name, parameter in module._parameters.items():
            face, value = faces.get(parameter), state.get(prefix + name)  # type: ignore[arg-type]
            if face is not None and isinstance(value, torch.Tensor):
                _load(face.slots[0], value)

    handle = module.register_load_state_dict_pre_hook(before)
    runtime.removers.append(handle.remove)


def _load(slot: ParamSlot, value: torch.Tensor) -> None:
    resident = not slot.unit.travels
    separate = slot.flat.params.master is not None and slot.flat.has_master
    if resident and separate and value.shape == slot.parameter.shape:
        slot.runtime.write(slot, value)
