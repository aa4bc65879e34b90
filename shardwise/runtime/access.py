"""Whole tensors for people: full_params, state_dict, full_grads, optimizer states, clipping."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.plan.schedule import Hop
from shardwise.runtime import grads
from shardwise.runtime.flat import Flat, ParamSlot
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import State, Unit


@contextmanager
def full_params(runtime: Runtime, module: nn.Module, write: bool) -> Iterator[None]:
    """Gathers the parameters of a module for reading, or for writing by rank 0."""
    runtime.require_idle("full_params")
    inside = set(module.parameters())
    units = [u for u in runtime.units if any(slot.parameter in inside for slot in u.slots)]
    for unit in units:
        if unit.travels and unit.state is State.RESTING:
            unit.gather()
        unit.settle()
    runtime.opened += 1
    try:
        yield
    finally:
        runtime.opened -= 1
        if write:
            _write_back(runtime, units)
        if not runtime.opened:
            runtime.release_all()


def _write_back(runtime: Runtime, units: list[Unit]) -> None:
    """Rank 0's values become everybody's."""
    runtime.grid.gathers.drain()
    with torch.no_grad():
        for unit in units:
            for slot in unit.slots:
                value = slot.parameter.detach()
                if value.device.type == "cpu":
                    value = value.contiguous()
                    runtime.grid.control.broadcast(value)
                else:
                    dist.broadcast(value, src=0)
                slot.flat.write(slot.spec, value)
                if unit.travels:
                    continue
                slot.parameter.copy_(value)
            unit.bump()


def state_dict(runtime: Runtime, *, rank0_only: bool, master: bool) -> dict[str, torch.Tensor]:
    """Full values by name, streamed unit by unit; ties are listed under all their names."""
    runtime.require_idle("state_dict")
    keeps = runtime.grid.place.rank == 0 or not rank0_only
    values: dict[nn.Parameter, torch.Tensor] = {}
    for unit in runtime.units:
        if master and any(flat.master is not None for flat in unit.flats):
            _collect_master(runtime, unit, values, keeps)
        else:
            with _gathered(runtime, unit):
                for slot in unit.slots if keeps else ():
                    values[slot.parameter] = slot.parameter.detach().cpu().clone()
    if not keeps:
        return {}
    model = runtime.model
    result = {n: values[p] for n, p in model.named_parameters(remove_duplicate=False)}
    persistent = _persistent_buffers(model)
    result |= {n: b.detach().cpu().clone() for n, b in model.named_buffers() if n in persistent}
    return result


@contextmanager
def _gathered(runtime: Runtime, unit: Unit) -> Iterator[None]:
    """One unit in full, for a moment."""
    resting = unit.state is State.RESTING
    if resting:
        unit.gather()
    unit.settle()
    try:
        yield
    finally:
        if resting and not runtime.opened:
            unit.free()


def _collect_master(
    runtime: Runtime, unit: Unit, values: dict[nn.Parameter, torch.Tensor], keeps: bool
) -> None:
    for flat in unit.flats:
        part, rung = (flat.part, unit.rungs.params)
        if flat.master is not None:
            unit.settle()
            runtime.grid.gathers.drain()
            part, rung = flat.master, unit.rungs.optim
        whole = _gather_whole(runtime, unit, flat, part, rung)
        for slot in flat.slots if keeps else ():
            place = slot.spec.interval.relative_to(0)
            values[slot.parameter] = whole[place].view(slot.spec.param.shape).cpu().clone()


def _gather_whole(
    runtime: Runtime, unit: Unit, flat: Flat, part: torch.Tensor, rung: int
) -> torch.Tensor:
    """A flat buffer in full from each rank's part of it on a rung; collective."""
    ladder = unit.rungs.ladder
    whole = torch.zeros(flat.spec.numel, dtype=part.dtype, device=part.device)
    whole[flat.interval(rung).relative_to(0)].copy_(part)
    hops = [Hop(i, ladder.steps[i].level, ladder.steps[i].size, 0) for i in reversed(range(rung))]

    def work(_: Any) -> None:
        for hop in hops:
            link = runtime.grid.link("gather", ladder.steps[hop.step])
            key = runtime.grid.labels.key(
                (1 << 24) + unit.index * 16 + hop.step, f"collection of unit '{unit.name}'"
            )
            link.gather(whole[flat.interval(hop.step).relative_to(0)], key)
            link.finish()

    runtime.grid.gathers.submit(work).wait()
    return whole


