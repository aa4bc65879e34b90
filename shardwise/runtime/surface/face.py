"""Parameters as the user sees them, each with its places in the sharded world.

Most have one place: a slot of their unit's flat, whose memory is theirs while it is gathered. A
parameter that is computed in tiles ([Note: Tiles] in ``model/tiling.py``) has one for each, and no
memory: it is always guarded, except inside ``full_params``. Its gradient and its optimizer states
are those of its tiles together.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.model.tiling import Whole
from shardwise.runtime.surface import guard
from shardwise.tier.memory import SwappedBuffer
from shardwise.tier.pool import Pool

if TYPE_CHECKING:
    from shardwise.runtime.slot import ParamSlot

State = dict[str, Any]
TILES = "tiles"
"""Where ``optimizer.state`` has the states of a tiled parameter's tiles."""


class Face:
    """A parameter of the user's model; answers for its gradient while that is guarded."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.slots: list[ParamSlot] = []
        self.handle: torch.Tensor | None = None
        """What was put into ``parameter.grad``; see ``grads.py``."""
        self.emptied = False
        """Whether ``parameter.grad`` was emptied for autograd, and not by the user."""
        self.guarded: torch.Tensor | None = None

    is_tiled = False

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.slots[0].flat.dtypes.master

    def highest(self, flag: torch.Tensor) -> torch.Tensor:
        control = self.slots[0].runtime.grid.control
        return control.highest(flag.reshape(-1).cpu(), "check for overflow")

    def place(
        self, found: "dict[nn.Parameter, torch.Tensor]", slot: "ParamSlot", value: torch.Tensor
    ) -> None:
        """Puts a copy of one slot's full value where the whole parameter's is collected."""
        if self.parameter not in found:
            shape, device = self.parameter.shape, value.device
            found[self.parameter] = torch.empty(shape, dtype=value.dtype, device=device)
        slot.rows_of(found[self.parameter]).copy_(value.reshape(-1))


class TiledFace(Face):
    """A parameter whose rows are its tiles'; also answers for its values."""

    is_tiled = True

    def __init__(self, whole: Whole, dtype: torch.dtype, device: torch.device, pool: Pool) -> None:
        super().__init__(whole.name, whole.parameter)
        self.whole = whole
        self._buffer = SwappedBuffer(whole.parameter.numel(), dtype, device, pool)

    @property
    def view(self) -> torch.Tensor:
        return self._buffer.tensor.view(self.whole.parameter.shape)

    @property
    def is_open(self) -> bool:
        """Whether it has its values, inside ``full_params``."""
        return self._buffer.filled

    def fill(self) -> None:
        """Memory for all of it; ``take`` brings values."""
        self._buffer.fill()
        guard.open_up([self.parameter])

    def take(self, slot: "ParamSlot") -> None:
        """A gathered tile's rows."""
        slot.rows_of(self._buffer.tensor).copy_(slot.parameter.detach().reshape(-1))

    def drop(self) -> None:
        guard.close([self.parameter], tiled=True)
        self._buffer.drop()

    def access(self, what: str) -> None:
        """Inside a pass as well: gathering all of it is what tiles are to avoid."""
        raise UsageError(
            f"'{what}' needs the values of parameter '{self.name}' as a whole, but the plan "
            "computes its layer in tiles: read them inside 'with shardwise.full_params(model):', "
            "or, if the model's own forward does this, raise tiling.numel to "
            f"{self.parameter.numel()}."
        )

    def write(self, value: torch.Tensor) -> None:
        for slot in self.slots:
            slot.runtime.write(slot, slot.rows_of(value))


# --- optimizer states -----------------------------------------------------------------------------


def shown_state(optimizer: Optimizer, slot: "ParamSlot") -> State:
    """What ``optimizer.state`` has for a slot; empty where it has nothing."""
    state: State = optimizer.state.get(slot.face.parameter, {})
    if slot.face.is_tiled:
        return tile_state(state, slot)
    return state


def tile_state(state: State, slot: "ParamSlot") -> State:
    """One tile's state out of its whole parameter's."""
    tiles: list[State] = state.get(TILES, [{}] * len(slot.face.slots))
    return tiles[slot.face.slots.index(slot)]


def show_state(optimizer: Optimizer, slot: "ParamSlot", state: State | None) -> None:
    """Puts a slot's state into ``optimizer.state``, or takes it out."""
    face = slot.face
    if not face.is_tiled:
        if state is None:
            optimizer.state.pop(face.parameter, None)
        else:
            optimizer.state[face.parameter] = state
        return
    before = optimizer.state.pop(face.parameter, {})
    tiles = [tile_state(before, other) for other in face.slots]
    tiles[face.slots.index(slot)] = state or {}
    if any(tiles):
        optimizer.state[face.parameter] = whole_state(tiles)


def whole_state(tiles: list[State]) -> State:
    """A tiled parameter's state: its tiles', and the numbers that all of them have alike.

    Those are for torch, which looks for Adam's step when it loads.
    """
    first = next(filter(None, tiles), {})
    numbers = {key: value for key, value in first.items() if torch.as_tensor(value).dim() == 0}
    return {**numbers, TILES: tiles}
