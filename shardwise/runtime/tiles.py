"""Layers in tiles: their own forward is hidden by one that goes from tile to tile."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import UsageError
from shardwise.model import tiling
from shardwise.model.projection import Unread
from shardwise.runtime import guard
from shardwise.runtime.face import TiledFace
from shardwise.runtime.runtime import Runtime, in_autograd


def install(runtime: Runtime) -> None:
    """Makes the layers of tiled parameters compute in tiles; ``runtime.removers`` undo it."""
    for face in runtime.faces:
        if isinstance(face, TiledFace):
            for layer in face.whole.users:
                forward = _Forward(runtime, face, layer)
                runtime.removers.append(forward.remove)


class _Forward:
    """A layer's forward in tiles. It cannot be copied: a copy would run the original's tiles."""

    def __init__(self, runtime: Runtime, face: TiledFace, layer: nn.Module) -> None:
        self._runtime, self._face, self._layer = runtime, face, layer
        self._whole: Callable[..., Any] = layer.forward
        self._tiles = face.whole.tiles
        functools.update_wrapper(self, layer.forward, updated=())
        layer.forward = self  # type: ignore[method-assign]

    def remove(self) -> None:
        if self._layer.__dict__.get("forward") is self:
            del self._layer.__dict__["forward"]

    def __deepcopy__(self, memo: object) -> None:
        raise guard.refuse_copy(self._face.name)

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        if self._face.is_open:
            return self._with_whole(input)
        if isinstance(layer, nn.Embedding):
            return tiling.embedding(self._tiles, input, layer.padding_idx)
        assert isinstance(layer, nn.Linear)
        if self._may_stay_unread:
            return Unread.output(self._tiles, input, layer.bias, self._runtime.late_forward)
        return tiling.linear(self._tiles, input, layer.bias)

    @property
    def _may_stay_unread(self) -> bool:
        wants_loss = any(layer is self._layer for layer in self._face.whole.wants_loss)
        trains = self._layer.training and torch.is_grad_enabled()
        return wants_loss and trains and not in_autograd()

    def _with_whole(self, input: Tensor) -> Any:
        """Inside ``full_params`` the user may have changed the values, so those count."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"'{self._face.name}' is computed in tiles, which cannot be trained inside "
                "shardwise.full_params: leave it first, or use torch.no_grad()."
            )
        return self._whole(input)
