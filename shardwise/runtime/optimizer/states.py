"""An optimizer's states by parameter: shown, saved and loaded as this rank's shards."""

import hashlib
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.device.abilities import HOST, separate_memory
from shardwise.runtime.flat import Flat
from shardwise.runtime.optimizer.at_rest import is_per_element
from shardwise.runtime.optimizer.windows import WindowedUpdate
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface.face import (
    TILES,
    Face,
    State,
    show_state,
    shown_state,
    tile_state,
    whole_state,
)
from shardwise.tier.rest import PartOf, Resident, Rest

_NOTE = "shardwise"


class States:
    """The states that one optimizer keeps for one model's parameters on this rank."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer, windows: WindowedUpdate) -> None:
        self._runtime, self._optimizer, self._windows = runtime, optimizer, windows
        self._faces: dict[torch.Tensor, Face] = {face.parameter: face for face in runtime.faces}
        self._loading: dict[ParamSlot, State | None] = {}

    def adopt(self) -> None:
        """Shards the states that the optimizer already has for whole parameters."""
        for slot, state in self._cut_all(self._optimizer.state).items():
            self._set_state(slot, state)

    def install(self) -> None:
        optimizer, removers = self._optimizer, self._runtime.removers
        handles = (
            optimizer.register_state_dict_post_hook(self._note_layout),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        )
        removers += [handle.remove for handle in handles]

    def drop(self) -> None:
        """Removes all states of this model's parameters."""
        self.forget_updates()
        for slot in self._runtime.trained_slots:
            self._set_state(slot, None)
        self._windows.states.free()

    def _cut_all(self, states: Any) -> dict[ParamSlot, State | None]:
        """This rank's shards of the states of this model's parameters; None where it has none."""
        found: dict[ParamSlot, State | None] = {}
        for parameter, state in states.items():
            face = self._faces.get(parameter)
            for slot in face.slots if face is not None else ():
                has_any = slot.spec.param.requires_grad and slot.segment.numel
                own = tile_state(state, slot) or None if TILES in state else state
                found[slot] = self._cut(slot, own) if has_any and own is not None else None
        return found

    def _cut(self, slot: ParamSlot, state: State) -> State:
        """A shard's state, cut from the whole parameter's or copied from the same shard's."""
        shape, part_shape = tuple(slot.face.parameter.shape), slot.part_shape
        rests_on = self._device_of(slot)

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
            if key == "step" and value.dim() == 0:
                return value.clone()  # see place_counters
            if tuple(value.shape) == shape:
                # As torch does on loading: states have their parameter's dtype, except "step".
                like_part = value.is_floating_point() and key != "step"
                dtype = slot.flat.dtypes.master if like_part else value.dtype
                own = value.reshape(-1)[slot.own].reshape(part_shape)
                return own.to(rests_on, dtype, copy=True)
            if value.dim() == 0 or value.shape == part_shape:
                return value.to(rests_on, copy=True) if value.dim() else value.clone()
            raise UsageError(
                f"State '{key}' of '{slot.name}' has shape {tuple(value.shape)}, which is neither "
                f"the parameter's {shape} nor that of this rank's shard ({slot.segment.numel} "
                "elements); load a state that was saved under this plan or for whole parameters."
            )

        return {key: cut(key, value) for key, value in state.items()}

    def _device_of(self, slot: ParamSlot) -> torch.device:
        """Where the states of a shard are between steps, whatever device they were loaded to."""
        if self._windows.covers(slot):
            return HOST  # on their way to the tier
        master = slot.flat.params.master
        assert isinstance(master, Resident | PartOf)
        return master.tensor.device

    def state_of(self, slot: ParamSlot) -> State:
        """The state of this rank's shard of a parameter, wherever it rests."""
        if self._windows.covers(slot):
            return self._windows.states.state_of(slot)
        return shown_state(self._optimizer, slot)

    def at_rest(self, slot: ParamSlot) -> tuple[State, dict[str, Rest]]:
        """A parameter's state without reading it: numbers, and per-element states, each as a shard
        that covers the slot's segment. Both are empty before the first step."""
        if self._windows.covers(slot):
            states = self._windows.states
            numbers = states.numbers.get(slot, {})
            names = states.tensors.get(slot, set())
            place = slot.segment.relative_to(slot.flat.optim_at.start)
            rests = states.rests.get(slot.flat, {})
            return dict(numbers), {key: PartOf(rests[key], place) for key in sorted(names)}
        found: dict[str, Rest] = {}
        numbers = {}
        for key, value in shown_state(self._optimizer, slot).items():
            if is_per_element(value, slot.part_shape):
                found[key] = self._resident(value.detach().view(-1))
            else:
                numbers[key] = value
        return numbers, found

    def whole(self, flat: Flat, key: str) -> Rest | None:
        """A state of all parameters of a flat, if it rests as a whole."""
        return self._windows.states.rests.get(flat, {}).get(key)

    def replace(
        self, slot: ParamSlot, numbers: State | None, dtypes: dict[str, torch.dtype]
    ) -> dict[str, Rest]:
        """Replaces a parameter's state by numbers and per-element states with arbitrary values,
        which are filled through what is returned; ``numbers`` None: as before its first step."""
        if numbers is None or not slot.segment.numel:
            self._set_state(slot, None)
            return {}
        if self._windows.covers(slot):
            states = self._windows.states
            states.set_state(slot, numbers)
            states.tensors[slot] |= dtypes.keys()
            place = slot.segment.relative_to(slot.flat.optim_at.start)
            for key, dtype in dtypes.items():
                states.rest(slot.flat, key, dtype)
            states.show(slot)
            rests = states.rests[slot.flat] if dtypes else {}
            return {key: PartOf(rests[key], place) for key in dtypes}
        before, device = shown_state(self._optimizer, slot), self._device_of(slot)
        state: State = {
            key: value.to(device) if isinstance(value, torch.Tensor) and key != "step" else value
            for key, value in numbers.items()
        }
        for key, dtype in dtypes.items():
            old: Any = before.get(key)
            if is_per_element(old, slot.part_shape) and old.dtype == dtype:
                state[key] = old
            else:
                state[key] = torch.empty(slot.part_shape, dtype=dtype, device=device)
        show_state(self._optimizer, slot, state)
        return {key: self._resident(state[key].view(-1)) for key in dtypes}

    def _resident(self, tensor: torch.Tensor) -> Resident:
        device = self._runtime.grid.device
        beside = separate_memory(device) and not separate_memory(tensor.device)
        return Resident(tensor, device if beside else None)

    def _set_state(self, slot: ParamSlot, state: State | None) -> None:
        if self._windows.covers(slot):
            self._windows.states.set_state(slot, state)
        else:
            show_state(self._optimizer, slot, state)

    def _layout_digest(self) -> str:
        text = "|".join(
            f"{slot.name}:{slot.segment.start}-{slot.segment.stop}" for slot in self._runtime.slots
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _note_layout(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._runtime.steps.require("optimizer.state_dict()")
        listed = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for index, parameter in enumerate(listed):
            slots = face.slots if (face := self._faces.get(parameter)) is not None else []
            if index in state_dict["state"] and any(self._windows.covers(slot) for slot in slots):
                # Real values: the optimizer itself shows tensors without values here.
                states = [self.state_of(slot) for slot in slots]
                tiled = slots[0].face.is_tiled
                state_dict["state"][index] = whole_state(states) if tiled else states[0]
        state_dict[_NOTE] = {"layout": self._layout_digest(), "rank": self._runtime.grid.place.rank}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Shards the new states before any is replaced: a refused state changes nothing.

        It must also come before torch casts states to the parameter's dtype, which may be narrower.
        """
        self._runtime.await_readers()
        note = state_dict.get(_NOTE)
        if note is not None and note["layout"] != self._layout_digest():
            raise UsageError(
                f"This optimizer state was saved on rank {note['rank']} under another layout; load "
                "states of shards under the plan and on the rank that they come from."
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
        self.forget_updates()

    def forget_updates(self) -> None:
        """Cancels the pending step: it must not complete the updates of the last backward."""
        self._windows.end()
        self._runtime.steps.stepped()
