"""A unit at run time: its flats, its state, and the verbs that the schedule's operations name.

A unit is in one of four states; what each costs in memory on this rank:

RESTING     P's part only, unless that rests on a disk (and the kept rung, if any)
COMING      the full buffer has memory and is being filled on the gather lane
GATHERED    the full buffer holds current values; parameters are ordinary tensors
REFRESHING  P rests in full, and updated values are still arriving
"""

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm.carry import Carriers, Leg, finish
from shardwise.comm.grid import Grid
from shardwise.comm.lane import Early
from shardwise.core.layout import UnitSpec
from shardwise.core.ticket import DONE, Chained, Ticket
from shardwise.core.trace import span
from shardwise.model.tiling import Tile
from shardwise.plans.plan import Plan, Rungs
from shardwise.plans.schedule import (
    Hop,
    Kind,
    Op,
    Phase,
    Trigger,
    UnitOps,
    gather_ops,
    outer_step,
    travels,
    unit_ops,
)
from shardwise.runtime.flat import Flat, FullGrad, ParamSlot
from shardwise.runtime.surface import guard

if TYPE_CHECKING:
    from shardwise.runtime.order import Hold


class State(StrEnum):
    """See the module's docstring."""

    RESTING = "resting"
    COMING = "coming"
    GATHERED = "gathered"
    REFRESHING = "refreshing"


_MOVES = {
    (State.RESTING, State.COMING),
    (State.COMING, State.GATHERED),
    (State.GATHERED, State.RESTING),
    (State.GATHERED, State.COMING),  # a collective that others need, though we have it
    (State.GATHERED, State.REFRESHING),
    (State.REFRESHING, State.GATHERED),
    (State.REFRESHING, State.REFRESHING),
}


class _Later:
    """A ticket for work that is done when somebody waits for it."""

    def __init__(self, work: Callable[[Early], None]) -> None:
        self._work: Callable[[Early], None] | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with torch.no_grad():
                work(lambda: None)


