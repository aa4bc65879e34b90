"""The passes of a step: from the moments that hooks see to triggers, and what those set off.

``before_forward``, ``after_forward``, ``before_backward``, ``grad_arrived``, ``after_backward``:
each asks the issuer what to do (``follow``). Which phase of a step a pass is in is decided once,
when it begins.

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
was dropped or replaced, other options of the optimizer (``optimizer/windows.py``), no step at all.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from shardwise.core.errors import UsageError
from shardwise.core.ticket import Ticket
from shardwise.core.trace import active
from shardwise.plans.ops import Phase, Trigger
from shardwise.plans.order import BACKWARD, Asks, Issue
from shardwise.plans.walk import Walk
from shardwise.runtime.agreement import Agreed, Agreement
from shardwise.runtime.reductions import Flags, Reductions
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import grads
from shardwise.runtime.unit import Unit
from shardwise.runtime.uses import Call, Uses
from shardwise.tier.memory import trim_heap

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


def in_autograd() -> bool:
    """Whether the current thread runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Forward:
    """The forwards of one model: begin, uses, end."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime, self._units = runtime, runtime.units
        self._issuer, self._executor = runtime.issuer, runtime.executor
        self._agreement = Agreement(runtime.grid.control, runtime.units)
        self.uses = Uses(runtime.units, runtime.issuer)
        self.depth = 0
        """How many calls of the model and its units run inside each other."""
        self._lone = False

    # --- the moments --------------------------------------------------------------------------

    def before(self, unit: Unit) -> None:
        """A module's forward begins: its unit's values are needed."""
        if in_autograd():  # activation checkpointing
            self._runtime.backward.begin(recomputes=True)
            self.follow(self._issuer.on(Trigger.BEFORE_RECOMPUTE, unit.index))
        else:
            if unit.encloses and self.depth == 0:
                self._begin("forward")
            self.depth += 1
            self.uses.enter(unit)
            self.follow(self._issuer.on(Trigger.BEFORE_FORWARD, unit.index))
        self.show(f"forward {unit.name}")

    def after(self, unit: Unit) -> None:
        """A module's forward is over: its unit's values go, or the kept rung stays."""
        if in_autograd():
            self.follow(self._issuer.on(Trigger.AFTER_RECOMPUTE, unit.index))
            return
        self.depth -= 1
        if self.uses.leave(unit):
            self.follow(self._issuer.on(Trigger.AFTER_FORWARD, unit.index))
        self.show(None)
        if unit.encloses and self.depth == 0:
            self._end()

    def before_lone(self) -> None:
        """A module of the root unit begins its forward, perhaps without the model's."""
        if self.depth or in_autograd():
            return
        self._runtime.require_stepped("forward")
        self.depth, self._lone = 1, True
        self._issuer.phase = self._phase()
        self.follow(self._issuer.on(Trigger.BEFORE_FORWARD, 0))

    def after_lone(self) -> None:
        if self._lone and not in_autograd():
            self.depth, self._lone = 0, False
            self.follow(self._issuer.end_forward())

    @contextmanager
    def late(self) -> Iterator[None]:
        """Tiles are used after the model's forward, by a loss outside of it: a pass of its own."""
        if self.depth or in_autograd() or self._issuer.opened:
            yield
            return
        self._runtime.homes.check()
        self.depth = 1
        self._begin("late forward")
        try:
            yield
        finally:
            self.depth = 0
            self._end()

    def show(self, name: str | None) -> None:
        """What the trace shows as being computed."""
        trace = active()
        if trace is not None:
            trace.switch("compute", name)

    # --- begin and end ------------------------------------------------------------------------

    def _phase(self) -> Phase:
        return self._runtime.phase() if torch.is_grad_enabled() else Phase.EVAL

    def _begin(self, kind: str) -> None:
        if not torch.is_grad_enabled():
            kind += " without gradients"
        self.follow(self._issuer.begin(kind, self._phase()))

    def _end(self) -> None:
        self.end_walk(self._issuer.walk)
        self.follow(self._issuer.end_forward())

    def end_walk(self, walk: Walk | None, *, descending: bool = False) -> None:
        """This rank uses nothing more in a pass."""
        if walk is None:
            return
        records = walk.order is None
        while records and self._agree(walk, None, descending=descending):
            pass
        self.follow(self._issuer.end_walk(walk))
        if records:
            if self._agreement.diverged:
                walk.record_unseen(self._unseen(walk, descending), descending=descending)
            walk.finish_recording()
        self._runtime.counters.skipped_gathers += walk.skipped

    def interrupt(self) -> None:
        """Ends a forward that an exception left unfinished."""
        if not (self.depth or self._issuer.walk is not None):
            return
        self.depth, self._lone = 0, False
        self.uses.forget_running()
        self.end_walk(self._issuer.walk)
        for unit in self._units:
            self.follow(self._issuer.on(Trigger.AFTER_FORWARD, unit.index))

    def _unseen(self, walk: Walk, descending: bool) -> list[int]:
        """Units that no rank used in a recorded pass, but any of them may use in the next one."""
        return [
            held.index
            for held in self._issuer.units
            if held.ops.travels
            and not held.external
            and held.index not in walk.recording
            # What is kept in full comes to backward without a walk.
            and not (descending and held.ops.kept_rung == 0)
        ]

    # --- what is issued -----------------------------------------------------------------------

    def follow(self, issue: Issue) -> None:
        """Does what a trigger sets off; all that other ranks wait for comes before any waiting."""
        if issue.finish:
            self._runtime.backward.wait_for(issue.finish)
        perform = self._executor.perform
        for op in issue.ops:
            perform(op)
        if issue.skipped:
            self._runtime.backward.skip([self._units[index] for index in issue.skipped])
        for op in issue.later:
            perform(op)
        if issue.wait is not None:
            unit = self._units[issue.wait]
            if issue.asks is not Asks.NOTHING:
                self._agree_on_use(unit, issue.asks)
            unit.settle()

    def _agree_on_use(self, unit: Unit, asks: Asks) -> None:
        if asks is Asks.FIRST_USE:
            backward = self._issuer.in_backward
            walk = self._issuer.backward_walk if backward else self._issuer.walk
            assert walk is not None
            while self._issuer.units[unit.index].leases == 0:
                self._agree(walk, unit, descending=backward)
        else:
            self._agreement.on_extra_use(unit)
            self._runtime.counters.extra_gathers += 1
            self.follow(self._issuer.extra(unit.index))

    def _agree(self, walk: Walk, unit: Unit | None, *, descending: bool) -> bool:
        """While recording: one turn of all ranks, in which this one needs a unit, or none more.

        Returns whether any rank still proposed something.
        """
        return self.turn(self._agreement.on_use(unit, descending=descending), walk, unit)

    def agree_on_reduction(self, unit: Unit | None) -> bool:
        """Likewise in backward, where this rank has completed a unit's gradients, or no more."""
        walk = self._issuer.backward_walk
        agreed = self._agreement.on_reduction(unit, descending=walk is not None)
        return self.turn(agreed, walk, None)

    def turn(self, agreed: Agreed, walk: Walk | None, needed: Unit | None) -> bool:
        if agreed.gather is not None:
            is_needed = agreed.gather is needed
            self.follow(self._issuer.agreed(agreed.gather.index, needed=is_needed, walk=walk))
        for unit in agreed.reduces:
            self._runtime.backward.reduce_agreed(unit)
        return not agreed.ends


