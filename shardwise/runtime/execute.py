"""Executes the schedule: one verb per kind of operation, and a record of each operation done.

Nothing is decided here: ``plans/order.py`` decides what to issue. An operation runs on the lane and
after the operations that it names, and a ``Done`` records the bytes that it really moved.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from shardwise.comm.carry import Carriers, Leg, finish
from shardwise.comm.grid import Grid
from shardwise.comm.lane import Early, Lane
from shardwise.core.flight import RECORDER
from shardwise.core.meter import THREAD, Meter
from shardwise.core.ticket import DONE, Chained, Ticket
from shardwise.core.trace import span
from shardwise.plans.ops import Hop, Kind, Op, Place
from shardwise.plans.ops import Lane as On
from shardwise.runtime.local_grad import FullGrad
from shardwise.runtime.unit import State, Unit

_FLATS, _KINDS, _HOPS = 8, 16, 16
"""At most so many of each per unit: every exchange of a flat, kind and hop has a key of its own."""


@dataclass(eq=False)
class Done:
    """An executed operation. Its counts grow until its work on lanes and tiers is done."""

    op: Op
    meter: Meter = field(default_factory=Meter)
    lane: Lane | None = None
    """Where its work was handed to; None: it was done at once."""
    begin_s: float = 0.0
    end_s: float = 0.0
    """When its work began and ended on its lane; reads and writes of tiers may still go on."""

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that crossed the links, per hop of the operation."""
        found = dict.fromkeys((hop.step for hop in self.op.hops), 0)
        for key, nbytes in self.meter.sent.items():
            found[key % _HOPS] = found.get(key % _HOPS, 0) + nbytes
        return tuple(found.values())


