"""Initial values of parameters: the model's own initialisation, or rank 0's values."""

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm.grid import Grid
from shardwise.core.layout import Slot
from shardwise.device.abilities import separate_memory
from shardwise.model.deferred import deferred_seed, forget, is_deferred, materialize
from shardwise.model.inspect import Members
from shardwise.model.tiling import Tile
from shardwise.runtime.flat import Flat
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import guard
from shardwise.runtime.surface.face import Face, TiledFace
from shardwise.tier.pool import Pool
from shardwise.tier.rest import Homes

Seeds = dict[int, int]
"""The agreed seed of each deferred tensor, by the id of the tensor."""


class Start:
    """Gives every parameter its initial value: deferred initialisation, or rank 0's value."""

    def __init__(self, model: nn.Module, grid: Grid, homes: Homes, pool: Pool) -> None:
        self._grid, self._homes, self._pool = grid, homes, pool
        self._seeds = _agree_on_seeds(model, grid)
        self._tiled: dict[int, TiledFace] = {}
        """By the id of the tiled parameter."""
        self._whole: torch.Tensor | None = None
        """The values of the tiled parameter whose tiles are being filled."""
        self._received: dict[int, torch.Tensor] = {}
        """Rank 0's values of some real parameters, by their id."""
        _settle_buffers(model, grid, self._seeds)

    def slot(self, unit: Members, parameter: nn.Parameter, spec: Slot, flat: Flat) -> ParamSlot:
        """The slot of a parameter, or of one of its tiles."""
        whole, tile = unit.whole, unit.module
        if whole is None:
            return ParamSlot(parameter, spec, flat, Face(spec.param.name, parameter))
        assert isinstance(tile, Tile)
        face = self._tiled.get(id(whole.parameter))
        if face is None:
            face = TiledFace(whole, flat.dtypes.compute, self._grid.device, self._pool)
            self._tiled[id(whole.parameter)] = face
        return ParamSlot(parameter, spec, flat, face, tile.start * spec.param.shape[1])

    def receive(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gets rank 0's values of those parameters that are not deferred; collective.

        On an accelerator they travel together through its own backend; between CPUs each travels
        when it is asked for.
        """
        self._received.clear()
        real = [p for p in parameters if not p.is_meta]
        if not real or not separate_memory(self._grid.device):
            return
        sizes = [p.numel() for p in real]
        together = torch.empty(sum(sizes), dtype=real[0].dtype, device=self._grid.device)
        for parameter, place in zip(real, together.split(sizes), strict=True):
            place.view(parameter.shape).copy_(parameter.detach())
            self._received[id(parameter)] = place.view(parameter.shape)
        self._grid.broadcast(together)

    def forget(self) -> None:
        """Frees what was received, which is in the shards now."""
        self._received.clear()

    def value(self, slot: ParamSlot) -> torch.Tensor:
        """The full initial value of a slot."""
        parameter, device = slot.face.parameter, self._grid.device
        if not parameter.is_meta:
            if (received := self._received.get(id(slot.parameter))) is not None:
                return received
            value = slot.parameter.detach().to(device).contiguous()
            self._grid.broadcast(value)
            return value
        seed = self._seeds.get(id(parameter))
        if not slot.face.is_tiled:
            return materialize(parameter, device=device, seed=seed)
        if self._whole is None:
            # On the disk if there is one: a tiled parameter may be too large for memory.
            disk = None if separate_memory(device) else self._homes.disk
            allocate = disk.store.scratch if disk is not None else None
            self._whole = materialize(parameter, device=device, seed=seed, allocate=allocate)
        return slot.rows_of(self._whole)

    def filled(self, slot: ParamSlot) -> None:
        """A slot has its values. After the last tile the whole parameter's memory is freed."""
        face = slot.face
        if isinstance(face, TiledFace) and len(face.slots) == len(face.whole.tiles):
            self._whole = None
            rest_on(face.parameter, face.view)
            guard.own(face.parameter, face)
            guard.close([face.parameter], tiled=True)


def _agree_on_seeds(model: nn.Module, grid: Grid) -> Seeds:
    """The initialisation seed of every deferred tensor; all ranks take rank 0's."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if is_deferred(t)]
    mine = [deferred_seed(tensor) for tensor in tensors]
    agreed = grid.control.broadcast_object(mine, "seeds of the initialisation")
    assert isinstance(agreed, list)
    return {id(tensor): seed for tensor, seed in zip(tensors, agreed, strict=True)}


def _settle_buffers(model: nn.Module, grid: Grid, seeds: Seeds) -> None:
    """Buffers start with rank 0's values; afterwards each rank has its own.

    They move to the device with the parameters; if those are there, each stays where it is.
    """
    moves = any(p.device != grid.device for p in model.parameters())
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                buffer = module._buffers[name] = materialize(
                    buffer, device=grid.device, seed=seeds.get(id(buffer))
                )
            elif moves and buffer.device != grid.device:
                if buffer not in moved:  # several modules may share it
                    moved[buffer] = buffer.to(grid.device)
                buffer = module._buffers[name] = moved[buffer]
            on_cpu = buffer.detach().cpu().contiguous()
            grid.control.broadcast(on_cpu)
            with torch.no_grad():
                buffer.copy_(on_cpu)


def rest_on(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Makes the same Parameter object a view of its flat's storage."""
    grad, parameter.grad = parameter.grad, None
    if not parameter.is_meta and torch._has_compatible_shallow_copy_type(parameter, view):
        parameter.data = view
    else:
        _swap_for(parameter, view)
    if grad is not None:
        parameter.grad = grad.to(view.device)


def _swap_for(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """`.data` cannot change some kinds of device, so the object swaps contents with a new one."""
    forget(parameter)
    replacement = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
    replacement.data = view  # not nn.Parameter(view): that would share the flat's version counter
    torch.utils.swap_tensors(parameter, replacement)
