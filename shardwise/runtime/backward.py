"""Gradients: from their arrival at a parameter to the reduced part that rests.

Gradients arrive one parameter at a time and are copied into their flat's full buffer. A unit's
reduction starts when all gradients that the recorded backward had for it have arrived, in the
recorded order, so that reductions match on all ranks and overlap the rest of backward. What is
missing at the end of backward is reduced as zeros; what arrives after its unit was reduced is
reduced once more. A tile's gradient is reduced whenever it arrives: once for each use.

[Note: Update in backward]
With ``tiers.update = "backward"`` a unit that a tier holds something of is updated as soon as it is
reduced, in a thread of its own, so that reads and writes of its states overlap the rest of
backward. A rank does so only if it knows all that an update at the step would know: the recorded
backward says that no more gradients come, and all the unit's parameters got theirs on this very
rank, so that nothing depends on what other ranks used. Everything else waits for the step: the
root, the first backward, units that this rank passed by. The reduction needs all ranks, and each of
them has gathered the unit for the last time by then; where it is not gathered but computes with P
itself, it must also have left the unit's backward.

What would make an update at the step another one is an error then: a gradient that arrives late,
was dropped or replaced, other options of the optimizer (``windows.py``), no step at all.
"""

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from shardwise.core.errors import UsageError
from shardwise.core.ticket import Ticket
from shardwise.plans.schedule import REDUCTIONS_IN_FLIGHT, Kind, Trigger
from shardwise.runtime.flat import ParamSlot
from shardwise.runtime.surface import grads
from shardwise.runtime.unit import Unit
from shardwise.tier.memory import trim_heap

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


