"""While an optimizer steps, its groups list this rank's shards instead of the parameters."""

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.runtime.optimizer.kinds import fused_options, place_counters
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface.face import Face, show_state, tile_state
from shardwise.tier.rest import PartOf, Resident


class Swap:
    """Puts shards into an optimizer's groups and states, and takes them out again."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._faces: dict[torch.Tensor, Face] = {face.parameter: face for face in runtime.faces}
        self.parts: dict[ParamSlot, nn.Parameter] = {
            slot: nn.Parameter(_part_of(slot)) for slot in runtime.trained_slots
        }
        """This rank's shard of each trained slot, used during a step; empty if it has none.

        Also empty if the slot is updated in windows: then the step itself does nothing.
        """
        self._swapped: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """During a step: the groups, each with the original values of changed options."""

    def put_in(self) -> None:
        """Makes groups list shards, and moves states to shards."""
        optimizer = self._optimizer
        for slot, part in self.parts.items():
            part.grad = _grad_of(slot, part)
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in optimizer.state.items():
            tiles = self._parts_of(key)
            if len(tiles) > 1:
                owns = {part: tile_state(value, slot) for slot, part in tiles.items()}
                state.update({part: own for part, own in owns.items() if own})
            else:
                state[next(iter(tiles.values()), key)] = value
        optimizer.state = state
        for group in optimizer.param_groups:
            parts = [part for p in group["params"] for part in self._parts_of(p).values() or [p]]
            states = [state.get(part, {}) for part in parts]
            changed = fused_options(group, parts, states)
            self._swapped.append((group, {key: group[key] for key in changed}))
            group.update(changed, params=parts)
            place_counters(group, parts, state)

    def take_out(self) -> None:
        """Undoes ``put_in``: groups list parameters again, and states belong to them."""
        owners = {part: slot for slot, part in self.parts.items()}

        def owner(part: nn.Parameter) -> nn.Parameter:
            return owners[part].face.parameter if part in owners else part

        for group, options in self._swapped:
            # Parameter by parameter, so that several sharded models can share an optimizer.
            params = dict.fromkeys(owner(part) for part in group["params"])
            group.update(options, params=list(params))
        self._swapped.clear()
        stepped: dict[Any, Any] = self._optimizer.state
        self._optimizer.state = defaultdict(dict)
        for key, value in stepped.items():
            if key in owners:
                show_state(self._optimizer, owners[key], value)
            else:
                self._optimizer.state[key] = value
        for part in owners:
            part.grad = None

    def _parts_of(self, parameter: Any) -> dict[ParamSlot, nn.Parameter]:
        """The shards that replace a parameter during a step; empty if it is not in this model."""
        face = self._faces.get(parameter)
        slots = face.slots if face is not None else ()
        return {slot: self.parts[slot] for slot in slots if slot in self.parts}


def _part_of(slot: ParamSlot) -> torch.Tensor:
    """This rank's elements of a parameter's master weights: flat, but a scalar stays a scalar.

    So the states of a scalar have the same shapes as in a plain process.
    """
    flat = slot.flat
    part = None
    if not flat.updates_in_windows:
        assert isinstance(flat.params.master, Resident | PartOf)
        part = slot.of(flat.params.master.tensor, flat.optim_at)
    if part is None:
        return torch.empty(0, dtype=flat.dtypes.master, device=slot.parameter.device)
    return part.view(()) if slot.spec.param.shape == () else part


def _grad_of(slot: ParamSlot, part: nn.Parameter) -> torch.Tensor | None:
    flat = slot.flat
    if not slot.has_grad or flat.updates_in_windows or not isinstance(flat.grads.summed, Resident):
        return None
    grad = slot.of(flat.grads.summed.tensor if flat.grads.has_sums else None, flat.optim_at)
    return None if grad is None else grad.view(part.shape)
