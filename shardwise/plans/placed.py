"""A unit under a plan: the rungs of its states, and the bytes that a rank has on each."""

from collections.abc import Sequence

from shardwise.core.layout import FlatSpec, UnitSpec
from shardwise.plans.hops import Sizes, hops_between, shard_bytes
from shardwise.plans.ops import Hop, Kind, Lane, Op, Place
from shardwise.plans.plan import Plan, Rungs, has_master


def trained_flats(unit: UnitSpec) -> tuple[FlatSpec, ...]:
    """The flats that have gradients and optimizer states."""
    return tuple(flat for flat in unit.flats if flat.requires_grad)


def travels(rungs: Rungs, plan: Plan) -> bool:
    """Whether a unit's parameters are gathered and freed: they are sharded or on another tier."""
    return rungs.params > 0 or plan.params.tier != "device"


def kept_rung(rungs: Rungs, plan: Plan, *, encloses: bool) -> int | None:
    """The rung of gathered parameters that stays after forward; None: only P's shard stays."""
    if encloses or plan.keep == "full":
        return 0
    return rungs.keep if rungs.keep < rungs.params else None


def updates_in_windows(plan: Plan, rungs: Rungs, dtype: str) -> bool:
    """Whether the update works on borrowed slices, because some state is on a tier."""
    if plan.grads.tier != "device" or plan.optim.tier != "device":
        return True
    return plan.params.tier == "nvme" and not has_master(plan, rungs, dtype)


class Placed:
    """One unit with its plan resolved.

    ``encloses`` marks the root unit: its forward encloses all others, so its parameters stay
    gathered from the beginning of forward to the end of backward.
    """

    def __init__(self, unit: UnitSpec, rungs: Rungs, plan: Plan, *, encloses: bool = False) -> None:
        self.unit, self.name, self.rungs, self.plan = unit, unit.name, rungs, plan
        self.encloses, self.is_tile = encloses, "/" in unit.name
        self.trained = trained_flats(unit)
        self.travels = bool(unit.flats) and travels(rungs, plan)
        self.kept_rung = kept_rung(rungs, plan, encloses=encloses)
        away = plan.grads.tier != "device" or plan.optim.tier != "device"
        self.updates_early = plan.tiers.update == "backward" and away and not encloses
        """Whether the update runs beside backward; not for the root, whose gradients come last."""

    @property
    def sends_differences(self) -> bool:
        """Whether a refresh sends the differences of the new values to the old."""
        return any(hop.format is not None and hop.format.delta for hop in self.climb())

    def bytes(self, flats: Sequence[FlatSpec], use: str, rung: int) -> int:
        """The bytes of a rank's shards of some flats on a rung, in the dtype of a use."""
        return shard_bytes(self.sizes(flats, use), self.rungs, rung)

    def sizes(self, flats: Sequence[FlatSpec], use: str) -> Sizes:
        """Flats with their dtype for a use: ``compute``, ``reduce`` or ``master``."""
        dtype = getattr(self.plan.precision, f"{use}_dtype")
        return [(flat, dtype(flat.dtype)) for flat in flats]

    def op(
        self,
        kind: Kind,
        lane: Lane = Lane.COMPUTE,
        source: Place | None = None,
        target: Place | None = None,
        **more: object,
    ) -> Op:
        return Op(kind, self.name, lane, source, target, **more)  # type: ignore[arg-type]

    def down(self, top: int, bottom: int) -> tuple[Hop, ...]:
        """The hops of a reduction."""
        sizes = self.sizes(self.trained, "reduce")
        return hops_between(sizes, self.rungs, top, bottom, self.plan.grads.wire)

    def climb(self) -> tuple[Hop, ...]:
        """The hops of a refresh."""
        rungs, sizes = self.rungs, self.sizes(self.trained, "compute")
        if not self.trained or rungs.params == rungs.optim:
            return ()
        return climbing(hops_between(sizes, rungs, rungs.params, rungs.optim, self.plan.optim.wire))


def climbing(hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """Hops given from the top down, in the order in which values climb them."""
    return tuple(reversed(hops))