def full_grads(runtime: Runtime) -> dict[str, torch.Tensor]:
    """The reduced gradients in full, by name, on every rank; parameters without one are left out."""
    runtime.require_idle("full_grads")
    if runtime.accumulated:
        raise UsageError("Gradients are not reduced yet: the last backward ran under no_sync.")
    grads.read(runtime.trained_slots)
    found = {}
    for unit in runtime.units:
        for flat in unit.trained:
            if not any(slot.has_grad for slot in flat.slots):
                continue
            whole = _gather_whole(runtime, unit, flat, flat.open_reduced(), unit.rungs.optim)
            for slot in flat.slots:
                if slot.has_grad:
                    place = slot.spec.interval.relative_to(0)
                    found[slot.name] = whole[place].view(slot.spec.param.shape).clone()
    return found


def optim_state_dict(runtime: Runtime, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Optimizer states in full, by parameter name, on every rank; collective."""
    runtime.require_idle("optim_state_dict")
    result: dict[str, dict[str, Any]] = {}
    for unit in runtime.units:
        for flat in unit.trained:
            for key in _state_keys(runtime, optimizer, flat):
                _collect_state(runtime, optimizer, unit, flat, key, result)
    return result


def _state_keys(runtime: Runtime, optimizer: Optimizer, flat: Flat) -> list[str]:
    """The tensor states that any rank has for a flat; ranks whose part is padding have none."""
    mine = {k for slot in flat.slots for k in optimizer.state.get(slot.parameter, {})}
    if runtime.grid.place.world == 1:
        return sorted(mine)
    seen: list[Any] = [None] * runtime.grid.place.world
    dist.all_gather_object(seen, sorted(mine))
    return sorted({key for keys in seen for key in keys})


def _collect_state(
    runtime: Runtime,
    optimizer: Optimizer,
    unit: Unit,
    flat: Flat,
    key: str,
    result: dict[str, dict[str, Any]],
) -> None:
    part = torch.zeros(flat.optim_at.numel, dtype=flat.dtypes.master)
    scalars = torch.full((flat.optim_at.numel,), float("nan"), dtype=torch.float64)
    for slot in flat.slots:
        value = optimizer.state.get(slot.parameter, {}).get(key)
        own, single = slot.of(part, flat.optim_at), slot.of(scalars, flat.optim_at)
        if own is None or single is None or value is None:
            continue
        if isinstance(value, torch.Tensor) and value.dim():
            own.copy_(value)
        else:
            single.fill_(float(value))
    whole = _gather_whole(runtime, unit, flat, part, unit.rungs.optim)
    numbers = _gather_whole(runtime, unit, flat, scalars, unit.rungs.optim)
    for slot in flat.slots:
        place = slot.spec.interval.relative_to(0)
        number = numbers[place]
        states = result.setdefault(slot.name, {})
        if number.numel() and not number[0].isnan():
            states[key] = number[0].clone()
        else:
            states[key] = whole[place].view(slot.spec.param.shape).clone()


def clip_grad_norm_(
    runtime: Runtime, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scales gradients so that their total norm is at most ``max_norm``; returns the norm."""
    runtime.require_idle("clip_grad_norm_")
    if runtime.accumulated:
        raise UsageError(
            "clip_grad_norm_ after a backward under no_sync: gradients are not reduced yet."
        )
    grads.read(runtime.trained_slots)
    parts = [
        part
        for slot in runtime.trained_slots
        if slot.has_grad and (part := slot.grad_part()) is not None
    ]
    total = _total_norm(runtime, parts, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise UsageError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so they "
            "cannot be clipped; pass error_if_nonfinite=False to clip anyway."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if parts and not factor == 1.0:
        torch._foreach_mul_(parts, factor.to(parts[0]))
    return total


def _total_norm(runtime: Runtime, parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Every element counted once: only the first replica of each part contributes."""
    norms = [n.double() for n in torch._foreach_norm(parts, norm_type)] if parts else []
    local = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
    infinite = norm_type == float("inf")
    value = local.max() if infinite else (local**norm_type).sum()
    if not _is_first_replica(runtime):
        value = torch.zeros_like(value)
    rows = runtime.grid.control.exchange(value.reshape(1).cpu(), "norm of the gradients")
    # Rows are summed in rank order on every rank, so that all get the same bits.
    total = rows.max() if infinite else rows.sum() ** (1.0 / norm_type)
    return total.float() if not parts or parts[0].dtype != torch.float64 else total


def _is_first_replica(runtime: Runtime) -> bool:
    rank = runtime.grid.place.rank
    return all(
        step.coordinate(rank) == 0
        for step in runtime.root.rungs.ladder.steps[runtime.root.rungs.optim :]
    )


def _persistent_buffers(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def slot_of(runtime: Runtime, parameter: nn.Parameter) -> ParamSlot:
    return next(slot for slot in runtime.slots if slot.parameter is parameter)
