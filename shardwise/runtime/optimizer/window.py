"""A window: a run of elements of a shard of OS, and the loans that bring it into memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from shardwise.core.topology import Interval
from shardwise.device.abilities import HOST, separate_memory
from shardwise.runtime.flat import Flat
from shardwise.runtime.optimizer.at_rest import StatesAtRest
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.unit import Unit
from shardwise.tier.rest import Loan


@dataclass
class Window:
    """A run of elements of one flat, with its loans while it is in memory."""

    unit: Unit
    flat: Flat
    place: Interval
    slots: list[ParamSlot]
    master: Loan | None = None
    grad: Loan | None = None
    states: dict[str, Loan] = field(default_factory=dict)

    @property
    def inside(self) -> tuple[int, int]:
        """Its start and stop in this rank's shard of OS."""
        start = self.place.start - self.flat.optim_at.start
        return start, start + self.place.numel

    def of(self, slot: ParamSlot, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter's elements in this window; a scalar keeps its shape."""
        part = slot.of(tensor, self.place)
        assert part is not None
        return part.view(()) if slot.spec.param.shape == () else part

    @property
    def _updates_on(self) -> torch.device:
        """The device whose kernels update the window: the host's where states rest elsewhere."""
        return self.flat.device if self.flat.optim_tier == "device" else HOST

    def lend_grad(self) -> None:
        grad = self.flat.grads.make_sums().lend(*self.inside)
        comes = separate_memory(grad.tensor.device) and self._updates_on == HOST
        self.grad = self.flat.staging.fetch(grad) if comes else grad

    def arrived_grad(self) -> torch.Tensor:
        """The gradient where the update needs it, multiplied by what clipping left to do."""
        assert self.grad is not None
        grads, to = self.flat.grads, self._updates_on
        if self.grad.tensor.device == to:
            grad = self.grad.arrived()
        else:  # no more than a window, for a moment
            grad = self.grad.for_stream().to(to, non_blocking=True)
        return grad if grads.factor == 1.0 else grad * grads.factor  # the stored sum stays

    def lend_states(self, states: StatesAtRest) -> None:
        start, stop = self.inside
        assert self.flat.params.master is not None
        self.master = self.flat.params.master.lend(start, stop)
        if not self.slots or any(slot in states.numbers for slot in self.slots):
            rests = states.rests.get(self.flat, {})
            self.states = {key: rest.lend(start, stop) for key, rest in rests.items()}

    def give_back(self, *, updates_params: bool) -> None:
        """Writes back what changed; ``updates_params``: also this rank's elements of P."""
        flat, (start, stop) = self.flat, self.inside
        assert self.master is not None
        assert self.grad is not None
        if flat.has_master and not flat.rests_in_master and updates_params:
            first = flat.own.start + start
            copy = flat.params.shard.lend(first, first + stop - start, reads=False)
            if copy.tensor.device == self._updates_on:
                copy.arrived().copy_(self.master.tensor)
                copy.give_back(changed=True)
            else:
                flat.staging.send(self.master.tensor, copy)
        self.grad.give_back(changed=False)
        self.master.give_back(changed=True)
        for loan in self.states.values():
            loan.give_back(changed=True)


def windows_of(unit: Unit, flat: Flat, moving: list[ParamSlot], size: int) -> Iterator[Window]:
    """The windows of a flat; none if none of its parameters is updated.

    Windows of padding alone are included, so that all ranks move the planned bytes.
    """
    for start in range(flat.optim_at.start, flat.optim_at.stop, size) if moving else ():
        place = Interval(start, min(start + size, flat.optim_at.stop))
        slots = [slot for slot in moving if slot.spec.interval.intersect(place).numel]
        yield Window(unit, flat, place, slots)