class Executor:
    """Executes operations on the units of one model."""

    def __init__(self, units: list[Unit], grid: Grid, carriers: Carriers) -> None:
        self._units = {unit.name: unit for unit in units}
        self._grid, self._carriers = grid, carriers
        self.observers: list[Callable[[Done], None]] = []
        self.divisor = float(grid.place.world)
        """Summed gradients are divided by this; the number of ranks by default."""
        self.verbs: dict[Kind, Callable[[Unit, Op], Ticket]] = {
            Kind.FETCH: self._fetch,
            Kind.GATHER: self._gather,
            Kind.KEEP: self._keep,
            Kind.FREE: self._free,
            Kind.DROP: self._drop,
            Kind.COLLECT: self._collect,
            Kind.REDUCE: self._reduce,
            Kind.REPLICATE: self._replicate,
            Kind.STORE: self._store,
            Kind.REFRESH: self._refresh,
        }
        """The takeover adds the update, and ``activations/offload.py`` what moves inputs."""
        self._legs: dict[tuple[str, Kind, int, tuple[Hop, ...]], list[Leg]] = {}
        self._taken: dict[Unit, list[FullGrad]] = {}
        """Complete gradients between ``collect`` and ``reduce``."""
        self._doing: Done | None = None
        for unit in units:  # so that every rank can name every exchange of the others
            for op in _possible(unit):
                for flat in range(len(unit.flats)):
                    self._legs_of(unit, op, flat)

    def run(self, ops: Iterable[Op]) -> list[Ticket]:
        return [self.perform(op) for op in ops]

    def perform(self, op: Op, meter: Meter | None = None) -> Ticket:
        """Executes or starts an operation; the ticket is for the work that continues on a lane.

        ``meter`` has the bytes that were moved for the operation ahead of time.
        """
        unit, done = self._units[op.unit], Done(op, meter or Meter(), begin_s=time.perf_counter())
        self._doing = done
        before, THREAD.meter = THREAD.meter, done.meter
        try:
            ticket = self.verbs[op.kind](unit, op)
        finally:
            THREAD.meter = before
        unit.issued[op.kind] = done.lane, ticket
        done.end_s = done.end_s or time.perf_counter()
        for observer in self.observers:
            observer(done)
        return ticket

    # --- parameters ---------------------------------------------------------------------------

    def _fetch(self, unit: Unit, op: Op) -> Ticket:
        if op.target is Place.FULL:
            self._fill(unit)

        def work(_: Early) -> None:
            for fetched in [flat.params.fetch(op.target) for flat in unit.flats]:
                fetched.order_stream()

        if unit.refreshing:
            ticket = self._submit(self._grid.gathers, unit, op, work)
        else:
            ticket = Chained(DONE, [flat.params.fetch(op.target) for flat in unit.flats])
        if op.target is Place.FULL:
            unit.coming = ticket
        return ticket

    def _fill(self, unit: Unit) -> None:
        unit.settle()  # an earlier gather of this unit fills the same buffer
        unit.move_to(State.COMING)
        for flat in unit.flats:
            flat.params.full.fill()

    def _gather(self, unit: Unit, op: Op) -> Ticket:
        self._fill(unit)
        carrier, flats = self._carriers.gathers, unit.flats
        legs = [self._legs_of(unit, op, index) for index in range(len(flats))]

        def work(early: Early) -> None:
            with span("gather", f"gather {unit.name}"):
                for index, flat in enumerate(flats):
                    flat.params.gather(op.source, legs[index], carrier)
                    if index == len(flats) - 1:
                        early()
                    finish(legs[index])

        unit.coming = self._submit(self._grid.gathers, unit, op, work)
        return unit.coming

    def _keep(self, unit: Unit, op: Op) -> Ticket:
        unit.settle()
        for flat in unit.flats:
            flat.params.keep()
        return DONE

    def _free(self, unit: Unit, op: Op) -> Ticket:
        unit.settle()
        unit.close()
        for flat in unit.flats:
            flat.params.full.drop()
        unit.move_to(State.RESTING)
        return DONE

    def _drop(self, unit: Unit, op: Op) -> Ticket:
        if Kind.FETCH in unit.issued:
            unit.issued[Kind.FETCH][1].order_stream()
        for flat in unit.flats:
            flat.params.drop(op.source)
        return DONE

    def _refresh(self, unit: Unit, op: Op) -> Ticket:
        """Refreshes have their own lane, so the first gather of the next forward waits only for its
        own unit's refresh."""
        flats, new = unit.trained, unit.new
        carrier = self._carriers.outer.carrier
        legs = [self._legs_of(unit, op, unit.flats.index(flat)) for flat in flats]

        def work(early: Early) -> None:
            with span("refresh", f"refresh {unit.name}"):
                for index, flat in enumerate(flats):
                    flat.params.refresh(legs[index], carrier, own_is_new=flat in new)
                    if index == len(flats) - 1:
                        early()
                    finish(legs[index])
            unit.refreshing = False

        if op.lane is On.COMPUTE:
            with torch.no_grad():
                work(lambda: None)
            return DONE
        unit.refreshing = True
        if not unit.travels:
            unit.move_to(State.REFRESHING)
            unit.close()
        ticket = self._submit(self._grid.outer, unit, op, work)
        if not unit.travels:
            unit.coming = ticket
        return ticket

    # --- gradients ----------------------------------------------------------------------------

    def _collect(self, unit: Unit, op: Op) -> Ticket:
        """Arrived gradients are already copied; missing gradients and padding become zero."""
        self._taken[unit] = [flat.grads.local.take() for flat in unit.trained]
        for slot in unit.slots:
            slot.pending = False
        return DONE

    def _reduce(self, unit: Unit, op: Op) -> Ticket:
        taken, flats, scale = self._taken.pop(unit), unit.trained, 1.0 / self.divisor
        carrier = self._carriers.reduces
        outer = self._carriers.outer if op.overlaps else None
        legs = [self._legs_of(unit, op, unit.flats.index(flat)) for flat in flats]
        for flat in flats:
            if op.target is Place.HELD:
                flat.grads.holds = True
            else:
                flat.grads.has_sums = True
        for flat, joins in zip(flats, op.joins, strict=False):
            flat.grads.holds = flat.grads.holds and not joins
        later: list[Ticket] = []

        def reduce_one(index: int) -> None:
            flat, grad = flats[index], taken[index]
            if op.target is Place.HELD:
                flat.grads.hold(grad.tensor, legs[index], carrier, adds=op.adds[index])
            else:
                flat.grads.reduce(
                    grad.tensor, legs[index], carrier, scale=scale,
                    adds=op.adds[index], joins=op.joins[index], outer=outer,
                )  # fmt: skip
            finish(legs[index][:-1] if outer else legs[index])
            grad.release()

        def work(_: Early) -> None:
            with span("reduce", f"reduce {unit.name}"):
                for index in range(len(flats)):
                    reduce_one(index)
            if outer is not None:
                later.extend(flat.grads.closing for flat in flats)

        submitted = self._submit(self._grid.reduces, unit, op, work)
        return submitted if outer is None else Chained(submitted, later)

    def _replicate(self, unit: Unit, op: Op) -> Ticket:
        carrier = self._carriers.reduces
        legs = [self._legs_of(unit, op, unit.flats.index(flat)) for flat in unit.trained]

        def work(_: Early) -> None:
            with span("reduce", f"replicate {unit.name}"):
                for flat, walked in zip(unit.trained, legs, strict=True):
                    flat.grads.replicate(walked, carrier)
                    finish(walked)

        return self._submit(self._grid.reduces, unit, op, work)

    def _store(self, unit: Unit, op: Op) -> Ticket:
        later: list[Ticket] = []

        def work(_: Early) -> None:
            for flat in unit.trained:
                flat.grads.store(self._carriers.outer if op.lane is On.OUTER else None)
                later.append(flat.grads.closing)

        return Chained(self._submit(self._grid.reduces, unit, op, work), later)

    # --- inside -------------------------------------------------------------------------------

    def _submit(self, lane: Lane, unit: Unit, op: Op, work: Callable[[Early], None]) -> Ticket:
        """Hands work of the current operation to a lane, which waits for the operations that it
        comes after; those of its own lane are done by then."""
        done = self._doing
        assert done is not None
        issued = [unit.issued[kind] for kind in op.after if kind in unit.issued]
        others = [ticket for at, ticket in issued if at is not lane and ticket is not DONE]
        done.lane = lane

        def timed(early: Early) -> None:
            for ticket in others:
                ticket.order_stream()
            done.begin_s = RECORDER.begin(op.kind, op.unit)
            work(early)
            done.end_s = RECORDER.end(op.kind, op.unit)

        return lane.submit(timed)

    def _legs_of(self, unit: Unit, op: Op, flat: int) -> list[Leg]:
        """The legs of an operation for one flat: each hop with the link of its lane."""
        which = (unit.name, op.kind, flat, op.hops)
        if which not in self._legs:
            steps, lane = unit.rungs.ladder.steps, str(op.lane)
            self._legs[which] = [
                Leg(
                    hop,
                    self._grid.link(
                        "outer" if op.overlaps and hop is op.hops[-1] else lane, steps[hop.step]
                    ),
                    self._key(unit, op, flat, hop),
                )
                for hop in op.hops
            ]
        return self._legs[which]

    def _key(self, unit: Unit, op: Op, flat: int, hop: Hop) -> int:
        """One integer per exchange, the same on all ranks, with a name for error messages."""
        index = (unit.index * _FLATS + flat) * _KINDS + list(Kind).index(op.kind)
        index = index * _HOPS + hop.step
        return self._grid.labels.key(index, f"{op.kind} of unit '{unit.name}' on level {hop.level}")


def _possible(unit: Unit) -> Iterable[Op]:
    """All operations of a unit that may have hops, whatever the unit holds."""
    ops = unit.ops
    yield from ops.gather()
    if ops.kept_rung:
        yield from ops.gather(ops.kept_rung)
    yield from ops.gather(exact=True)
    yield from ops.ready()
    yield from ops.ready(synchronises=False)
    yield from ops.update()
