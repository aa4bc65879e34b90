"""Parameters as the user sees them, each with its slots.

Most parameters have one slot in their unit's flat, and use the flat's memory while it is gathered.
A parameter that is computed in tiles ([Note: Tiles] in ``model/tiling.py``) has one slot per tile
and no memory: it is always guarded, except inside ``full_params``. Its gradient and its optimizer
states are those of its tiles together.
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
"""The key in ``optimizer.state`` for the states of a tiled parameter's tiles."""


class Face:
    """A parameter of the user's model, and the owner of its guarded gradient."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.slots: list[ParamSlot] = []
        self.handle: torch.Tensor | None = None
        """What ``grads.py`` put into ``parameter.grad``."""
        self.emptied = False
        """Whether ``parameter.grad`` was emptied for autograd and not by the user."""
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
        """Copies one slot's full value into the whole parameter's in ``found``."""
        if self.parameter not in found:
            shape, device = self.parameter.shape, value.device
            found[self.parameter] = torch.empty(shape, dtype=value.dtype, device=device)
        slot.rows_of(found[self.parameter]).copy_(value.reshape(-1))


class TiledFace(Face):
    """A parameter that is computed in tiles, and the owner of its guarded values."""

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
        """Whether it has its full values: inside ``full_params``."""
        return self._buffer.filled

    def fill(self) -> None:
        """Allocates memory for the whole parameter; ``take`` copies the values."""
        self._buffer.fill()
        guard.open_up([self.parameter])

    def take(self, slot: "ParamSlot") -> None:
        """Copies the rows of a gathered tile."""
        slot.rows_of(self._buffer.tensor).copy_(slot.parameter.detach().reshape(-1))

    def drop(self) -> None:
        """Frees the memory and guards the parameter again."""
        guard.close([self.parameter], tiled=True)
        self._buffer.drop()

    def access(self, what: str) -> None:
        """Always raises, even inside a pass: tiles exist to avoid gathering the whole parameter."""
        raise UsageError(
            f"'{what}' needs all values of parameter '{self.name}', but the plan computes its "
            "layer in tiles: read them inside 'with shardwise.full_params(model):', or, if the "
            "model's own forward does this, raise tiling.numel to "
            f"{self.parameter.numel()}."
        )

    def write(self, value: torch.Tensor) -> None:
        for slot in self.slots:
            slot.runtime.write(slot, slot.rows_of(value))


# --- optimizer states -----------------------------------------------------------------------------


def shown_state(optimizer: Optimizer, slot: "ParamSlot") -> State:
    """What ``optimizer.state`` has for a slot; empty if it has nothing."""
    state: State = optimizer.state.get(slot.face.parameter, {})
    if slot.face.is_tiled:
        return tile_state(state, slot)
    return state


def tile_state(state: State, slot: "ParamSlot") -> State:
    """One tile's state, from the state of its whole parameter."""
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
    """A tiled parameter's state: the states of its tiles, and the numbers that they share.

    The numbers are for torch, which looks for Adam's step when it loads a state.
    """
    first = next(filter(None, tiles), {})
    numbers = {key: value for key, value in first.items() if torch.as_tensor(value).dim() == 0}
    return {**numbers, TILES: tiles}
