"""Gradient clipping: computes the total norm over all ranks, and scales gradients."""

import math
from contextlib import ExitStack

import torch
from torch.utils._foreach_utils import _device_has_foreach_support

from shardwise.core.errors import UsageError
from shardwise.runtime.flat import Flat
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import grads
from shardwise.runtime.surface.nonfinite import first_gradient
from shardwise.runtime.surface.opened import OpenGrads, open_grads
from shardwise.runtime.unit import Unit


def clip_grad_norm_(
    runtime: Runtime,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Scales gradients so that their total norm is at most ``max_norm``; returns the norm."""
    if not norm_type > 0:
        raise UsageError(f"clip_grad_norm_ needs a norm of positive order, not {norm_type}.")
    foreach = _takes_foreach(runtime, foreach)
    runtime.require_idle("clip_grad_norm_", before_step=True)
    if math.isfinite(max_norm) and any(unit.ops.updates_early for unit in runtime.units):
        raise UsageError(
            "clip_grad_norm_ comes too late: tiers.update = 'backward' in the plan updates units "
            "before the norm of all gradients is known; set it to 'step', or pass math.inf for the "
            "norm alone."
        )
    grads.read(runtime)
    if runtime.accumulated:
        raise UsageError(
            "clip_grad_norm_ needs reduced gradients, but the last backward ran under no_sync; run "
            "a backward outside no_sync first."
        )
    total = _total_norm(runtime, norm_type, foreach)
    runtime.nonfinite = None if torch.isfinite(total) else first_gradient(runtime)
    if error_if_nonfinite and not torch.isfinite(total):
        raise UsageError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so they "
            "cannot be clipped; pass error_if_nonfinite=False to clip anyway."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0).item()
    if factor != 1.0:
        _scale_grads(runtime, factor, foreach)
    return total


def _scale_grads(runtime: Runtime, factor: float, foreach: bool) -> None:
    with ExitStack() as stack:
        parts: list[torch.Tensor] = []
        for unit in runtime.units:
            for flat in unit.trained:
                if flat.grads.is_resident:
                    parts += _grad_parts(stack.enter_context(open_grads(flat, writes=True)))
                else:
                    flat.grads.scale(factor)  # when it is next in memory
        if foreach and parts:
            torch._foreach_mul_(parts, factor)
        elif not foreach:
            for part in parts:
                part.mul_(factor)


def _takes_foreach(runtime: Runtime, chosen: bool | None) -> bool:
    """Whether to use torch's foreach kernels: as chosen, by default if the device has them.

    The device decides, even if this rank's shards are empty, so that all ranks decide alike.
    """
    if chosen is False:
        return False
    devices = {runtime.grid.device} if any(unit.trained for unit in runtime.units) else set()
    lacking = sorted({d.type for d in devices if not _device_has_foreach_support(d)})
    if chosen and lacking:
        raise UsageError(
            f"clip_grad_norm_(foreach=True), but torch has no foreach kernels for "
            f"{', '.join(lacking)} tensors; pass foreach=False, or None to use them where they "
            "exist."
        )
    return not lacking


def _grad_parts(opened: OpenGrads) -> list[torch.Tensor]:
    """This rank's shards of a flat's reduced gradients, without padding."""
    parts = [opened.summed_of(slot) for slot in opened.flat.slots if slot.has_grad]
    return [part for part in parts if part is not None]


def _total_norm(runtime: Runtime, norm_type: float, foreach: bool) -> torch.Tensor:
    """The norm over all ranks. Only the first replica of a shard contributes its elements."""
    rank, infinite = runtime.grid.place.rank, norm_type == float("inf")
    norms: list[torch.Tensor] = []
    with ExitStack() as stack:
        counted = []
        for unit in runtime.units:
            for flat in unit.trained if _is_first_replica(unit, rank) else ():
                if flat.grads.is_resident:
                    counted += _grad_parts(stack.enter_context(open_grads(flat)))
                else:
                    norms += _stored_norms(flat, norm_type, foreach)
        norms += _norms(counted, norm_type, foreach)
    local = _on_host(norms)
    value = local.max() if infinite else (local**norm_type).sum()
    rows = runtime.grid.control.exchange(value.reshape(1), "norm of the gradients")
    # Rows are summed in rank order on every rank, so that all get the same bits.
    total = rows.max() if infinite else rows.sum() ** (1.0 / norm_type)
    wide = any(flat.dtypes.master == torch.float64 for u in runtime.units for flat in u.trained)
    return total if wide else total.float()


def _on_host(norms: list[torch.Tensor]) -> torch.Tensor:
    """Norms in float64, and a zero; the host waits once for all that are on a device."""
    together = [torch.zeros(1, dtype=torch.float64)]
    for device in {norm.device for norm in norms}:
        there = [norm for norm in norms if norm.device == device]
        alike = [  # stacked first: one launch then converts all of a dtype
            torch.stack([norm for norm in there if norm.dtype == dtype]).double()
            for dtype in dict.fromkeys(norm.dtype for norm in there)
        ]
        together.append(torch.cat(alike).cpu())
    return torch.cat(together)


def _norms(parts: list[torch.Tensor], norm_type: float, foreach: bool) -> list[torch.Tensor]:
    if foreach and parts:
        return list(torch._foreach_norm(parts, norm_type))
    return [torch.linalg.vector_norm(part, norm_type) for part in parts]


def _stored_norms(flat: Flat, norm_type: float, foreach: bool) -> list[torch.Tensor]:
    """Norms of gradients on a disk: computed when they were stored, otherwise read back."""
    known = [flat.grads.norms.get(slot) for slot in flat.slots if slot.has_grad]
    if norm_type == 2.0 and flat.grads.norms:
        return [norm * flat.grads.factor for norm in known if norm is not None]
    with open_grads(flat) as opened:
        return _norms(_grad_parts(opened), norm_type, foreach)


def _is_first_replica(unit: Unit, rank: int) -> bool:
    """Whether no earlier rank has the same shard of the unit's gradients."""
    beyond = unit.rungs.ladder.steps[unit.rungs.optim :]
    return all(step.coordinate(rank) == 0 for step in beyond)