class Backward:
    """The gradients of the current backward pass of one model."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self.active = False
        self.creates_graph = False
        self._sync = True
        """Whether the current backward began outside no_sync."""
        self._order: list[Unit] | None = None
        """Units in the order of their reductions; None until one backward was recorded."""
        self._expected: dict[ParamSlot, int] = {}
        """How many gradients each parameter got in the recorded backward."""
        self._missing: dict[Unit, int] = {}
        self._recorded: list[Unit] = []
        self._launched: Counter[Unit] = Counter()
        """How often each unit was reduced in this backward."""
        self._skipped: set[Unit] = set()
        """Units that this rank passed by: others may wait for its zeros."""
        self._next = 0
        self._tickets: list[Ticket] = []
        self._updates: list[Ticket] = []
        """Of the updates that run beside this backward."""
        self._leaving: dict[Unit, Ticket] = {}
        """Units that are to be updated when their own backward is over, and their reductions."""
        self._dropped: list[ParamSlot] = []
        """Parameters whose gradient the user of any rank dropped before backward was finished."""

    # --- the pass -----------------------------------------------------------------------------

    def begin(self, creates_graph: bool) -> bool:
        """Starts a backward unless one is running; returns whether it did."""
        if self.active:
            self.creates_graph |= creates_graph
            return False
        self._runtime.require_stepped("backward")
        self.active, self.creates_graph = True, creates_graph
        self._sync = self._runtime.sync
        self._recorded.clear()
        self._launched.clear()
        self._skipped.clear()
        self._leaving.clear()
        self._next = 0
        self._missing = dict.fromkeys(self._trained_units(), 0)
        for slot, count in self._expected.items():
            self._missing[slot.unit] += count
        grads.begin_backward(self._runtime)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        return True

    def arrive(self, slot: ParamSlot, grad: torch.Tensor | None) -> None:
        """A parameter's local gradient was accumulated by autograd: take it."""
        unit = slot.unit
        if grad is None:
            slot.face.emptied = False  # by a hook of the user, who dropped it
            return
        if unit.travels and not slot.flat.full.filled:
            raise UsageError(
                f"A gradient reached '{slot.name}' while unit '{unit.name}' was not gathered: its "
                "output left the module in a form that was not recognised; return tensors, "
                "tuples, lists, dicts or dataclasses from forward, or name other units in the plan."
            )
        grads.mark(slot)
        if slot.flat.grad is None:
            self._limit_in_flight()
        place = slot.flat.open_grad()[slot.spec.interval.relative_to(0)]
        with torch.no_grad():
            dense = grad.to_dense() if grad.is_sparse else grad.detach()
            place = place.view(slot.spec.param.shape)
            place.add_(dense) if slot.pending else place.copy_(dense)
        slot.pending = slot.used = True
        slot.arrivals += 1
        self._count(slot)
        self._runtime.grad_arrived(slot)

    def finish(self) -> None:
        """The end of backward: everything is reduced, and ``p.grad`` shows it."""
        if not self.active:
            return
        runtime = self._runtime
        try:
            runtime.end_uses()  # first: other ranks may need gathers before they can reduce
            self._finish_reductions()
        finally:
            self.active = False
            self._tickets.clear()
            self._finish_updates()
        runtime.end_backward()
        grads.end_backward(runtime, self._dropped)
        runtime.accumulated = not runtime.sync

    def _finish_updates(self) -> None:
        """Waits for all updates, also after one that failed: none may run on behind the user."""
        updates, self._updates = self._updates, []
        with ExitStack() as waiting:
            for update in reversed(updates):
                waiting.callback(update.wait)

    def finish_interrupted(self) -> None:
        """A backward that ended in an exception is finished with what had arrived."""
        if not self.active:
            return
        runtime = self._runtime
        now, runtime.sync = runtime.sync, self._sync  # the exception may have left no_sync
        try:
            self.finish()
        finally:
            runtime.sync = now

    def skip(self, units: list[Unit]) -> None:
        """This rank passed by units that other ranks may have used, and reduce now.

        It contributes what it has of them. Waiting for the end of backward instead would be a
        deadlock: they cannot go on to the gathers that this rank needs to get there.
        """
        if self._order is not None and units:
            self._skipped.update(units)
            self._launch_complete(self._order)

    def took(self, unit: Unit) -> bool:
        """Whether all gradients of a unit have been taken in this backward."""
        if unit.is_tile:  # others may come, unless the recorded backward says otherwise
            return self._order is not None and self._launched[unit] >= self._order.count(unit)
        return unit in self._launched

    # --- reductions ---------------------------------------------------------------------------

    def _count(self, slot: ParamSlot) -> None:
        unit = slot.unit
        if unit.is_tile:
            if self._order is None:
                self._runtime.agree_on_reduction(unit)
            else:
                self._launch_complete(self._order)
        elif self._order is None:
            trained = [other for other in unit.slots if other.spec.param.requires_grad]
            if unit not in self._launched and all(other.arrivals for other in trained):
                self._runtime.agree_on_reduction(unit)
        elif slot.arrivals <= self._expected.get(slot, 0):
            self._missing[unit] -= 1
            self._launch_complete(self._order)

    def _launch_complete(self, order: list[Unit]) -> None:
        while self._next < len(order) and self._is_complete(order[self._next]):
            unit = order[self._next]
            self._next += 1
            if unit in self._skipped:
                self._limit_in_flight()  # buffers of zeros count, too
            reduced = self._launch(unit)
            if unit.updates_in_backward and self._has_everything(unit, order):
                self._leaving[unit] = reduced
                self.left(unit)

    def _is_complete(self, unit: Unit) -> bool:
        complete = unit.is_tile or self._missing[unit] == 0
        return (complete and any(slot.pending for slot in unit.slots)) or unit in self._skipped

    def left(self, unit: Unit) -> None:
        """A call of a unit is over in backward; see [Note: Update in backward]."""
        if unit in self._leaving and (unit.travels or not unit.in_backward):
            reduced = self._leaving.pop(unit)
            self._updates += self._runtime.update_in_backward(unit, reduced)

    def _has_everything(self, unit: Unit, order: list[Unit]) -> bool:
        """Whether the gradients just taken complete the step's; see [Note: Update in backward]."""
        arrived = all(
            slot.arrivals >= max(1, self._expected.get(slot, 0))
            for flat in unit.trained
            for slot in flat.slots
        )
        final = self._sync and not self.creates_graph and unit not in order[self._next :]
        return arrived and final and not unit.external and unit not in self._skipped

    def _launch(self, unit: Unit) -> Ticket:
        """Reduces a unit's gradients; parameters without one contribute zeros."""
        runtime = self._runtime
        for slot in unit.slots:
            if slot.spec.param.requires_grad and not slot.pending:
                slot.flat.open_grad()[slot.spec.interval.relative_to(0)].zero_()
            slot.pending = False
        for flat in unit.trained:
            flat.open_grad()[flat.spec.slots[-1].interval.stop :].zero_()
        phase = runtime.phase()
        ticket = unit.reduce(phase, 1.0 / runtime.divisor)
        self._tickets.append(ticket)
        self._launched[unit] += 1
        for op in unit.ops(phase, Trigger.GRADS_READY):
            if op.kind is not Kind.STEP:
                runtime.emit(op)
        runtime.grads_taken(unit)
        return ticket

    def _limit_in_flight(self) -> None:
        while len(self._tickets) >= REDUCTIONS_IN_FLIGHT:
            self._tickets.pop(0).wait()

    def _finish_reductions(self) -> None:
        units = self._trained_units()
        if not units:
            return
        if self._order is None:
            while self._runtime.agree_on_reduction(None):
                pass
        rest = [unit for unit in units if unit not in self._launched]
        if self._order is not None:
            rest = self._order[self._next :]
        # The root surrounds all others, even if some rank used nothing else in this backward.
        for unit in sorted(rest, key=lambda unit: unit.encloses):
            self._limit_in_flight()
            self._launch(unit)
        for unit in self._exchange_flags(units):
            self._runtime.counters.late_reduces += 1
            self._limit_in_flight()
            self._launch(unit)
        while self._tickets:
            self._tickets.pop(0).wait()
        if self._order is None:
            self._order = sorted(self._recorded + rest, key=lambda unit: unit.encloses)
            trim_heap()  # later passes fit the holes that the first one left; see optim.py
            self._expected = {s: s.arrivals for s in self._runtime.trained_slots if s.arrivals}

    def reduce_agreed(self, unit: Unit) -> None:
        """While recording: some rank has completed a unit, so all ranks reduce it now.

        What this rank has not computed yet arrives late.
        """
        if unit not in self._launched or unit.is_tile:
            self._recorded.append(unit)
            self._limit_in_flight()
            self._launch(unit)

    def _exchange_flags(self, units: list[Unit]) -> list[Unit]:
        """Learns which parameters any rank used; returns the units that any rank has more for."""
        runtime, slots = self._runtime, self._runtime.trained_slots
        flags = [slot.used for slot in slots]
        flags += [grads.was_dropped(slot) for slot in slots]
        flags += [any(slot.pending for slot in unit.slots) for unit in units]
        flags += [runtime.is_updated(unit) for unit in units]
        if runtime.sync or any(unit.rungs.grads > 0 for unit in units):
            mine = torch.tensor(flags, dtype=torch.uint8)
            flags = runtime.grid.control.highest(mine, "end of a backward").tolist()
        count = len(slots)
        for slot, used in zip(slots, flags[:count], strict=True):
            slot.has_grad = slot.has_grad or bool(used)
            slot.used = bool(used) and not runtime.sync
        dropped = flags[count : 2 * count]
        self._dropped = [slot for slot, drop in zip(slots, dropped, strict=True) if drop]
        rest = flags[2 * count :]
        late = [unit for unit, more in zip(units, rest[: len(units)], strict=True) if more]
        updated = [unit for unit, new in zip(units, rest[len(units) :], strict=True) if new]
        runtime.half_updated |= bool(updated)
        _require_old(updated, late, "got a gradient")
        _require_old(updated, [slot.unit for slot in self._dropped], "lost a gradient")
        return late

    def _trained_units(self) -> list[Unit]:
        return [unit for unit in self._runtime.units if unit.trained]


def _require_old(updated: list[Unit], units: list[Unit], but: str) -> None:
    for unit in units:
        if unit in updated:
            raise UsageError(
                f"Unit '{unit.name}' {but} after it had been updated in the same backward; set "
                "tiers.update = 'step' in the plan, and load a checkpoint."
            )
