"""The bytes of a unit's flats under a plan, for the memory model."""

from dataclasses import dataclass

from shardwise.core.layout import DTYPE_BYTES, FlatSpec, UnitSpec
from shardwise.plans.placed import trained_flats
from shardwise.plans.plan import Plan, Rungs


@dataclass(frozen=True, slots=True)
class Sized:
    """A unit with its plan resolved, and the bytes of its parts."""

    unit: UnitSpec
    plan: Plan
    rungs: Rungs

    def part_numel(self, flat: FlatSpec, rung: int) -> int:
        return flat.numel // self.rungs.ladder.parts[rung]

    def compute_bytes(self, rung: int) -> int:
        """All flats of the unit on a rung, in the compute dtype."""
        return sum(
            self.part_numel(flat, rung) * self.dtype_bytes("compute", flat)
            for flat in self.unit.flats
        )

    def rests(self, state: str, tier: str) -> bool:
        return bool(getattr(self.plan, state).tier == tier)

    def dtype_bytes(self, use: str, flat: FlatSpec) -> int:
        return DTYPE_BYTES[self.dtype(use, flat)]

    def dtype(self, use: str, flat: FlatSpec) -> str:
        precision = self.plan.precision
        choose = {
            "compute": precision.compute_dtype,
            "reduce": precision.reduce_dtype,
            "master": precision.master_dtype,
        }
        return choose[use](flat.dtype)

    @property
    def sums_in_pieces(self) -> bool:
        """Whether gradients go to a disk in pieces no larger than windows, as without hops."""
        return self.rests("grads", "nvme") and self.rungs.bottom == 0

    def sums_bytes(self) -> int:
        """This rank's shard of summed gradients."""
        return sum(
            self.part_numel(flat, self.rungs.optim) * self.dtype_bytes("master", flat)
            for flat in trained_flats(self.unit)
        )

    def held_bytes(self) -> int:
        """What it accumulates under no_sync, unless that is the sums."""
        if self.rungs.grads == self.rungs.optim:
            return 0
        return sum(
            self.part_numel(flat, self.rungs.grads) * self.dtype_bytes("master", flat)
            for flat in trained_flats(self.unit)
        )

    def full_bytes(self, use: str) -> int:
        """All trained flats in full, in the dtype of a use."""
        return sum(flat.numel * self.dtype_bytes(use, flat) for flat in trained_flats(self.unit))
