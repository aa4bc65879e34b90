"""Turning a model's parameters into units, flats and parts, and back."""

import torch
from torch import nn

from shardwise.comm.carry import Carrier, Carriers, Outer
from shardwise.comm.grid import Grid
from shardwise.core.errors import PlanError
from shardwise.core.layout import ModelSpec, Slot
from shardwise.core.topology import Step
from shardwise.model.deferred import deferred_seed, forget, is_deferred, materialize
from shardwise.model.inspect import Members
from shardwise.model.tiling import Tile
from shardwise.plans.plan import Plan, Rungs, resolve
from shardwise.plans.schedule import UnitOps, outer_step
from shardwise.runtime.flat import Flat, Pools
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import guard
from shardwise.runtime.surface.face import Face, TiledFace
from shardwise.runtime.unit import Unit
from shardwise.tier.budget import Budget
from shardwise.tier.memory import trim_heap
from shardwise.tier.nvme import NvmeStore
from shardwise.tier.pool import Pool
from shardwise.tier.rest import Disk, Homes

Seeds = dict[int, int]
"""The agreed seed of each deferred tensor, by the tensor's id."""


def target_device(model: nn.Module) -> torch.device:
    """Where the model's states live: where its parameters are, or the accelerator, or CPU."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None else torch.device("cpu")


def make_homes(plan: Plan, device: torch.device, rank: int) -> Homes:
    """The tiers of a plan on this rank: budgets, and the disk where anything rests there."""
    tiers = plan.tiers
    budgets = {
        "device": Budget("device", tiers.device_bytes),
        "cpu": Budget("cpu", tiers.cpu_bytes),
        "nvme": Budget("nvme", tiers.nvme_bytes),
    }
    if not plan.rests_on("nvme"):
        return Homes(device, budgets)
    if not tiers.path:
        raise PlanError(
            f"Plan '{plan.name}' rests states on tier nvme, but tiers.path names no folder; set it "
            "to one on a fast disk with enough room."
        )
    store = NvmeStore(tiers.path, rank=rank, budget=budgets["nvme"], checksum=tiers.checksum)
    on_cuda = device.type == "cuda"
    buffers = budgets["cpu" if on_cuda else "device"]
    return Homes(device, budgets, Disk(store, Pool(torch.device("cpu"), buffers, pinned=on_cuda)))


def build_runtime(
    model: nn.Module, plan: Plan, grid: Grid, members: list[Members], spec: ModelSpec
) -> Runtime:
    """Lays every unit into its parts, one after the other; collective."""
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
    pools = Pools(Pool(grid.device, buffers), Pool(grid.device, buffers))
    resolved = [resolve(plan, grid.place.topology, unit.name) for unit in spec.units]
    carriers = Carriers(Carrier(grid.device), Carrier(grid.device), Outer(grid.outer, grid.device))
    grid.connect(
        (step for rungs in resolved for step in rungs.ladder.steps),
        _outer_steps(plan, spec, resolved),
    )
    start = _Start(model, grid, homes, pools.params)
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
        trim_heap()  # of the full values: they are in parts now
        units.append(built)
    homes.settle()
    homes.trim()  # the buffers of whole parts, which only the laying out needed
    return Runtime(model, plan, grid, units, pools, carriers, homes)


def _outer_steps(plan: Plan, spec: ModelSpec, resolved: list[Rungs]) -> list[Step]:
    """Where the outer lane goes: refreshes, and the last hop of encoded reductions."""
    found: list[Step] = []
    for unit, rungs in zip(spec.units, resolved, strict=True):
        found += rungs.ladder.steps[rungs.params : rungs.optim]
        index = outer_step(unit, rungs, plan.for_unit(unit.name))
        if index is not None:
            found.append(rungs.ladder.steps[index])
    return found


def _fill_unit(built: Unit, unit: Members, start: "_Start") -> None:
    """Moves a unit's values into its parts; never holds more than one parameter beside them."""
    for flat in built.flats:
        if flat.spec.requires_grad and flat.has_master:
            flat.params.make_master(empty=True)  # it takes values that are not rounded yet
        with flat.params.writing() as write:
            for slot_spec in flat.spec.slots:
                parameter = unit.params[slot_spec.param.name]
                slot = start.slot(unit, parameter, slot_spec, flat)
                slot.unit = built
                value = start.value(slot)
                with torch.no_grad():
                    write(slot_spec, value)
                del value
                _rest_on(parameter, flat.params.view(slot_spec))
                guard.own(parameter, slot)
                flat.slots.append(slot)
                built.slots.append(slot)
                built.parameters.append(parameter)
                start.filled(slot)
    if built.travels:
        built.close()


