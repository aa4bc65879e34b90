"""Brings a flat's gradients into memory for a while, wherever they rest."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from shardwise.runtime.flat import Flat
from shardwise.runtime.slot import ParamSlot
from shardwise.tier.rest import use


@contextmanager
def open_grads(flat: Flat, *, writes: bool = False) -> Iterator["OpenGrads"]:
    """This rank's shards of a flat's gradients, in memory inside the context."""
    grads = flat.grads
    with ExitStack() as stack:
        summed = held = None
        if grads.summed is not None and grads.has_sums:
            scales = grads.factor != 1.0
            summed = stack.enter_context(use(grads.summed, writes=writes or scales))
            if scales:
                summed.mul_(grads.factor)
                grads.factor = 1.0
            if writes or scales:
                grads.norms = {}
        if grads.held is not None and grads.holds:
            held = stack.enter_context(use(grads.held, writes=writes))
        yield OpenGrads(flat, summed, held)


@dataclass(frozen=True)
class OpenGrads:
    """This rank's shards of a flat's gradients while they are in memory."""

    flat: Flat
    summed: torch.Tensor | None
    held: torch.Tensor | None

    def summed_of(self, slot: ParamSlot) -> torch.Tensor | None:
        """This rank's shard of a parameter's summed gradient; None if it has none."""
        return slot.of(self.summed, self.flat.optim_at)

    def of(self, slot: ParamSlot) -> list[torch.Tensor]:
        """This rank's shards of a parameter's gradient: summed, and held under no_sync."""
        held = slot.of(self.held, self.flat.interval(self.flat.rungs.grads))
        return [part for part in (self.summed_of(slot), held) if part is not None]
