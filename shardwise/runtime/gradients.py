"""The gradient memory of one flat: the full buffer of a backward, and what rests of sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.comm.carry import Carrier, Leg, Outer
from shardwise.comm.link import accumulate
from shardwise.core.ticket import DONE, Ticket
from shardwise.core.topology import Interval
from shardwise.plans.ops import Hop
from shardwise.plans.plan import Plan
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import Pool, zeros
from shardwise.tier.rest import Loan, Rest, on_device

if TYPE_CHECKING:
    from shardwise.runtime.flat import Flat
    from shardwise.runtime.slot import ParamSlot


@dataclass(frozen=True)
class FullGrad:
    """A complete, local gradient on its way through a reduction."""

    tensor: torch.Tensor
    _storage: torch.UntypedStorage
    _pool: Pool

    def release(self) -> None:
        """Back to the pool, once no rank reads it any more."""
        self._pool.give(self._storage)


class GradMemory:
    """What this rank has of a trained flat's gradients."""

    def __init__(self, flat: "Flat", plan: Plan, pool: Pool) -> None:
        self._flat, self._tier, self._pool = flat, plan.grads.tier, pool
        self.full: torch.Tensor | None = None
        """The local gradient of the current backward in the reduce dtype, as far as it arrived."""
        self._storage: torch.UntypedStorage | None = None
        self.summed: Rest | None = None
        """The summed gradient on OS's rung, in the master's dtype; made when first needed."""
        self.has_sums = False
        """Whether ``summed`` has anything since it was last dropped."""
        self.held: Rest | None = None
        """Gradients accumulated under no_sync on G's rung, in the master's dtype."""
        self.holds = False
        """Whether ``held`` has anything since it was last dropped or reduced on."""
        self.factor = 1.0
        """What a stored sum still has to be multiplied by; see ``scale``."""
        self.norms: dict[ParamSlot, torch.Tensor] = {}
        """Of a stored sum: norms of its parameters, taken when it was in memory."""
        self.lost: torch.Tensor | None = None
        """What error feedback will add to the next gradients; see ``residual``."""
        self.closing: Ticket = DONE
        """After what the last reduction still does on the outer lane."""
        self._open: Loan | None = None
        """What a reduction sums into, until it goes to its tier."""
        self._sums: torch.Tensor | None = None
        """The same where hops can take it: on the device."""

    @property
    def is_resident(self) -> bool:
        return self._tier != "nvme"

    @property
    def _in_pieces(self) -> bool:
        """Whether sums go to their tier piece by piece: nobody else has any, so no hop needs them
        as a whole."""
        return self._flat.rungs.bottom == 0 and not self.is_resident

    # --- the full buffer ----------------------------------------------------------------------

    def buffer(self) -> torch.Tensor:
        """What the gradients of this backward are written to."""
        if self.full is None:
            numel, dtype = self._flat.spec.numel, self._flat.dtypes.reduce
            self._storage = self._pool.take(numel * dtype.itemsize)
            self.full = tensor_on(self._storage, numel, dtype)
        return self.full

    def take(self) -> FullGrad:
        """Hands the full buffer over to a reduction."""
        tensor, storage = self.buffer(), self._storage
        assert storage is not None
        self.full = self._storage = None
        return FullGrad(tensor, storage, self._pool)

    # --- verbs --------------------------------------------------------------------------------

    def hold(
        self, grad: torch.Tensor, legs: Sequence[Leg], carrier: Carrier, *, adds: bool
    ) -> None:
        """Under no_sync: reduces to G's rung and adds to what is held there."""
        if self.held is None:
            numel = self._flat.interval(self._flat.rungs.grads).numel
            self.held = self._make("accumulated gradients", numel)
        self._open = self.held.lend(0, self.held.numel, reads=adds)
        with on_device(self._open.wait(), self._flat.device) as held:
            self._add_to_held(grad, legs, carrier, held, adds=adds)

    def reduce(
        self,
        grad: torch.Tensor,
        legs: Sequence[Leg],
        carrier: Carrier,
        *,
        scale: float,
        adds: bool,
        joins: bool,
        outer: Outer | None = None,
    ) -> None:
        """Reduces to the bottom, into this rank's bottom shard of the sums.

        ``joins``: with what is held on G's rung. With ``outer`` the last leg goes on there.
        """
        self.closing.wait()
        if not adds:
            self.factor = 1.0
        self.norms = {}
        if self._in_pieces:
            self._sum_in_pieces(grad, scale=scale, adds=adds)
            return
        flat, top = self._flat, 0
        if joins:
            top = flat.rungs.grads
            grad = self._join_held(grad, [leg for leg in legs if leg.high < top], carrier)
            legs = [leg for leg in legs if leg.high >= top]
        sums = self._open_sums(adds=adds)
        bottom = flat.interval(flat.rungs.bottom)
        out = sums[bottom.relative_to(flat.optim_at.start)]
        if not legs:
            grad = grad[bottom.relative_to(flat.interval(top).start)]
        carrier.descend(flat, grad, top, legs, out, scale=scale, add=adds, outer=outer)
        if outer is not None:
            self.closing = outer.afterwards(lambda: None)

    def replicate(self, legs: Sequence[Leg], carrier: Carrier) -> None:
        """Replicas of OS's shard collect the sums that others made."""
        assert self._sums is not None
        flat = self._flat
        carrier.climb(flat, self._sums, flat.optim_at.start, legs, flat.dtypes.reduce)

    def store(self, outer: Outer | None) -> None:
        """What was summed begins to go to its tier; after the outer lane's work, if there is."""
        if outer is None:
            self._close()
        else:
            self.closing = outer.afterwards(self._close)

    # --- sums ---------------------------------------------------------------------------------

    def _make(self, what: str, numel: int) -> Rest:
        return self._flat.make_rest(self._tier, what, numel, self._flat.dtypes.master)

    def make_sums(self) -> Rest:
        if self.summed is None:
            self.summed = self._make("gradients", self._flat.optim_at.numel)
        return self.summed

    def _open_sums(self, *, adds: bool) -> torch.Tensor:
        """The summed gradient in memory, on the device; ``adds``: with what it holds."""
        self._open = self.make_sums().lend(0, self._flat.optim_at.numel, reads=adds)
        rested = self._open.wait()
        if self.factor != 1.0:
            rested.mul_(self.factor)
            self.factor = 1.0
        self._sums = rested.to(self._flat.device, non_blocking=True)
        return self._sums

    def _close(self) -> None:
        loan, sums = self._open, self._sums
        self._open = self._sums = None
        assert loan is not None
        if sums is not None:
            if not self.is_resident:
                self._note_norms(sums, self._flat.optim_at)
            if sums is not loan.tensor:
                loan.tensor.copy_(sums)
        loan.give_back(changed=True)

    def _add_to_held(
        self,
        grad: torch.Tensor,
        legs: Sequence[Leg],
        carrier: Carrier,
        held: torch.Tensor,
        *,
        adds: bool,
    ) -> None:
        if legs:
            carrier.descend(self._flat, grad, 0, legs, held, scale=1.0, add=adds)
        else:
            own = grad[self._flat.interval(self._flat.rungs.grads).relative_to(0)]
            accumulate(own, held, scale=1.0, add=adds)

    def _join_held(self, grad: torch.Tensor, legs: Sequence[Leg], carrier: Carrier) -> torch.Tensor:
        """What is held, and the last micro-batch's: back where it was computed, so that what is
        raw travels on in the reduce dtype here as well. Nobody reads what was held again."""
        assert self.held is not None
        loan = self.held.lend(0, self.held.numel)
        with on_device(loan.wait(), self._flat.device) as held:
            self._add_to_held(grad, legs, carrier, held, adds=True)
            own = grad[self._flat.interval(self._flat.rungs.grads).relative_to(0)].copy_(held)
        loan.give_back(changed=False)
        return own

    def _sum_in_pieces(self, grad: torch.Tensor, *, scale: float, adds: bool) -> None:
        sums, flat = self.make_sums(), self._flat
        for start in range(0, flat.spec.numel, flat.window_numel):
            place = Interval(start, min(start + flat.window_numel, flat.spec.numel))
            loan = sums.lend(place.start, place.stop, reads=adds)
            piece = loan.wait()
            if adds and self.factor != 1.0:
                piece.mul_(self.factor)
            own = grad[place.relative_to(0)].to(piece.device)
            accumulate(own, piece, scale=scale, add=adds)
            self._note_norms(piece, place)
            loan.give_back(changed=True)
        self.factor = 1.0

    def _note_norms(self, sums: torch.Tensor, place: Interval) -> None:
        """Norms while gradients are in memory, so that clipping need not read them again."""
        parts = {slot: slot.of(sums, place) for slot in self._flat.slots}
        found = {slot: part for slot, part in parts.items() if part is not None}
        norms = torch._foreach_norm(list(found.values())) if found else ()
        for slot, norm in zip(found, norms, strict=True):
            before = self.norms.get(slot)
            self.norms[slot] = norm if before is None else torch.hypot(before, norm)

    def scale(self, factor: float) -> None:
        """Multiplies a stored sum when it is next in memory."""
        self.factor *= factor

    def residual(self, hop: Hop) -> torch.Tensor | None:
        """What earlier reductions lost on a hop with error feedback: a row for each other member.

        Only on the hop to the bottom, where it is smallest. Made when first needed; see
        ``add_residual`` in ``comm/carry.py``.
        """
        flat = self._flat
        format = flat.format(hop)
        is_last = flat.rungs.ladder.parts[hop.step + 1] == flat.rungs.granules
        if format is None or not format.feedback or not is_last:
            return None
        if self.lost is None:
            numel = (hop.size - 1) * flat.granule
            self.lost = zeros(numel, torch.float32, flat.device).view(-1, flat.granule)
        return self.lost
