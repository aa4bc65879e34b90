"""The local gradient of one flat: what autograd computes on this rank in one backward."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.device.abilities import has_streams
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import Pool

if TYPE_CHECKING:
    from shardwise.runtime.flat import Flat
    from shardwise.runtime.slot import ParamSlot


@dataclass(frozen=True)
class FullGrad:
    """A complete local gradient that is being reduced."""

    tensor: torch.Tensor
    _storage: torch.UntypedStorage
    _pool: Pool

    def release(self) -> None:
        """Returns the memory to the pool; no rank may still read it."""
        self._pool.give(self._storage)


class LocalGrad:
    """The full gradient of a trained flat, as far as it has arrived; in the reduce dtype."""

    def __init__(self, flat: "Flat", pool: Pool) -> None:
        self._flat, self._pool = flat, pool
        self.full: torch.Tensor | None = None
        self.has_begun = False
        """Whether a gradient of this backward has arrived."""
        self._storage: torch.UntypedStorage | None = None
        self._copies_together = has_streams(flat.device)
        self._arrived: list[tuple[slice, torch.Tensor]] = []
        """Places in the full buffer, and the gradients that are still to be copied there."""
        self._zeros: torch.Tensor | None = None
        """What is copied to padding."""

    def _buffer(self) -> torch.Tensor:
        """The full buffer for the gradients of this backward."""
        if self.full is None:
            numel, dtype = self._flat.spec.numel, self._flat.dtypes.reduce
            self._storage = self._pool.take(numel * dtype.itemsize)
            self.full = tensor_on(self._storage, numel, dtype)
        return self.full

    def arrive(self, slot: "ParamSlot", grad: torch.Tensor, *, adds: bool) -> None:
        """Takes a parameter's gradient: copies it to its place, or adds it to one that is there.

        On a device with streams copies wait for those of the other parameters. Then one launch
        copies them all, and compute waits for the last reduction, which still reads the buffer,
        only when this unit's backward is over.
        """
        self.has_begun = True
        if self._copies_together:
            if not adds:
                self._arrived.append((slot.place, grad.reshape(-1)))
                return
            self._copy_arrived()
        full = self.full if self.full is not None else self._buffer()
        place = full[slot.place].view(slot.spec.param.shape)
        place.add_(grad) if adds else place.copy_(grad)

    def _copy_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        if arrived:
            full = self._buffer()
            torch._foreach_copy_(
                [full[place] for place, _ in arrived], [grad for _, grad in arrived]
            )

    def take(self) -> FullGrad:
        """Hands the full buffer to a reduction; the next gradient gets a new one. Missing gradients
        and padding are zero."""
        full, spec = self._buffer(), self._flat.spec
        zero = [slot.place for slot in self._flat.slots if not slot.pending]
        if padding := spec.numel - spec.slots[-1].interval.stop:
            zero.append(slice(spec.numel - padding, spec.numel))
        if not self._copies_together:
            for place in zero:
                full[place].zero_()
        else:
            if zero:
                zeros = self._zeros_for(zero)
                self._arrived += [(place, zeros[: place.stop - place.start]) for place in zero]
            self._copy_arrived()
        storage = self._storage
        assert storage is not None
        self.full = self._storage = None
        self.has_begun = False
        return FullGrad(full, storage, self._pool)

    def _zeros_for(self, places: list[slice]) -> torch.Tensor:
        """As many zeros as the largest place has elements."""
        numel = max(place.stop - place.start for place in places)
        if self._zeros is None or self._zeros.numel() < numel:
            self._zeros = torch.zeros(
                numel, dtype=self._flat.dtypes.reduce, device=self._flat.device
            )
        return self._zeros