class _Start:
    """Where parameters start from: the model's own initialisation, or rank 0's values."""

    def __init__(self, model: nn.Module, grid: Grid, homes: Homes, pool: Pool) -> None:
        self._grid, self._homes, self._pool = grid, homes, pool
        self._seeds = _agree_on_seeds(model, grid)
        self._tiled: dict[int, TiledFace] = {}
        """By the id of their parameter."""
        self._whole: torch.Tensor | None = None
        """The values of the tiled parameter whose tiles are being filled."""
        _settle_buffers(model, grid, self._seeds)

    def slot(self, unit: Members, parameter: nn.Parameter, spec: Slot, flat: Flat) -> ParamSlot:
        """A parameter's place, or that of one of its tiles."""
        whole, tile = unit.whole, unit.module
        if whole is None:
            return ParamSlot(parameter, spec, flat, Face(spec.param.name, parameter))
        assert isinstance(tile, Tile)
        face = self._tiled.get(id(whole.parameter))
        if face is None:
            face = TiledFace(whole, flat.dtypes.compute, self._grid.device, self._pool)
            self._tiled[id(whole.parameter)] = face
        return ParamSlot(parameter, spec, flat, face, tile.start * spec.param.shape[1])

    def value(self, slot: ParamSlot) -> torch.Tensor:
        """The full value of a slot to start from."""
        parameter, device = slot.face.parameter, self._grid.device
        if not parameter.is_meta:
            value = slot.parameter.detach()
            on_cpu = value.cpu().contiguous()
            self._grid.control.broadcast(on_cpu)
            return on_cpu.to(value.device)
        seed = self._seeds.get(id(parameter))
        if not slot.face.is_tiled:
            return materialize(parameter, device=device, seed=seed)
        if self._whole is None:
            # Not in memory, which is what a tiled parameter may be too large for.
            disk = self._homes.disk if device.type == "cpu" else None
            allocate = disk.store.scratch if disk is not None else None
            self._whole = materialize(parameter, device=device, seed=seed, allocate=allocate)
        return slot.rows_of(self._whole)

    def filled(self, slot: ParamSlot) -> None:
        """A slot has its values; with the last tile the whole parameter's own memory goes."""
        face = slot.face
        if isinstance(face, TiledFace) and len(face.slots) == len(face.whole.tiles):
            self._whole = None
            _rest_on(face.parameter, face.view)
            guard.own(face.parameter, face)
            guard.close([face.parameter], tiled=True)


def _agree_on_seeds(model: nn.Module, grid: Grid) -> Seeds:
    """The seed of every deferred tensor's initialisation: rank 0's, as with values."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if is_deferred(t)]
    mine = [deferred_seed(tensor) for tensor in tensors]
    agreed = grid.control.broadcast_object(mine, "seeds of the initialisation")
    assert isinstance(agreed, list)
    return {id(tensor): seed for tensor, seed in zip(tensors, agreed, strict=True)}


def _rest_on(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Makes the same Parameter object a view of its flat's storage."""
    if not parameter.is_meta:
        parameter.data = view
        return
    # `.data` cannot change the device, so the object gets the inside of another one.
    forget(parameter)
    replacement = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
    replacement.data = view  # not nn.Parameter(view): that would share the flat's version counter
    torch.utils.swap_tensors(parameter, replacement)


def _settle_buffers(model: nn.Module, grid: Grid, seeds: Seeds) -> None:
    """Buffers are rank 0's at the start and local afterwards."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                buffer = module._buffers[name] = materialize(
                    buffer, device=grid.device, seed=seeds.get(id(buffer))
                )
            on_cpu = buffer.detach().cpu().contiguous()
            grid.control.broadcast(on_cpu)
            with torch.no_grad():
                buffer.copy_(on_cpu)


def restore(runtime: Runtime) -> None:
    """Gives every parameter its own full memory again and removes every trace; collective."""
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
