"""The parameter memory of one flat: P's shard, the full buffer, the kept rung and the master."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardwise.comm.carry import Carrier, Leg, finish
from shardwise.core.layout import Slot
from shardwise.core.ticket import DONE, Ticket
from shardwise.device.abilities import separate_memory
from shardwise.plans.ops import Place
from shardwise.plans.plan import Plan
from shardwise.tier.memory import SwappedBuffer
from shardwise.tier.pool import Pool
from shardwise.tier.rest import Resident, Rest, Stored

if TYPE_CHECKING:
    from shardwise.runtime.flat import Flat


class ParamMemory:
    """This rank's memory for the parameters of a flat."""

    def __init__(self, flat: "Flat", plan: Plan, pool: Pool) -> None:
        self._flat = flat
        rungs, dtype, device = flat.rungs, flat.dtypes.compute, flat.device
        self.full = SwappedBuffer(flat.spec.numel, dtype, device, pool)
        self.shard: Rest
        if rungs.params == 0 and plan.params.tier == "device":
            # P rests in full: the full buffer is the shard and is never dropped. Its padding is in
            # the blocks of wire formats, so it must not be what the memory had before.
            self.full.fill()
            self.full.tensor.zero_()
            self.shard = Resident(self.full.tensor)
        else:
            numel = flat.part_at.numel
            rests_as = flat.dtypes.master if flat.rests_in_master else dtype
            self.shard = flat.make_rest(plan.params.tier, "parameters", numel, rests_as)
        self.kept: SwappedBuffer | None = None
        if rungs.keep not in (0, rungs.params):
            self.kept = SwappedBuffer(flat.interval(rungs.keep).numel, dtype, device, pool)
        self.master: Rest | None = None
        """OS's shard in the master's dtype: a slice of ``shard`` unless ``has_master``, and all of
        it if that ``rests_in_master``. Only for trained flats, and only once there is an
        optimizer."""

    def view(self, slot: Slot) -> torch.Tensor:
        """A parameter's place in the full buffer."""
        return self.full.view(slot.interval.relative_to(0), slot.param.shape)

    # --- verbs --------------------------------------------------------------------------------

    def fetch(self, target: Place | None) -> Ticket:
        """Starts to read the shard from its tier: ahead of use, or directly into ``target``."""
        if target is not Place.FULL:
            self.shard.prefetch()
            return DONE
        if isinstance(self.shard, Stored) and not separate_memory(self._flat.device):
            return self.shard.read_into(self.full.tensor)
        return self._flat.staging.bring_into(self.full.tensor, self.shard)

    def gather(self, source: Place | None, legs: Sequence[Leg], carrier: Carrier) -> None:
        """Fills the full buffer from the shard or the kept rung; the top rung is filled last."""
        flat, full = self._flat, self.full.tensor
        if source is Place.KEPT:
            assert self.kept is not None
            full[flat.interval(flat.rungs.keep).relative_to(0)].copy_(self.kept.tensor)
        else:
            self._copy_shard(full[flat.part_at.relative_to(0)])
        carrier.climb(flat, full, 0, legs)

    def _copy_shard(self, target: torch.Tensor) -> None:
        loan = self.shard.whole()
        target.copy_(loan.for_stream(), non_blocking=True)
        loan.give_back(changed=False)

    def keep(self) -> None:
        """Copies the kept rung out of the full buffer."""
        if self.kept is not None:
            place = self._flat.interval(self._flat.rungs.keep).relative_to(0)
            self.kept.fill()
            self.kept.tensor.copy_(self.full.tensor[place])

    def drop(self, what: Place | None) -> None:
        """Drops the kept rung, or a shard that was fetched but not gathered."""
        if what is Place.SHARD:
            self.shard.discard()
        elif self.kept is not None:
            self.kept.drop()

    def refresh(self, legs: Sequence[Leg], carrier: Carrier, *, own_is_new: bool) -> None:
        """Brings the updated master to P's rung.

        ``own_is_new``: the update has already written this rank's elements of P.
        """
        flat, master = self._flat, self.master
        assert master is not None
        differs = bool(legs and (format := flat.format(legs[0].hop)) and format.delta)
        from_master = flat.has_master and not own_is_new
        if not legs and not from_master:
            return
        origin, reads = flat.part_at.start, differs or not from_master
        staging = flat.staging
        with staging.use(self.shard, reads=reads, writes=True) as work:
            if differs:
                with staging.use(master) as exact:
                    carrier.climb_by_difference(flat, exact, work, origin, legs)
            else:
                if from_master:
                    with staging.use(master) as exact:
                        work[flat.own].copy_(exact)
                carrier.climb(flat, work, origin, legs)
            if not self.shard.is_resident:
                finish(legs)  # others still read this memory, which is freed next
