"""What ``p.grad`` shows between backward passes, and what the user did to it meanwhile.

After backward ``p.grad`` is a *handle*: a real view where this rank holds the whole gradient in
the parameter's dtype, otherwise a guarded tensor. Before the next backward the handles are taken
back. A handle that the user replaced by None means that the gradient was dropped; one replaced by
a tensor means that this is the gradient now.
"""

from collections.abc import Iterable

import torch

from shardwise.core.errors import UsageError
from shardwise.core.topology import Interval
from shardwise.runtime import guard
from shardwise.runtime.flat import Flat, ParamSlot


def show(slots: Iterable[ParamSlot]) -> None:
    """Puts a handle on every parameter that has a gradient."""
    for slot in slots:
        if slot.has_grad:
            slot.handle = _handle(slot)
            guard.set_raw_grad(slot.parameter, slot.handle)


def read(slots: Iterable[ParamSlot]) -> None:
    """Learns what the user did with the handles: nothing, dropped, or replaced."""
    flats: dict[Flat, list[ParamSlot]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for slot in slots:
            grad = slot.parameter.grad
            if grad is slot.handle:
                continue
            slot.has_grad, slot.handle = grad is not None, grad
            flats.setdefault(slot.flat, []).append(slot)
    for flat, changed in flats.items():
        _drop(flat, changed)
        for slot in changed:
            if slot.has_grad:
                _adopt(slot)


def take_back(slots: Iterable[ParamSlot]) -> None:
    """Before a backward: autograd must find ``p.grad`` empty."""
    slots = list(slots)
    read(slots)
    with torch._C.DisableTorchFunctionSubclass():
        for slot in slots:
            slot.arrivals = 0
            slot.pending = False
            if slot.handle is not None:
                slot.parameter.grad = slot.handle = None


def _handle(slot: ParamSlot) -> torch.Tensor:
    flat, rungs = slot.flat, slot.flat.rungs
    place = slot.spec.interval.relative_to(0)
    if flat.dtypes.master == flat.dtypes.compute and flat.holds != flat.reduced_valid:
        whole = flat.held if flat.holds and rungs.grads == 0 else None
        if flat.reduced_valid and rungs.optim == 0:
            whole = flat.reduced
        if whole is not None:
            return whole[place].view(slot.spec.param.shape)
    if slot.guarded is None:
        slot.guarded = guard.GuardedGrad.make(slot.parameter, slot)
    return slot.guarded


def _drop(flat: Flat, changed: list[ParamSlot]) -> None:
    """Forgets the gradients of some parameters of a flat."""
    if not any(slot.has_grad for slot in flat.slots if slot not in changed):
        flat.holds = flat.reduced_valid = False
        return
    for slot in changed:
        for part in slot.grad_parts():
            part.zero_()
    # From now on an absent gradient reads as zero, so that the others can go on adding.


def _adopt(slot: ParamSlot) -> None:
    """The user assigned a full gradient, alike on all ranks: this rank takes its part."""
    grad = slot.handle
    assert grad is not None
    if isinstance(grad, guard.GuardedGrad):
        raise UsageError(f"'{slot.name}' was given the gradient of another parameter.")
    flat = slot.flat
    if not flat.reduced_valid:
        flat.open_reduced().zero_()
        flat.reduced_valid = True
    part = slot.of(flat.reduced, flat.optim_at)
    if part is not None:
        own = slot.segment.relative_to(slot.spec.interval.start)
        part.copy_(grad.detach().reshape(-1)[own])


def full(slot: ParamSlot, part_of: Interval, buffer: torch.Tensor) -> torch.Tensor:
    """A parameter's values in a gathered flat buffer that begins at ``part_of.start``."""
    place = slot.spec.interval.relative_to(part_of.start)
    return buffer[place].view(slot.spec.param.shape)
