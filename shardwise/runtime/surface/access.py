"""Full tensors for the user: full_params, state_dict, full_grads and optimizer states."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.plans.ops import Hop
from shardwise.runtime.flat import Flat, torch_dtype
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import grads
from shardwise.runtime.surface.face import TiledFace, shown_state
from shardwise.runtime.surface.opened import open_grads
from shardwise.runtime.unit import State, Unit
from shardwise.runtime.values import write
from shardwise.tier.rest import use


@contextmanager
def full_params(runtime: Runtime, module: nn.Module, write: bool) -> Iterator[None]:
    """Gathers the parameters of a module for reading, or for writing by rank 0."""
    runtime.require_idle("full_params")
    if write:  # what rests in full is written in place
        runtime.await_readers()
    inside = set(module.parameters())
    units = [u for u in runtime.units if any(slot.face.parameter in inside for slot in u.slots)]
    for unit in units:
        if unit.travels and unit.state is State.RESTING and not unit.is_tile:
            runtime.open(unit)
        unit.settle()
    for face in runtime.faces:
        if isinstance(face, TiledFace) and face.parameter in inside and not face.is_open:
            _fill(runtime, face)
    runtime.issuer.opened += 1
    try:
        yield
    finally:
        runtime.issuer.opened -= 1
        if write:
            _write_back(runtime, units)
        if not runtime.opened:
            for face in runtime.faces:
                if isinstance(face, TiledFace):
                    face.drop()
            runtime.release_all()
            runtime.pools.params.trim()  # a pass needs only a few of these buffers


def _fill(runtime: Runtime, face: TiledFace) -> None:
    """Fills a tiled parameter's rows, gathering one tile at a time."""
    face.fill()
    for slot in face.slots:
        with gathered(runtime, slot.unit):
            face.take(slot)


def _write_back(runtime: Runtime, units: list[Unit]) -> None:
    """All ranks take rank 0's values."""
    runtime.await_readers()
    runtime.grid.block_host_until_idle()
    with torch.no_grad():
        for unit in units:
            for slot in unit.slots:
                value = slot.rows_of(slot.face.parameter.detach())
                value = value.contiguous()
                runtime.grid.broadcast(value)
                _take(slot, value)
                if unit.travels:
                    continue
                slot.parameter.view(-1).copy_(value)
            runtime.changed(unit)


def _take(slot: ParamSlot, value: torch.Tensor) -> None:
    """Writes a parameter, but keeps a separate master where the value is unchanged."""
    flat = slot.flat
    if flat.params.master is None or not flat.has_master or not slot.segment.numel:
        write(flat, slot.spec, value)
        return
    with use(flat.params.master) as whole:
        exact = slot.of(whole, flat.optim_at).clone()  # type: ignore[union-attr]
    old = exact.to(flat.dtypes.compute)
    if slot.unit.travels:  # else the user wrote into P; only the master has the old value
        own = slot.segment.relative_to(max(slot.spec.interval.start, flat.part_at.start))
        with use(flat.params.shard) as part:
            old = slot.of(part, flat.part_at)[own].clone()  # type: ignore[index]
        old = old.to(flat.dtypes.compute)
    write(flat, slot.spec, value)
    with use(flat.params.master, writes=True) as whole:
        master = slot.of(whole, flat.optim_at)
        assert master is not None
        # The two may rest on different tiers.
        unchanged = old.to(master.device) == master.to(flat.dtypes.compute)
        master.copy_(torch.where(unchanged, exact, master))


def state_dict(runtime: Runtime, *, rank0_only: bool, master: bool) -> dict[str, torch.Tensor]:
    """Full values by name, streamed unit by unit; ties are listed under all their names."""
    runtime.require_idle("state_dict")
    keeps = runtime.grid.place.rank == 0 or not rank0_only
    values: dict[nn.Parameter, torch.Tensor] = {}
    for unit in runtime.units:
        if master and any(flat.params.master is not None for flat in unit.flats):
            for slot, value in collect_master(runtime, unit, keeps).items():
                slot.face.place(values, slot, value)
        else:
            with gathered(runtime, unit):
                for slot in unit.slots if keeps else ():
                    slot.face.place(values, slot, slot.parameter.detach().cpu())
    if not keeps:
        return {}
    model = runtime.model
    result = {n: values[p] for n, p in model.named_parameters(remove_duplicate=False)}
    persistent = _persistent_buffers(model)
    result |= {n: b.detach().cpu().clone() for n, b in model.named_buffers() if n in persistent}
    return result


@contextmanager
def gathered(runtime: Runtime, unit: Unit) -> Iterator[None]:
    """Gathers one unit inside the context."""
    resting = unit.state is State.RESTING
    if resting:
        runtime.open(unit)
    unit.settle()
    try:
        yield
    finally:
        if resting and (unit.is_tile or not runtime.opened):
            runtime.close(unit)


def collect_master(runtime: Runtime, unit: Unit, keeps: bool) -> dict[ParamSlot, torch.Tensor]:
    """A unit's values in the master's precision, if this rank ``keeps`` them."""
    found = {}
    for flat in unit.flats:
        rest, rung = (flat.params.shard, unit.rungs.params)
        if flat.params.master is not None:
            unit.settle()
            runtime.grid.block_host_until_idle()
            rest, rung = flat.params.master, unit.rungs.optim
        with use(rest) as part:
            whole = _gather_whole(runtime, unit, flat, part, rung)
        for slot in flat.slots if keeps else ():
            value = whole[slot.spec.interval.relative_to(0)].view(slot.spec.param.shape)
            found[slot] = value.cpu().clone()
    return found


