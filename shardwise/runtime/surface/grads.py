"""What ``p.grad`` shows between backward passes, and what the user did to it meanwhile.

After backward ``p.grad`` is a *handle*: a real view where this rank holds the whole gradient in
the parameter's dtype, otherwise a guarded tensor. A handle that the user replaced by None means
that the gradient was dropped; one replaced by a tensor means that this is the gradient now.

Handles stay while backward runs: one is taken away only for the moment in which autograd
accumulates (``make_room``), and a guarded one comes back with the gradient's arrival (``mark``).
So a ``zero_grad`` after a backward that failed is noticed like any other.
"""

from typing import TYPE_CHECKING

import torch

from shardwise.core.errors import UsageError
from shardwise.runtime.flat import Flat
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import guard
from shardwise.runtime.surface.face import Face
from shardwise.tier.rest import Resident

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


def read(runtime: "Runtime") -> None:
    """Learns what the user did with the handles: nothing, dropped, or replaced."""
    changed = [slot for slot in runtime.trained_slots if not _untouched(slot)]
    for slot in changed:
        slot.require_unspent()
    given = [guard.raw_grad(slot.face.parameter) for slot in changed]
    _forget(changed)
    for slot, grad in zip(changed, given, strict=True):
        if grad is not None:
            _adopt(slot, grad)
            _show(slot)
    # A step that was accumulated under no_sync and then dropped altogether begins anew.
    runtime.accumulated &= any(slot.used for slot in runtime.trained_slots)


def begin_backward(runtime: "Runtime") -> None:
    read(runtime)
    for slot in runtime.trained_slots:
        slot.arrivals, slot.pending, slot.face.emptied = 0, False, False


def make_room(slot: ParamSlot) -> None:
    """Autograd is about to accumulate: it must find ``p.grad`` empty."""
    face = slot.face
    if face.handle is not None and guard.raw_grad(face.parameter) is face.handle:
        guard.set_raw_grad(face.parameter, None)
        face.emptied = True


def mark(slot: ParamSlot) -> None:
    """The local gradient was taken: from now on ``p.grad`` stands for it."""
    face = slot.face
    if face.is_tiled and not _untouched(slot):
        return  # dropped since another tile's came: see read()
    face.handle, face.emptied = _guarded(face), False
    guard.set_raw_grad(face.parameter, face.handle)


def was_dropped(slot: ParamSlot) -> bool:
    """Whether the user set ``p.grad`` to None since backward began."""
    return not _untouched(slot) and guard.raw_grad(slot.face.parameter) is None


def end_backward(runtime: "Runtime", dropped: list[ParamSlot]) -> None:
    """Puts a handle on every parameter that has a gradient, unless the user dropped it already."""
    for slot in dropped:
        guard.set_raw_grad(slot.face.parameter, None)
    _forget(dropped)
    for slot in runtime.trained_slots:
        if not slot.has_grad:
            continue
        if _untouched(slot):
            _show(slot)
        else:
            slot.face.handle = _guarded(slot.face)  # differs from what the user put: see read()
        slot.face.emptied = False


def _untouched(slot: ParamSlot) -> bool:
    face, grad = slot.face, guard.raw_grad(slot.face.parameter)
    return grad is face.handle or (face.emptied and grad is None)


def _show(slot: ParamSlot) -> None:
    slot.face.handle = _handle(slot)
    guard.set_raw_grad(slot.face.parameter, slot.face.handle)


def _handle(slot: ParamSlot) -> torch.Tensor:
    flat, rungs = slot.flat, slot.flat.rungs
    place = slot.spec.interval.relative_to(0)
    alike = flat.dtypes.master == flat.dtypes.compute and not slot.face.is_tiled
    if slot.unit.ops.updates_early:  # writing into it would change nothing
        return _guarded(slot.face)
    if alike and flat.grads.holds != flat.grads.has_sums:
        whole = flat.grads.held if flat.grads.holds and rungs.grads == 0 else None
        if flat.grads.has_sums and rungs.optim == 0:
            whole = flat.grads.summed
        if isinstance(whole, Resident) and whole.tensor.device == slot.parameter.device:
            return whole.tensor[place].view(slot.spec.param.shape)
    return _guarded(slot.face)


def _guarded(face: Face) -> torch.Tensor:
    if face.guarded is None:
        face.guarded = guard.GuardedGrad.make(face.parameter, face)
    return face.guarded


def _forget(slots: list[ParamSlot]) -> None:
    """Drops the gradients of some parameters: reduced, held, and those that are on their way."""
    flats: dict[Flat, list[ParamSlot]] = {}
    for slot in slots:
        slot.has_grad = slot.used = slot.face.emptied = False
        slot.face.handle = None
        flats.setdefault(slot.flat, []).append(slot)
    for flat, forgotten in flats.items():
        if not any(slot.has_grad for slot in flat.slots):
            flat.grads.holds = flat.grads.has_sums = False
            continue
        # The others go on adding, so an absent gradient has to read as zero.
        with flat.grads.open(writes=True) as opened:
            for slot in forgotten:
                for part in opened.of(slot):
                    part.zero_()


def _adopt(slot: ParamSlot, grad: torch.Tensor) -> None:
    """The user assigned a full gradient, alike on all ranks: this rank takes its part."""
    if isinstance(grad, guard.GuardedGrad):
        raise UsageError(f"'{slot.name}' was given the gradient of another parameter.")
    flat = slot.flat
    if not flat.grads.has_sums:
        with flat.grads.make_sums().use(reads=False, writes=True) as reduced:
            reduced.zero_()
        flat.grads.has_sums, flat.grads.factor = True, 1.0
    with flat.grads.open(writes=True) as opened:
        part = opened.summed_of(slot)
        if part is not None:
            dense = grad.to_dense() if grad.is_sparse else grad
            part.copy_(dense.detach().reshape(-1)[slot.own])
    slot.has_grad = True
