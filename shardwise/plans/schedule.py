"""Every operation of a unit under a plan, as data: the only description of what a plan does.

``UnitOps`` makes the operations. The issuer (``order.py``) decides which of them are issued when;
the runtime and the simulator share it. ``expected.py`` drives it through a whole pass, for
``explain``, for the simulator and for tests.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace

from shardwise.core.layout import UnitSpec
from shardwise.plans.hops import hops_between
from shardwise.plans.ops import Kind, Lane, Move, Op, Place
from shardwise.plans.placed import Placed, climbing
from shardwise.plans.plan import Plan, Rungs
from shardwise.plans.sums import Holds, ready_ops
from shardwise.plans.updates import OPTIM_WORDS, update_ops

Ops = tuple[Op, ...]

_HAVE_VALUES = (Kind.FETCH, Kind.GATHER, Kind.REFRESH)
"""The kinds that bring values to the full buffer."""


def outer_step(unit: UnitSpec, rungs: Rungs, plan: Plan) -> int | None:
    """The step of a reduction's last hop, if it overlaps the inner hops of later chunks.

    None if nothing is encoded, if there is one hop, or if replicas wait for the sums.
    """
    ops = UnitOps(unit, rungs, plan)
    reduce = next((op for op in ops.ready() if op.kind is Kind.REDUCE), None)
    return reduce.hops[-1].step if reduce is not None and reduce.overlaps else None


class UnitOps(Placed):
    """The operations of one unit. Each is made once, when first asked for."""

    def __init__(
        self,
        unit: UnitSpec,
        rungs: Rungs,
        plan: Plan,
        *,
        encloses: bool = False,
        optim_words: int = OPTIM_WORDS,
    ) -> None:
        super().__init__(unit, rungs, plan, encloses=encloses)
        self._optim_words = optim_words
        self._made: dict[Hashable, Ops] = {}
        self._alike: UnitOps | None = None

    def named(self, unit: UnitSpec) -> "UnitOps":
        """The operations of an identical unit: the same, under its own name."""
        found = UnitOps(unit, self.rungs, self.plan, encloses=self.encloses)
        found._optim_words, found._alike = self._optim_words, self
        return found

    def with_optim_words(self, count: int) -> None:
        """Sets how many words the optimizer really stores per element."""
        self._optim_words = count
        self._made.clear()

    # --- parameters ---------------------------------------------------------------------------

    def gather(self, source: int | None = None, *, exact: bool = False) -> Ops:
        """Brings parameters to the full buffer: from a held rung, or (None) from P.

        ``exact``: without a lossy wire format, for users who read or write values.
        """
        return self._once("_gather", source, exact)

    @property
    def keep(self) -> Op:
        return self._once("_keep")[0]

    @property
    def free(self) -> Op:
        return self._once("_free")[0]

    def drop(self, what: Place) -> Op:
        """Drops ``KEPT``, or ``SHARD``: what was fetched but not gathered."""
        return self._once("_drop", what)[0]

    # --- gradients ----------------------------------------------------------------------------

    def ready(
        self, *, synchronises: bool = True, held: Holds | None = None, summed: Holds | None = None
    ) -> Ops:
        """What is done with a unit's complete gradients.

        ``held`` and ``summed`` tell which flats already have gradients: accumulated by
        micro-batches on G's rung, and reduced on OS's.
        """
        nothing = (False,) * len(self.trained)
        return self._once("_ready", synchronises, held or nothing, summed or nothing)

    def update(self) -> Ops:
        """The optimizer's update, and the refresh of P with the new values."""
        return self._once("_update")

    # --- inside -------------------------------------------------------------------------------

    def _once(self, make: str, *args: Hashable) -> Ops:
        key = (make, *args)
        found = self._made.get(key)
        if found is None:
            if self._alike is not None:
                found = tuple(replace(op, unit=self.name) for op in self._alike._once(make, *args))
            else:
                found = tuple(getattr(self, make)(*args))
            self._made[key] = found
        return found

    def _gather(self, source: int | None, exact: bool) -> Iterable[Op]:
        if source == 0:
            return
        rungs, plan = self.rungs, self.plan
        rung = rungs.params if source is None else source
        own = self.bytes(self.unit.flats, "compute", rung)
        if source is None and plan.params.tier != "device":
            # If the tier has P in full there is no hop: it is read into the full buffer.
            target = Place.FULL if rung == 0 else Place.SHARD
            yield self.op(
                Kind.FETCH, Lane.TIER, Place.SHARD, target,
                moves=(Move(plan.params.tier, reads=own),), after=(Kind.REFRESH,),
            )  # fmt: skip
        if rung > 0:
            sizes = self.sizes(self.unit.flats, "compute")
            wire = "" if exact else plan.params.wire
            yield self.op(
                Kind.GATHER, Lane.GATHER, Place.SHARD if source is None else Place.KEPT, Place.FULL,
                hops=climbing(hops_between(sizes, rungs, 0, rung, wire)),
                copies=own, after=(Kind.FETCH, Kind.REFRESH),
            )  # fmt: skip

    def _keep(self) -> Iterable[Op]:
        assert self.kept_rung
        copies = self.bytes(self.unit.flats, "compute", self.kept_rung)
        yield self.op(
            Kind.KEEP, source=Place.FULL, target=Place.KEPT, copies=copies, after=_HAVE_VALUES
        )

    def _free(self) -> Iterable[Op]:
        yield self.op(Kind.FREE, source=Place.FULL, after=_HAVE_VALUES)

    def _drop(self, what: Place) -> Iterable[Op]:
        yield self.op(Kind.DROP, source=what)

    def _ready(self, synchronises: bool, held: Holds, summed: Holds) -> Iterable[Op]:
        return ready_ops(self, synchronises, held, summed)

    def _update(self) -> Iterable[Op]:
        return update_ops(self, self._optim_words)
