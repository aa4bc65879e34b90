"""The optimizer states of windowed parameters between steps."""

from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.runtime.flat import Flat
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface.face import State, show_state
from shardwise.tier.rest import Rest


class StatesAtRest:
    """States of parameters whose shards are not in memory as a whole.

    Numbers that an optimizer keeps per parameter (Adam's step, all states of a scalar) stay in
    memory; tensors rest on the plan's tier of OS.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.rests: dict[Flat, dict[str, Rest]] = {}
        """Per-element states, by flat and name."""
        self.numbers: dict[ParamSlot, State] = {}
        """States of a parameter as a whole; a parameter is absent before its first step."""
        self.tensors: dict[ParamSlot, set[str]] = {}
        """The names of a parameter's per-element states."""

    def num_kept(self, flats: list[Flat]) -> int:
        """How many numbers the optimizer keeps per element of some flats."""
        return max((len(self.rests.get(flat, {})) for flat in flats), default=0)

    def state_of(self, slot: ParamSlot) -> State:
        """A parameter's state with its values; empty before the first step."""
        if slot not in self.numbers:
            return {}
        state = dict(self.numbers[slot])
        start = slot.segment.start - slot.flat.optim_at.start
        for key in self.tensors[slot]:
            loan = self.rests[slot.flat][key].lend(start, start + slot.segment.numel)
            state[key] = loan.arrived().clone()
            loan.give_back(changed=False)
        return state

    def set_state(self, slot: ParamSlot, state: State | None) -> None:
        """Overwrites a parameter's state; None: as before its first step."""
        numbers, tensors = self.forget(slot)
        show_state(self._optimizer, slot, None)
        if state is None or not slot.segment.numel:
            del self.numbers[slot]
            return
        start = slot.segment.start - slot.flat.optim_at.start
        for key, value in state.items():
            if not is_per_element(value, slot.part_shape):
                numbers[key] = value
                continue
            tensors.add(key)
            rest = self.rest(slot.flat, key, value.dtype)
            loan = rest.lend(start, start + slot.segment.numel, reads=False)
            loan.arrived().copy_(value.reshape(-1))
            loan.give_back(changed=True)
        self.show(slot)

    def free(self) -> None:
        """Frees the memory and disk space of the states."""
        for rests in self.rests.values():
            for rest in rests.values():
                rest.free()
        self.rests.clear()
        self.numbers.clear()

    def forget(self, slot: ParamSlot) -> tuple[State, set[str]]:
        """Replaces the records of a parameter's state by empty ones, and returns them."""
        self.numbers[slot], self.tensors[slot] = {}, set()
        return self.numbers[slot], self.tensors[slot]

    def rest(self, flat: Flat, key: str, dtype: torch.dtype) -> Rest:
        """A per-element state of a flat; made when first asked for."""
        rests = self.rests.setdefault(flat, {})
        if key not in rests:
            rests[key] = flat.make_state(key, dtype)
        return rests[key]

    def show(self, slot: ParamSlot) -> None:
        """Shows the state in ``optimizer.state``: numbers, and meta tensors without values."""
        shown = {
            key: torch.empty(slot.part_shape, dtype=self.rests[slot.flat][key].dtype, device="meta")
            for key in self.tensors[slot]
        }
        show_state(self._optimizer, slot, self.numbers[slot] | shown)


def is_per_element(value: Any, shape: torch.Size) -> bool:
    """Whether a state has one value per element of a shard of this shape."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
