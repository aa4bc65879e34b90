"""What each unit holds on a rank, and the operations that change it.

Pure Python, without the memory itself: each function changes the record of what is held, and
returns the operations that do the same to the memory. ``order.py`` decides when.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.plans.ops import Kind, Op, Phase, Place
from shardwise.plans.schedule import UnitOps
from shardwise.plans.walk import Hold, Walk


@dataclass(slots=True, eq=False)
class Held:
    """What a unit holds on this rank, and who needs it."""

    index: int
    ops: UnitOps
    full: bool
    """The full buffer has values, or they are on their way."""
    external: bool
    """Its parameters are read outside its module's forward: gathered for whole passes."""
    kept: bool = False
    """The kept rung has current values."""
    fetched: bool = False
    """P's shard was fetched but not gathered yet."""
    leases: int = 0
    """Claims by the order: gathers that were issued and not given up."""
    hold: Hold | None = None
    """This rank's own claim while it uses the unit."""
    busy: bool = False
    """Whether any call of the unit runs or is in backward; set by ``runtime/uses.py``."""
    source: int | None = None
    """The rung from which the gathers of the current pass start; None: P's."""

    def gather(self, *, exact: bool = False) -> list[Op]:
        """Brings values to the full buffer, from the rung that is fixed for the pass."""
        ops = self.ops.gather(None if exact else self.source, exact=exact)
        if self.fetched:
            ops = tuple([op for op in ops if op.kind is not Kind.FETCH])
        self.full, self.fetched = True, False
        return list(ops)

    def fetch(self) -> list[Op]:
        """Fetches P's shard from its tier ahead of the gather. Nothing if it is read directly into
        the full buffer, which has no memory yet."""
        if self.full or self.fetched:
            return []
        found = [op for op in self.ops.gather(self.source) if op.target is Place.SHARD]
        self.fetched = bool(found)
        return found

    def keep(self) -> list[Op]:
        self.kept = True
        return [self.ops.keep]

    def free(self) -> list[Op]:
        if not self.full or not self.ops.travels:
            return []
        self.full = False
        return [self.ops.free]

    def drop_kept(self) -> list[Op]:
        if not self.kept:
            return []
        self.kept = False
        return [self.ops.drop(Place.KEPT)]

    def discard(self) -> list[Op]:
        """Drops what was fetched but not gathered."""
        if not self.fetched:
            return []
        self.fetched = False
        return [self.ops.drop(Place.SHARD)]

    def fix_source(self) -> None:
        """From now on gathers start from the rung that is kept now.

        What is kept in full until the step needs none: it stayed gathered on all ranks alike. Kept
        until backward it may have been freed on some of them, and then all gather it again.
        """
        whole = self.full and self.ops.kept_rung == 0 and self.ops.plan.keep_until == "step"
        self.source = self.ops.kept_rung if self.kept or whole else None


class Holdings:
    """What the units of a model hold, and how claims on them end."""

    def __init__(self, units: Sequence[UnitOps], keep_until: str) -> None:
        self.units = [
            Held(index, ops, full=not ops.travels, external=ops.encloses)
            for index, ops in enumerate(units)
        ]
        self.in_backward = False
        self.backward_walk: Walk | None = None
        self.phase = Phase.ONLY
        """The phase of the current pass."""
        self.opened = 0
        """How many ``full_params`` are open; while any is, nothing is freed."""
        self._keep_until = keep_until

    def open(self, unit: int) -> list[Op]:
        """Gathers a unit for the user, outside the order and without a lossy wire format."""
        held = self.units[unit]
        return [] if held.full else held.gather(exact=True)

    def close(self, unit: int) -> list[Op]:
        return self.units[unit].free()

    def changed(self, unit: int) -> list[Op]:
        """A unit's values change: drops what was kept or fetched, which is stale."""
        held = self.units[unit]
        return held.drop_kept() + held.discard()

    def release_all(self) -> list[Op]:
        """Before values change: frees all gathered copies of the old ones."""
        ops: list[Op] = []
        for held in self.units:
            held.hold, held.leases, held.busy = None, 0, False
            ops += held.free() + held.discard()
        return ops

    # --- the end of claims ------------------------------------------------------------------------

    @property
    def keeps_on(self) -> bool:
        """Whether the kept rung stays beyond the current backward."""
        return self._keep_until == "step" and not self.phase.synchronises

    def give_back(self, held: Held) -> list[Op]:
        """Ends this rank's use of a unit; the unit is freed when no claim is left."""
        if held.busy or held.external or held.hold is None:
            return []
        last, held.hold = held.hold.last, None
        return self.give_up([held.index]) if last else []

    def give_up(self, units: Iterable[int]) -> list[Op]:
        """Ends one claim of the order on each unit."""
        ops: list[Op] = []
        for index in units:
            held = self.units[index]
            held.leases = max(0, held.leases - 1)
            if held.leases == 0 and not held.busy:
                ops += self._free(held)
        return ops

    def _free(self, held: Held) -> list[Op]:
        if not held.full or self.opened or not held.ops.travels:
            return []
        if self._stays_full(held):
            return []
        if self.in_backward:
            ops = held.free()
            comes_again = self.backward_walk and self.backward_walk.comes_again(held.index)
            if not self.keeps_on and not comes_again:
                ops += held.drop_kept()
            return ops
        kept = held.ops.kept_rung
        if self.phase is not Phase.EVAL and kept == 0:
            return []
        if self.phase is Phase.EVAL or kept is None or held.kept:
            return held.free()
        return held.keep() + held.free()

    def _stays_full(self, held: Held) -> bool:
        """Whether a unit that is kept in full outlives the current backward."""
        keeps = self.in_backward and self.keeps_on and self.phase is not Phase.EVAL
        return keeps and held.ops.kept_rung == 0

    def release_external(self) -> list[Op]:
        """Frees units that were gathered for the whole pass."""
        ops: list[Op] = []
        for held in self.units:
            if held.external and not held.busy:
                held.leases = 0
                ops += [] if self.opened or self._stays_full(held) else held.free()
        return ops
