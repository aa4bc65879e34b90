"""Turns a model's parameters into units, flats and shards, and back."""

import torch
from torch import nn

from shardwise.comm.carry import Carrier, Carriers, Outer
from shardwise.comm.grid import Grid
from shardwise.core.errors import PlanError
from shardwise.core.layout import ModelSpec
from shardwise.core.topology import Step
from shardwise.device.abilities import HOST, separate_memory
from shardwise.model.inspect import Members
from shardwise.plans.plan import Plan, Rungs, resolve
from shardwise.plans.schedule import UnitOps, outer_step
from shardwise.runtime.flat import Flat, Pools
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.start import Start, rest_on
from shardwise.runtime.surface import guard
from shardwise.runtime.unit import Unit
from shardwise.runtime.values import make_master, writing
from shardwise.tier.budget import Budget
from shardwise.tier.memory import trim_heap
from shardwise.tier.nvme import NvmeStore
from shardwise.tier.pool import Pool
from shardwise.tier.rest import Disk, Homes
from shardwise.tier.staging import Staging


def make_homes(plan: Plan, device: torch.device, rank: int) -> Homes:
    """The tiers of a plan on this rank: their budgets, and the disk if a state rests there."""
    tiers = plan.tiers
    budgets = {
        "device": Budget("device", tiers.device_bytes),
        "cpu": Budget("cpu", tiers.cpu_bytes),
        "nvme": Budget("nvme", tiers.nvme_bytes),
    }
    separate = separate_memory(device)
    host = Pool(HOST, budgets["cpu" if separate else "device"], beside=device)
    if not plan.rests_on("nvme"):
        return Homes(device, budgets, host)
    if not tiers.path:
        raise PlanError(
            f"Plan '{plan.name}' keeps states on tier nvme, but tiers.path is not set; set it to a "
            "folder on a fast disk with enough space."
        )
    store = NvmeStore(tiers.path, rank=rank, budget=budgets["nvme"], checksum=tiers.checksum)
    return Homes(device, budgets, host, Disk(store, host))


def build_runtime(
    model: nn.Module, plan: Plan, grid: Grid, members: list[Members], spec: ModelSpec
) -> Runtime:
    """Shards one unit after the other; collective."""
    homes = make_homes(plan, grid.device, grid.place.rank)
    try:
        return _lay_out(model, plan, grid, members, spec, homes)
    except BaseException:
        homes.close()
        raise


def _lay_out(
    model: nn.Module,
    plan: Plan,
    grid: Grid,
    members: list[Members],
    spec: ModelSpec,
    homes: Homes,
) -> Runtime:
    buffers = homes.budgets["device"]
    staging = Staging(grid.device, Pool(grid.device, buffers), homes.host)
    pools = Pools(Pool(grid.device, buffers), Pool(grid.device, buffers), staging)
    resolved = [resolve(plan, grid.place.topology, unit.name) for unit in spec.units]
    carriers = Carriers(Carrier(grid.device), Carrier(grid.device), Outer(grid.outer, grid.device))
    grid.connect(
        (step for rungs in resolved for step in rungs.ladder.steps),
        _outer_steps(plan, spec, resolved),
    )
    start = Start(model, grid, homes, pools.params)
    units = []
    for index, (unit, unit_spec, rungs) in enumerate(
        zip(members, spec.units, resolved, strict=True)
    ):
        own = plan.for_unit(unit.name)
        flats = [
            Flat(flat, rungs, grid.place.rank, own, homes, pools, unit.name)
            for flat in unit_spec.flats
        ]
        ops = UnitOps(unit_spec, rungs, own, encloses=index == 0)
        built = Unit(index, unit_spec, unit.module, ops, flats)
        _fill_unit(built, unit, start)
        trim_heap()  # of the full values, which are sharded now
        units.append(built)
    homes.settle()
    homes.trim()  # the buffers of whole shards, which only the initial write needed
    pools.trim()
    return Runtime(model, plan, grid, units, pools, carriers, homes)


def _outer_steps(plan: Plan, spec: ModelSpec, resolved: list[Rungs]) -> list[Step]:
    """The steps of the outer lane: refreshes, and the last hop of encoded reductions."""
    found: list[Step] = []
    for unit, rungs in zip(spec.units, resolved, strict=True):
        found += rungs.ladder.steps[rungs.params : rungs.optim]
        index = outer_step(unit, rungs, plan.for_unit(unit.name))
        if index is not None:
            found.append(rungs.ladder.steps[index])
    return found


def _fill_unit(built: Unit, unit: Members, start: "Start") -> None:
    """Moves a unit's values into its shards, with one full parameter in memory at a time (one flat
    on an accelerator, where rank 0's values travel together)."""
    for flat in built.flats:
        if flat.spec.requires_grad and flat.has_master:
            make_master(flat, empty=True)  # it gets the values before they are rounded
        start.receive([unit.params[slot_spec.param.name] for slot_spec in flat.spec.slots])
        with writing(flat) as write:
            for slot_spec in flat.spec.slots:
                parameter = unit.params[slot_spec.param.name]
                slot = start.slot(unit, parameter, slot_spec, flat)
                slot.unit = built
                value = start.value(slot)
                with torch.no_grad():
                    write(slot_spec, value)
                del value
                rest_on(parameter, flat.params.view(slot_spec))
                guard.own(parameter, slot)
                flat.slots.append(slot)
                built.slots.append(slot)
                built.parameters.append(parameter)
                start.filled(slot)
    start.forget()
    if built.travels:
        built.close()


def restore(runtime: Runtime) -> None:
    """Undoes sharding: gives every parameter its own full memory, removes hooks; collective."""
    for remove in runtime.removers:
        remove()
    runtime.removers.clear()
    wholes: dict[nn.Parameter, torch.Tensor] = {}
    for unit in runtime.units:
        runtime.open(unit)
        for slot in unit.slots:
            guard.set_raw_grad(slot.parameter, None)
            if slot.face.is_tiled:
                slot.face.place(wholes, slot, slot.parameter.detach())
            else:
                slot.parameter.data = slot.parameter.detach().clone()
            guard.disown(slot.parameter)
        if unit.is_tile:
            runtime.close(unit)
    for parameter, value in wholes.items():
        guard.open_up([parameter])
        guard.set_raw_grad(parameter, None)
        parameter.data = value
        guard.disown(parameter)
    runtime.grid.close()
    runtime.homes.close()
