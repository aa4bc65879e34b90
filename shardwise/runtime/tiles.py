"""Replaces the forward of layers in tiles by one that computes tile after tile."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.core.errors import UsageError
from shardwise.model.projection import in_tiles
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import guard
from shardwise.runtime.surface.face import TiledFace
from shardwise.tier.memory import return_large_blocks


def install(runtime: Runtime) -> None:
    """Makes layers with tiled parameters compute in tiles; ``runtime.removers`` undo it."""
    tiled = [face for face in runtime.faces if isinstance(face, TiledFace)]
    for face in tiled:
        for layer in face.whole.users:
            forward = _Forward(runtime, face, layer)
            runtime.removers.append(forward.remove)
    if tiled:
        return_large_blocks()


class _Forward:
    """A layer's forward in tiles. It cannot be copied: a copy would run the original's tiles."""

    def __init__(self, runtime: Runtime, face: TiledFace, layer: nn.Module) -> None:
        self._runtime, self._face, self._layer = runtime, face, layer
        self._whole: Callable[..., Tensor] = layer.forward
        functools.update_wrapper(self, layer.forward, updated=())
        layer.forward = self

    def remove(self) -> None:
        if self._layer.__dict__.get("forward") is self:
            del self._layer.__dict__["forward"]

    def __deepcopy__(self, memo: object) -> None:
        raise guard.refuse_copy(self._face.name)

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]

    def __call__(self, input: Tensor) -> Tensor:
        if self._face.is_open:
            return self._with_whole(input)
        return in_tiles(self._face.whole, self._layer, input, self._runtime.forward.late)

    def _with_whole(self, input: Tensor) -> Tensor:
        """Inside ``full_params`` the user may have changed the full values, so they are used."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"'{self._face.name}' is computed in tiles, which cannot be trained inside "
                "shardwise.full_params: leave it first, or use torch.no_grad()."
            )
        return self._whole(input)