def _gather_whole(
    runtime: Runtime, unit: Unit, flat: Flat, part: torch.Tensor, rung: int
) -> torch.Tensor:
    """All-gathers a full flat buffer from the ranks' shards on a rung; collective."""
    ladder = unit.rungs.ladder
    whole = torch.zeros(flat.spec.numel, dtype=part.dtype, device=runtime.grid.device)
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

    runtime.grid.gathers.submit(work).order_stream()
    return whole


def full_grads(runtime: Runtime) -> dict[str, torch.Tensor]:
    """The reduced gradients in full, by parameter name, on every rank."""
    runtime.require_idle("full_grads", before_step=True)
    grads.read(runtime)
    if runtime.accumulated:
        raise UsageError(
            "full_grads needs reduced gradients, but the last backward ran under no_sync; run a "
            "backward outside no_sync first."
        )
    found: dict[nn.Parameter, torch.Tensor] = {}
    for unit in runtime.units:
        for flat in unit.trained:
            if not any(slot.has_grad for slot in flat.slots):
                continue
            with open_grads(flat) as opened:
                assert opened.summed is not None
                whole = _gather_whole(runtime, unit, flat, opened.summed, unit.rungs.optim)
            for slot in flat.slots:
                if slot.has_grad:
                    slot.face.place(found, slot, whole[slot.spec.interval.relative_to(0)])
    return {face.name: found[face.parameter] for face in runtime.faces if face.parameter in found}


def feedback_state(runtime: Runtime) -> dict[str, torch.Tensor]:
    """What error feedback on this rank adds to the next gradients, by unit and flat."""
    runtime.require_idle("feedback_state")
    return {
        f"{unit.name}/{index}": flat.grads.lost.clone()
        for unit in runtime.units
        for index, flat in enumerate(unit.flats)
        if flat.grads.lost is not None
    }


def load_feedback_state(runtime: Runtime, state: dict[str, torch.Tensor]) -> None:
    """Restores what ``feedback_state`` returned on this rank; what is absent starts at zero."""
    runtime.require_idle("load_feedback_state")
    flats = {
        f"{unit.name}/{index}": flat
        for unit in runtime.units
        for index, flat in enumerate(unit.flats)
    }
    for name, lost in state.items():
        if name not in flats or lost.dim() != 2 or lost.shape[1] != flats[name].granule:
            raise UsageError(
                f"Feedback '{name}' of shape {tuple(lost.shape)} fits no flat of this model on "
                "this rank; load it under the plan, ranks and model that it was saved with."
            )
    for name, flat in flats.items():
        flat.grads.lost = state[name].clone() if name in state else None


def optim_state_dict(runtime: Runtime, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Optimizer states in full, by parameter name, on every rank; collective."""
    runtime.require_idle("optim_state_dict")
    result: dict[str, dict[str, Any]] = {}
    for unit in runtime.units:
        for flat in unit.trained:
            for key, names in _state_keys(runtime, optimizer, flat).items():
                _collect_state(runtime, optimizer, unit, flat, key, names, result)
    return result


def _state_keys(runtime: Runtime, optimizer: Optimizer, flat: Flat) -> dict[str, dict[str, str]]:
    """Per state of a flat: the parameters that have it on any rank, each with its dtype.

    A rank whose shard is padding has no state, nor has a parameter that never had a gradient.
    """
    mine = [
        (key, slot.name, str(torch.as_tensor(value).dtype).removeprefix("torch."))
        for slot in flat.slots
        for key, value in shown_state(optimizer, slot).items()
    ]
    seen: list[Any] = [mine]
    if runtime.grid.place.world > 1:
        seen = [None] * runtime.grid.place.world
        dist.all_gather_object(seen, mine)
    keys: dict[str, dict[str, str]] = {}
    for key, name, dtype in sorted({entry for entries in seen for entry in entries}):
        keys.setdefault(key, {})[name] = dtype
    return keys


def _collect_state(
    runtime: Runtime,
    optimizer: Optimizer,
    unit: Unit,
    flat: Flat,
    key: str,
    dtypes: dict[str, str],
    result: dict[str, dict[str, Any]],
) -> None:
    """One state of a flat's parameters in full; a number travels in all elements of its own."""
    widest = max((torch_dtype(name) for name in dtypes.values()), key=lambda d: d.itemsize)
    part = torch.zeros(flat.optim_at.numel, dtype=widest, device=runtime.grid.device)
    is_number = torch.zeros_like(part, dtype=torch.bool)
    for slot in flat.slots:
        value = runtime.steps.state_of(optimizer, slot).get(key)
        own, single = slot.of(part, flat.optim_at), slot.of(is_number, flat.optim_at)
        if own is not None and single is not None and value is not None:
            own.copy_(torch.as_tensor(value))
            single.fill_(torch.as_tensor(value).dim() == 0)
    whole = _gather_whole(runtime, unit, flat, part, unit.rungs.optim)
    numbers = _gather_whole(runtime, unit, flat, is_number, unit.rungs.optim)
    for slot in flat.slots:
        if slot.name in dtypes:
            place = slot.spec.interval.relative_to(0)
            value = whole[place].to(torch_dtype(dtypes[slot.name]), copy=True)
            states = result.setdefault(slot.face.name, {})
            if numbers[place][0]:
                states[key] = value[0]
                continue
            if key not in states:
                states[key] = value.new_empty(slot.face.parameter.shape)
            slot.rows_of(states[key]).copy_(value)


def _persistent_buffers(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names
