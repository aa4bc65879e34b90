"""What ``p.grad`` shows between backward passes, and what the user did to it meanwhile.

After backward ``p.grad`` is a *handle*: a real view if this rank has the whole gradient in the
parameter's dtype, otherwise a guarded tensor. If the user replaced the handle by None, the gradient
was dropped; if the user replaced it by a tensor, that tensor is now the gradient.

Handles stay while backward runs. A handle is removed only while autograd accumulates
(``make_room``), and a guarded one is put back when the gradient arrives (``mark``). So a
``zero_grad`` after a failed backward is noticed like any other.
"""

from typing import TYPE_CHECKING

import torch

from shardwise.core.errors import UsageError
from shardwise.runtime.flat import Flat
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface.face import Face
from shardwise.runtime.surface.guarded_grad import GuardedGrad
from shardwise.runtime.surface.opened import open_grads
from shardwise.tier.rest import Resident, use

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


NoGuards = torch._C.DisableTorchFunctionSubclass
"""Inside, ``parameter.grad`` bypasses guards."""


def read(runtime: "Runtime") -> None:
    """Finds out what the user did with the handles: kept, dropped or replaced them."""
    changed: list[tuple[ParamSlot, torch.Tensor | None]] = []
    is_used = False
    with NoGuards():
        for slot in runtime.trained_slots:
            face, grad = slot.face, slot.face.parameter.grad
            if not (grad is face.handle or (face.emptied and grad is None)):
                if slot.spent:
                    slot.require_unspent()
                changed.append((slot, grad))
    if changed:
        _forget([slot for slot, _ in changed])
    for slot, grad in changed:
        if grad is not None:
            _adopt(slot, grad)
            _show([slot])
    for slot in runtime.trained_slots:
        is_used = is_used or slot.used
    # If everything accumulated under no_sync was dropped, the step starts again.
    runtime.accumulated = runtime.accumulated and is_used


def begin_backward(runtime: "Runtime") -> None:
    """Reads the handles, and resets what was counted in the last backward."""
    read(runtime)
    for slot in runtime.trained_slots:
        slot.arrivals, slot.pending, slot.face.emptied = 0, False, False


def make_room(slot: ParamSlot) -> None:
    """Empties ``p.grad``, because autograd is about to accumulate into it."""
    face = slot.face
    if face.handle is not None:
        with NoGuards():
            if face.parameter.grad is face.handle:
                face.parameter.grad = None
                face.emptied = True


def mark(slot: ParamSlot) -> None:
    """Puts a handle into ``p.grad``, because the local gradient was taken."""
    face = slot.face
    with NoGuards():
        grad = face.parameter.grad
        if face.is_tiled and grad is not face.handle and not (face.emptied and grad is None):
            return  # dropped since another tile's gradient arrived: see read()
        face.handle, face.emptied = _guard(face) if face.guarded is None else face.guarded, False
        face.parameter.grad = face.handle


def dropped(slots: list[ParamSlot]) -> list[bool]:
    """Per parameter: whether the user set ``p.grad`` to None since backward began."""
    with NoGuards():
        return [
            slot.face.parameter.grad is None
            and slot.face.handle is not None
            and not slot.face.emptied
            for slot in slots
        ]


def end_backward(runtime: "Runtime", dropped: list[ParamSlot]) -> None:
    """Puts a handle on every parameter that has a gradient, unless the user dropped it."""
    if dropped:
        with NoGuards():
            for slot in dropped:
                slot.face.parameter.grad = None
        _forget(dropped)
    shown = []
    with NoGuards():
        for slot in runtime.trained_slots:
            if slot.has_grad:
                face, grad = slot.face, slot.face.parameter.grad
                if grad is face.handle or (face.emptied and grad is None):
                    shown.append(slot)
                else:  # the handle differs from what the user put, so read() notices
                    face.handle = _guard(face) if face.guarded is None else face.guarded
                face.emptied = False
    _show(shown)


def _show(slots: list[ParamSlot]) -> None:
    """Shows real views where this rank has the whole gradient in the parameter's dtype."""
    with NoGuards():
        for slot in slots:
            face, flat, grads = slot.face, slot.flat, slot.flat.grads
            face.handle = _guard(face) if face.guarded is None else face.guarded
            alike = flat.dtypes.master == flat.dtypes.compute and not face.is_tiled
            # No view if the unit is updated early: writing into it would change nothing.
            if alike and grads.holds != grads.has_sums and not slot.unit.ops.updates_early:
                whole = grads.held if grads.holds and flat.rungs.grads == 0 else None
                if grads.has_sums and flat.rungs.optim == 0:
                    whole = grads.summed
                if isinstance(whole, Resident) and whole.tensor.device == slot.parameter.device:
                    face.handle = whole.tensor[slot.place].view(slot.spec.param.shape)
            face.parameter.grad = face.handle


def _guard(face: Face) -> torch.Tensor:
    face.guarded = GuardedGrad.make(face.parameter, face)
    return face.guarded


def _forget(slots: list[ParamSlot]) -> None:
    """Drops the gradients of some parameters: reduced, held, and in flight."""
    flats: dict[Flat, list[ParamSlot]] = {}
    for slot in slots:
        slot.has_grad = slot.used = slot.face.emptied = False
        slot.face.handle = None
        flats.setdefault(slot.flat, []).append(slot)
    for flat, forgotten in flats.items():
        if not [slot for slot in flat.slots if slot.has_grad]:
            flat.grads.forget()
            continue
        # Later reductions add to the flat, so a dropped gradient must read as zero.
        with open_grads(flat, writes=True) as opened:
            for slot in forgotten:
                for part in opened.of(slot):
                    part.zero_()


def _adopt(slot: ParamSlot, grad: torch.Tensor) -> None:
    """Takes this rank's shard of a full gradient that the user assigned on all ranks."""
    if isinstance(grad, GuardedGrad):
        raise UsageError(f"'{slot.name}' got another parameter's gradient; assign a plain tensor.")
    flat = slot.flat
    if not flat.grads.has_sums:
        with use(flat.grads.make_sums(), reads=False, writes=True) as reduced:
            reduced.zero_()
        flat.grads.has_sums, flat.grads.factor = True, 1.0
    with open_grads(flat, writes=True) as opened:
        part = opened.summed_of(slot)
        if part is not None:
            dense = grad.to_dense() if grad.is_sparse else grad
            part.copy_(dense.detach().reshape(-1)[slot.own])
    slot.has_grad = True