class Unit:
    """Parameters that are gathered, reduced and updated together."""

    def __init__(
        self,
        index: int,
        spec: UnitSpec,
        module: nn.Module,
        rungs: Rungs,
        plan: Plan,
        grid: Grid,
        carriers: Carriers,
        flats: list[Flat],
        *,
        encloses: bool,
    ) -> None:
        self.index, self.name, self.spec, self.module = index, spec.name, spec, module
        self.rungs, self.plan, self.flats, self.encloses = rungs, plan, flats, encloses
        self.slots: list[ParamSlot] = []
        self._grid, self._carriers = grid, carriers
        self._ops: dict[Phase, UnitOps] = {
            phase: unit_ops(spec, rungs, plan, phase, encloses=encloses) for phase in Phase
        }
        for ops in self._ops.values():  # every rank can name every exchange of the others
            for op in (op for some in ops.values() for op in some):
                for flat in range(len(flats)):
                    self._keys(op.kind, flat, op.hops)
        self._outer_step = outer_step(spec, rungs, plan)
        self.travels = bool(flats) and travels(rungs, plan)
        """Whether using this unit takes a gather at all."""
        self.state = State.RESTING if self.travels else State.GATHERED
        self._ticket: Ticket = DONE
        self._refreshed: Ticket = DONE
        """The claim on updated values' way to P's part."""
        self._refreshing = False
        """Whether they may still be on it."""
        self._kept_version = -1
        self._source: int | None = None
        """The rung that the gathers of the current pass start from, while that is fixed."""
        self._source_is_fixed = False
        self.version = 0
        """Counts updates of the values; copies of an older version are never used."""
        # Book-keeping of uses, for runtime/runtime.py:
        self.leases = 0
        self.running = 0
        self.in_backward: set[object] = set()
        self.arrived: set[ParamSlot] = set()
        """Parameters that got a gradient since a backward of this unit's calls began."""
        self.hold: Hold | None = None
        self.is_tile = isinstance(module, Tile)
        self.external = encloses
        """Its parameters are read outside its module's forward: gathered for whole passes."""

    def __repr__(self) -> str:
        return f"<unit {self.name!r}: {self.spec.numel} parameters, {self.state}>"

    @property
    def trained(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.spec.requires_grad]

    def ops(self, phase: Phase, trigger: Trigger) -> tuple[Op, ...]:
        return self._ops[phase][trigger]

    def op(self, phase: Phase, trigger: Trigger, kind: Kind) -> Op | None:
        return next((op for op in self.ops(phase, trigger) if op.kind is kind), None)

    @property
    def update_op(self) -> Op | None:
        """The update, whenever the plan has it happen."""
        at_step = self.op(Phase.ONLY, Trigger.STEP, Kind.STEP)
        return at_step or self.op(Phase.ONLY, Trigger.GRADS_READY, Kind.STEP)

    @property
    def updates_in_backward(self) -> bool:
        return self.op(Phase.ONLY, Trigger.GRADS_READY, Kind.STEP) is not None

    # --- parameters ---------------------------------------------------------------------------

    def gather(self, *, exact: bool = False) -> tuple[Op, ...]:
        """Begins to fill the full buffer, from the kept rung where that is current.

        ``exact``: from P itself, and raw whatever the plan's wire is.
        """
        source = None if exact else self._source_rung()
        ops = gather_ops(self.spec, self.rungs, self.plan, source, exact=exact)
        hops = ops[-1].hops
        self._move(State.COMING)
        for flat in self.flats:
            flat.full.fill()
        if source is None:
            self._prefetch()
        flats, carrier = self.flats, self._carriers.gathers
        legs = [self._legs("gather", Kind.GATHER, i, hops) for i in range(len(flats))]

        def work(early: Early) -> None:
            self._refreshed.wait()
            with span("gather", f"gather {self.name}"):
                for i, flat in enumerate(flats):
                    flat.gather(legs[i], carrier, from_part=source is None)
                    if i == len(flats) - 1:
                        early()
                    finish(legs[i])

        # Without hops there is nothing to do until the values are used, and then they are there.
        in_lane = bool(hops) or self._refreshing
        self._ticket = self._grid.gathers.submit(work) if in_lane else _Later(work)
        return ops

    def fetch(self) -> None:
        """Begins to bring P's part from its tier, ahead of the gather."""
        if self.state is State.RESTING and self._source_rung() is None:
            self._prefetch()

    def _prefetch(self) -> None:
        # A refresh that still runs writes what would be read: the gather waits for it, and reads
        # then.
        if not self._refreshing:
            for flat in self.flats:
                flat.prefetch()

    def settle(self) -> None:
        """Waits for values that are on their way; afterwards parameters are ordinary tensors."""
        if self.state in (State.COMING, State.REFRESHING):
            self._ticket.wait()
            self._move(State.GATHERED)
            guard.open_up(self._parameters())

    def keep(self) -> None:
        """Copies the rung that the plan keeps out of the full buffer."""
        for flat in self.flats:
            flat.keep()
        self._kept_version = self.version

    def drop_kept(self) -> None:
        for flat in self.flats:
            if flat.kept is not None:
                flat.kept.drop()
        self._kept_version = -1

    def free(self) -> None:
        """Returns the full buffer's memory; values rest in parts again."""
        self.settle()
        if self.state is State.GATHERED and self.travels:
            guard.close(self._parameters())
            for flat in self.flats:
                flat.full.drop()
            self._move(State.RESTING)

    def bump(self) -> None:
        """The values changed: older copies are stale."""
        self.version += 1
        self.drop_kept()
        self.drop_fetched()

    def drop_fetched(self) -> None:
        """Drops what was brought from P's tier and not gathered."""
        for flat in self.flats:
            flat.part.discard()

    def refresh(self, op: Op | None, updated: Collection[Flat] = ()) -> None:
        """After the update: new values climb to P's rung, beside whatever comes next.

        In a lane of their own: the gathers of the next forward begin when the first unit has its
        new values, not when all have. ``updated`` are the flats whose own elements of P are new.
        """
        self.bump()
        flats = self.trained
        carrier = self._carriers.outer.carrier
        if op is None:
            for flat in flats:
                flat.refresh((), carrier, own_is_new=flat in updated)
            return
        legs = [self._legs("outer", Kind.REFRESH, i, op.hops) for i in range(len(flats))]
        if not self.travels:
            self._move(State.REFRESHING)
            guard.close(self._parameters())
        self._refreshing = True

        def work(early: Early) -> None:
            with span("refresh", f"refresh {self.name}"):
                for i, flat in enumerate(flats):
                    flat.refresh(legs[i], carrier, own_is_new=flat in updated)
                    if i == len(flats) - 1:
                        early()
                    finish(legs[i])
            self._refreshing = False

        self._refreshed = self._grid.outer.submit(work)
        if not self.travels:
            self._ticket = self._refreshed

    # --- gradients ----------------------------------------------------------------------------

    def reduce(self, phase: Phase, scale: float) -> Ticket:
        """Begins to reduce the local gradients of this unit, adding to what rests already."""
        ops = self.ops(phase, Trigger.GRADS_READY)
        flats = self.trained
        grads = [flat.take_grad() for flat in flats]
        adds = [flat.reduced_valid for flat in flats]
        down = next(op for op in ops if op.kind is Kind.REDUCE).hops
        up = next((op.hops for op in ops if op.kind is Kind.SPREAD), ())
        synchronises = phase.synchronises or self.rungs.grads == self.rungs.bottom
        carrier = self._carriers.reduces
        outer = self._carriers.outer if down and down[-1].step == self._outer_step else None
        last = len(down) - 1 if outer else len(down)
        down_legs = [
            self._legs("reduce", Kind.REDUCE, i, down[:last])
            + self._legs("outer", Kind.REDUCE, i, down[last:])
            for i in range(len(flats))
        ]
        up_legs = [self._legs("reduce", Kind.SPREAD, i, up) for i in range(len(flats))]
        later: list[Ticket] = []

        for flat in flats if synchronises else ():
            flat.reduced_valid = True

        def reduce_one(i: int, flat: Flat, grad: FullGrad) -> None:
            legs = down_legs[i]
            if synchronises:
                sums = flat.open_sums(add=adds[i])
                flat.reduce(grad.tensor, legs, carrier, sums, scale=scale, outer=outer)
                flat.spread(up_legs[i], carrier, sums)
                if outer:
                    flat.closing = outer.afterwards(sums.close)
                    later.append(flat.closing)
                else:
                    if not flat.grads_are_resident:
                        finish(up_legs[i])  # others read this memory, which goes now
                    sums.close()
            else:
                flat.hold(grad.tensor, legs, carrier)
            finish(legs[:last])
            grad.release()

        def work(_: Early) -> None:
            for i, (flat, grad) in enumerate(zip(flats, grads, strict=True)):
                with span("reduce", f"reduce {self.name}"):
                    reduce_one(i, flat, grad)
            if outer is not None:
                later.append(outer.last)

        return Chained(self._grid.reduces.submit(work), later)

    # --- inside -------------------------------------------------------------------------------

    def _move(self, state: State) -> None:
        if (self.state, state) not in _MOVES:
            raise AssertionError(f"unit {self.name!r} cannot go from {self.state} to {state}")
        self.state = state

    def _parameters(self) -> Iterable[nn.Parameter]:
        return [slot.parameter for slot in self.slots]

    def fix_source(self) -> None:
        """A pass begins: all its gathers start from the rung that is held now.

        Not from what this rank happens to hold when it issues one: ranks that use units
        differently keep and drop them at other moments, and would take other hops.
        """
        self._source_is_fixed = False
        self._source = self._source_rung()
        self._source_is_fixed = True

    def release_source(self) -> None:
        """A pass is over."""
        self._source_is_fixed = False

    def _source_rung(self) -> int | None:
        """The rung that is held and current; None: P itself."""
        if self._source_is_fixed:
            return self._source
        kept = self._kept_version == self.version and self.rungs.keep not in (0, self.rungs.params)
        return self.rungs.keep if kept else None

    def _legs(self, lane: str, kind: Kind, flat: int, hops: tuple[Hop, ...]) -> list[Leg]:
        """A flat's walk over some hops, on the links of a lane."""
        steps = self.rungs.ladder.steps
        return [
            Leg(hop, self._grid.link(lane, steps[hop.step]), key)
            for hop, key in zip(hops, self._keys(kind, flat, hops), strict=True)
        ]

    def _keys(self, kind: Kind, flat: int, hops: Iterable[Hop]) -> list[int]:
        """One integer for each exchange, alike on all ranks, with a name for messages."""
        kinds = list(Kind).index(kind)
        return [
            self._grid.labels.key(
                ((self.index * 8 + flat) * 8 + kinds) * 16 + hop.step,
                f"{kind} of unit '{self.name}' on level {hop.level}",
            )
            for hop in hops
        ]
