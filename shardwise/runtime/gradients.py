"""The gradient memory of one flat: shards of sums. ``local_grad.py`` has what arrives."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardwise.comm.carry import Carrier, Leg, Outer
from shardwise.comm.link import accumulate
from shardwise.core.ticket import DONE, Ticket
from shardwise.core.topology import Interval
from shardwise.device.abilities import separate_memory
from shardwise.plans.ops import Hop
from shardwise.plans.plan import Plan
from shardwise.runtime.local_grad import LocalGrad
from shardwise.tier.pool import Pool, zeros
from shardwise.tier.rest import Rest, Stored
from shardwise.tier.staging import Brought

if TYPE_CHECKING:
    from shardwise.runtime.flat import Flat
    from shardwise.runtime.slot import ParamSlot


class GradMemory:
    """This rank's memory for the gradients of a trained flat."""

    def __init__(self, flat: "Flat", plan: Plan, pool: Pool) -> None:
        self._flat, self._tier = flat, plan.grads.tier
        self.local = LocalGrad(flat, pool)
        self._frees = separate_memory(flat.device) and self.is_resident
        """Whether memory of gradients is freed when they are dropped: on a device forward can use
        it. On CPU fresh pages would cost more."""
        beside_device = separate_memory(flat.device) and self._tier == "nvme"
        self.reads_ahead = beside_device and not self._in_pieces
        """Whether to ``expect`` reductions: there the program itself enqueues them, and would wait
        for the disk before it can enqueue more compute. On CPU their lane waits."""
        self.summed: Rest | None = None
        """The summed gradient on OS's rung, in the master's dtype; made when first needed."""
        self.has_sums = False
        """Whether ``summed`` has values that were not dropped."""
        self.held: Rest | None = None
        """Gradients accumulated under no_sync on G's rung, in the master's dtype."""
        self.holds = False
        """Whether ``held`` has values that were not dropped or reduced."""
        self.factor = 1.0
        """A stored sum must still be multiplied by this; see ``scale``."""
        self.norms: dict[ParamSlot, torch.Tensor] = {}
        """The norms of a stored sum per parameter, computed while it was in memory."""
        self.lost: torch.Tensor | None = None
        """What error feedback adds to the next gradients; see ``residual``."""
        self.closing: Ticket = DONE
        """For the work of the last reduction on the outer lane."""
        self._summing = False
        """Whether that is the sum, and not what is held."""
        self._open: Brought | None = None
        """What a reduction sums into on the device, until it goes to its tier."""

    @property
    def is_resident(self) -> bool:
        """Whether sums rest on the device; elsewhere norms are computed on their way there."""
        return self._tier == "device"

    @property
    def _in_pieces(self) -> bool:
        """Whether sums are written to their tier piece by piece: with no hops, nothing needs them
        as a whole."""
        return self._flat.rungs.bottom == 0 and self._tier == "nvme"

    # --- verbs --------------------------------------------------------------------------------

    def hold(
        self, grad: torch.Tensor, legs: Sequence[Leg], carrier: Carrier, *, adds: bool
    ) -> None:
        """Under no_sync: reduces to G's rung, and adds to the gradients held there."""
        if self.held is None:
            numel = self._flat.interval(self._flat.rungs.grads).numel
            self.held = self._make("accumulated gradients", numel)
        self._summing = False
        self._open = self._flat.staging.bring(self.held.whole(reads=adds), reads=adds)
        self._add_to_held(grad, legs, carrier, self._open.tensor, adds=adds)

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
        """Reduces to the bottom rung, into this rank's bottom shard of the sums.

        ``joins``: add the gradients held on G's rung. With ``outer`` the last leg runs there.
        """
        self.closing.order_stream()
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
        """Replicas of an OS shard all-gather the sums that each computed."""
        assert self._open is not None
        flat = self._flat
        carrier.climb(flat, self._open.tensor, flat.optim_at.start, legs, flat.dtypes.reduce)

    def store(self, outer: Outer | None) -> None:
        """Starts to write sums to their tier; with ``outer`` after that lane's work."""
        if outer is None:
            self._close()
        else:
            self.closing = outer.afterwards(self._close)

    # --- sums ---------------------------------------------------------------------------------

    def expect(self, *, synchronises: bool) -> None:
        """The first gradient of a backward arrives: starts to read what a reduction will add to."""
        rungs = self._flat.rungs
        if self.holds and isinstance(self.held, Stored):
            self.held.expect()
        sums = synchronises or rungs.grads == rungs.bottom
        if sums and self.has_sums and isinstance(self.summed, Stored):
            self.summed.expect()

    def _make(self, what: str, numel: int) -> Rest:
        dtype = self._flat.dtypes.master
        if self._frees:
            return self._flat.make_unfilled(what, numel, dtype)
        return self._flat.make_rest(self._tier, what, numel, dtype)

    def forget(self) -> None:
        """All gradients were dropped."""
        self.holds = self.has_sums = False
        for rest in (self.summed, self.held):
            if rest is not None:
                rest.discard()  # what was read ahead for a reduction that does not add to it
        if self._frees:
            for rest in (self.summed, self.held):
                if rest is not None:
                    rest.free()
            self.summed = self.held = self._open = None

    def make_sums(self, *, zero: bool = True) -> Rest:
        """The summed gradient; if it is new, it is zero, unless it will be overwritten anyway."""
        if self.summed is None:
            self.summed = self._make("gradients", self._flat.optim_at.numel)
            if zero and self._frees:
                loan = self.summed.whole()
                loan.for_stream().zero_()
                loan.give_back(changed=True)
        return self.summed

    def _open_sums(self, *, adds: bool) -> torch.Tensor:
        """The summed gradient on the device; ``adds``: with its present values."""
        self._summing = True
        self._open = self._flat.staging.bring(
            self.make_sums(zero=adds).whole(reads=adds), reads=adds
        )
        if self.factor != 1.0:
            self._open.tensor.mul_(self.factor)
            self.factor = 1.0
        return self._open.tensor

    def _close(self) -> None:
        opened, self._open = self._open, None
        assert opened is not None
        if self._summing and not self.is_resident:
            self._note_norms(opened.tensor, self._flat.optim_at)
        opened.end(changed=True)

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
        """Adds the last micro-batch to the held gradients, and copies the sum back to ``grad``, so
        that it travels on in the reduce dtype. The held gradients are not read again."""
        assert self.held is not None
        with self._flat.staging.use(self.held) as held:
            self._add_to_held(grad, legs, carrier, held, adds=True)
            return grad[self._flat.interval(self._flat.rungs.grads).relative_to(0)].copy_(held)

    def _sum_in_pieces(self, grad: torch.Tensor, *, scale: float, adds: bool) -> None:
        flat, sums = self._flat, self.make_sums()
        for place, opened in flat.staging.windows(sums, flat.window_numel, reads=adds):
            if adds and self.factor != 1.0:
                opened.tensor.mul_(self.factor)
            accumulate(grad[place.relative_to(0)], opened.tensor, scale=scale, add=adds)
            self._note_norms(opened.tensor, place)
            opened.end(changed=True)
        self.factor = 1.0

    def _note_norms(self, sums: torch.Tensor, place: Interval) -> None:
        """Computes norms while sums are in memory, so that clipping need not read them again."""
        parts = {slot: slot.of(sums, place) for slot in self._flat.slots}
        found = {slot: part for slot, part in parts.items() if part is not None}
        norms = torch._foreach_norm(list(found.values())) if found else ()
        for slot, norm in zip(found, norms, strict=True):
            before = self.norms.get(slot)
            self.norms[slot] = norm if before is None else torch.hypot(before, norm)

    def scale(self, factor: float) -> None:
        """Multiplies a stored sum by a factor when it is next in memory."""
        self.factor *= factor

    def residual(self, hop: Hop) -> torch.Tensor | None:
        """The encoding errors of earlier reductions on a hop: one row per other member.

        Only on the hop to the bottom rung, where it is smallest. Made when first needed; see
        ``keep_error`` in ``wire/kernels.py``.
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