class Backward:
    """The backward of one model: begin, arrivals, end."""

    def __init__(self, runtime: "Runtime", forward: Forward) -> None:
        self._runtime, self._issuer, self._executor = runtime, runtime.issuer, runtime.executor
        self._forward, self._uses = forward, forward.uses
        self.reductions = Reductions(runtime.units)
        self.active = False
        self._sync = True
        """Whether the current backward began outside no_sync."""
        self._shown: Unit | None = None
        """The unit that the trace shows."""
        self._under_way: deque[list[Ticket]] = deque()
        """Of reductions that were issued and not finished; the oldest first."""
        self._updates: list[Ticket] = []
        """Of the updates that run beside this backward."""
        self._leaving: dict[Unit, list[Ticket]] = {}
        """Units that are to be updated when their own backward is over, and their reductions."""

    # --- the moments --------------------------------------------------------------------------

    def begin(self, *, recomputes: bool = False) -> None:
        """The first sign of a backward starts it; later ones change nothing."""
        # A recomputed forward has gradients enabled, whether backward makes a graph or not.
        makes_graph = torch.is_grad_enabled() and not recomputes
        if self.active:
            self._issuer.makes_graph |= makes_graph
            return
        runtime = self._runtime
        runtime.require_stepped("backward")
        self.active, self._sync = True, runtime.sync
        self.reductions.begin()
        self._leaving.clear()
        grads.begin_backward(runtime)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._issuer.makes_graph = makes_graph
        self._forward.follow(self._issuer.begin(BACKWARD, runtime.phase()))

    def before(self, unit: Unit, call: Call) -> None:
        """A gradient reached the output of one forward call of the unit."""
        self.begin()
        self._uses.enter_backward(unit, call)
        self._forward.follow(self._issuer.on(Trigger.BEFORE_BACKWARD, unit.index))
        self._forward.show(f"backward {unit.name}")
        self._shown = unit

    def after(self, unit: Unit, call: Call) -> None:
        """Gradients left through the inputs of the call: its values are not needed any more."""
        self._uses.leave_backward(unit, call)
        if self._shown is unit:  # the next unit's may have begun
            self._forward.show(None)
        hold = self._issuer.units[unit.index].hold
        if hold is None or not hold.kept or self.reductions.took(unit):
            self._forward.follow(self._issuer.on(Trigger.AFTER_BACKWARD, unit.index))
        self._left(unit)

    def arrive(self, slot: ParamSlot, grad: torch.Tensor | None) -> None:
        """A parameter's local gradient was accumulated by autograd: take it."""
        unit, reductions = slot.unit, self.reductions
        if grad is None:
            slot.face.emptied = False  # by a hook of the user, who dropped it
            return
        if unit.travels and not slot.flat.params.full.filled:
            raise UsageError(
                f"A gradient reached '{slot.name}' while unit '{unit.name}' was not gathered: its "
                "output left the module in a form that was not recognised; return tensors, "
                "tuples, lists, dicts or dataclasses from forward, or name other units in the plan."
            )
        grads.mark(slot)
        if slot.flat.grads.full is None:
            self.wait_for(self._issuer.limit().finish)
        reductions.take(slot, grad)
        if reductions.order is not None:
            self._launch_ready()
        elif (proposed := reductions.proposed_by(slot)) is not None:
            self._forward.agree_on_reduction(proposed)
        for call in self._uses.arrived(slot):
            self.after(unit, call)

    def finish(self) -> None:
        """The end of backward: everything is reduced, and ``p.grad`` shows it."""
        if not self.active:
            return
        runtime = self._runtime
        dropped: list[ParamSlot] = []
        makes_graph = self._issuer.makes_graph
        try:
            # First: other ranks may need gathers before they can reduce.
            self._forward.end_walk(self._issuer.backward_walk, descending=True)
            dropped = self._finish_reductions()
        finally:
            self.active = False
            self._under_way.clear()
            self._issuer.in_flight = 0
            self._finish_updates()
        if not makes_graph:
            self._uses.forget_backward()
        self._forward.follow(self._issuer.end_backward())
        grads.end_backward(runtime, dropped)
        runtime.accumulated = not runtime.sync

    def interrupt(self) -> None:
        """A backward that ended in an exception is finished with what had arrived."""
        if not self.active:
            return
        runtime = self._runtime
        now, runtime.sync = runtime.sync, self._sync  # the exception may have left no_sync
        try:
            self.finish()
        finally:
            runtime.sync = now

    # --- reductions ---------------------------------------------------------------------------

    def skip(self, units: list[Unit]) -> None:
        """This rank passed by units that other ranks may have used, and reduce now.

        It contributes what it has of them. Waiting for the end of backward instead would be a
        deadlock: they cannot go on to the gathers that this rank needs to get there.
        """
        if self.reductions.order is not None:
            self.reductions.skipped.update(units)
            self._launch_ready()

    def reduce_agreed(self, unit: Unit) -> None:
        """While recording: some rank has completed a unit, so all ranks reduce it now."""
        if self.reductions.agreed(unit):
            self._launch_limited(unit)

    def wait_for(self, count: int) -> None:
        """Waits for the oldest reductions under way."""
        for _ in range(count):
            for ticket in self._under_way.popleft():
                ticket.wait()

    def _launch_ready(self) -> None:
        reductions = self.reductions
        while (unit := reductions.next_ready()) is not None:
            if unit in reductions.skipped:  # buffers of zeros count, too
                self.wait_for(self._issuer.limit().finish)
            tickets = self._launch(unit)
            if unit.ops.updates_early and self._sync and self._is_last(unit):
                self._leaving[unit] = tickets
                self._left(unit)

    def _is_last(self, unit: Unit) -> bool:
        """Whether the gradients just taken complete the step's; see [Note: Update in backward]."""
        external = self._issuer.units[unit.index].external
        return self.reductions.is_last(unit) and not self._issuer.makes_graph and not external

    def _launch_limited(self, unit: Unit) -> None:
        self.wait_for(self._issuer.limit().finish)
        self._launch(unit)

    def _launch(self, unit: Unit) -> list[Ticket]:
        """Reduces a unit's gradients; parameters without one contribute zeros."""
        self.reductions.launched(unit)
        self._uses.taken(unit)
        issue = self._issuer.ready(unit.index, unit.held, unit.summed)
        tickets = self._executor.run(issue.ops)
        self._under_way.append(tickets)
        self._executor.run(issue.later)
        return tickets

    def _finish_reductions(self) -> list[ParamSlot]:
        """Returns the parameters whose gradient was dropped meanwhile."""
        reductions = self.reductions
        if not reductions.units:
            return []
        if reductions.order is None:
            while self._forward.agree_on_reduction(None):
                pass
        rest = reductions.rest()
        for unit in rest:
            self._launch_limited(unit)
        flags = self._exchange_flags()
        for unit in flags.late:
            self._runtime.counters.late_reduces += 1
            self._launch_limited(unit)
        self.wait_for(len(self._under_way))
        if reductions.order is None:
            reductions.finish_recording(rest)
            trim_heap()  # later passes fit the holes that the first one left
        return flags.dropped

    def _exchange_flags(self) -> Flags:
        runtime, reductions = self._runtime, self.reductions
        dropped = [grads.was_dropped(slot) for slot in reductions.slots]
        mine = reductions.flags(runtime.updated, dropped)
        if runtime.sync or any(unit.rungs.grads > 0 for unit in reductions.units):
            mine = runtime.grid.control.highest(mine, "end of a backward")
        flags = reductions.read_flags(mine.tolist(), synchronises=runtime.sync)
        runtime.half_updated |= bool(flags.updated)
        flags.require_old()
        return flags

    # --- updates beside backward: see [Note: Update in backward] -------------------------------

    def _left(self, unit: Unit) -> None:
        """A call of a unit is over in backward."""
        if unit in self._leaving and (unit.travels or not self._uses.in_backward(unit)):
            reduced = self._leaving.pop(unit)
            for op in self._issuer.update_early(unit.index):
                self._updates += self._runtime.update_in_backward(unit, op, reduced)

    def _finish_updates(self) -> None:
        """Waits for all updates, also after one that failed: none may run on behind the user."""
        updates, self._updates = self._updates, []
        with ExitStack() as waiting:
            for update in reversed(updates):
                waiting.callback(update.wait)
