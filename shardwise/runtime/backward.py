"""Backward: turns the moments that hooks see into triggers of the issuer.

The moments are ``before`` and ``after`` a unit's backward, ``arrive`` for each gradient, and
``finish``. ``reductions.py`` decides which units are ready to be reduced.
"""

from collections import deque
from typing import TYPE_CHECKING

import torch

from shardwise.core.errors import UsageError
from shardwise.core.flight import RECORDER
from shardwise.core.ticket import Ticket
from shardwise.plans.ops import Trigger
from shardwise.plans.order import BACKWARD
from shardwise.runtime.early import EarlyUpdates
from shardwise.runtime.forward import Forward
from shardwise.runtime.reductions import Flags, Reductions
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import grads
from shardwise.runtime.unit import Unit
from shardwise.runtime.uses import Call
from shardwise.tier.memory import trim_heap

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


class Backward:
    """The backward of one model."""

    def __init__(self, runtime: "Runtime", forward: Forward) -> None:
        self._runtime, self._issuer, self._executor = runtime, runtime.issuer, runtime.executor
        self._issues, self._forward, self._uses = runtime.issues, forward, forward.uses
        self.reductions = Reductions(runtime.units)
        self.active = False
        self._sync = True
        """Whether the current backward began outside no_sync."""
        self._shown: Unit | None = None
        """The unit that the trace shows as being computed."""
        self._under_way: deque[list[Ticket]] = deque()
        """Tickets of the reductions in flight, oldest first."""
        self._early = EarlyUpdates(runtime, forward.uses)

    # --- the moments --------------------------------------------------------------------------

    def begin(self, *, recomputes: bool = False) -> None:
        """Begins a backward, unless it has begun: several hooks may be the first."""
        # A recomputed forward always has gradients enabled, so it says nothing about a graph.
        makes_graph = torch.is_grad_enabled() and not recomputes
        if self.active:
            self._issuer.makes_graph |= makes_graph
            return
        runtime = self._runtime
        runtime.steps.require("backward")
        self.active, self._sync = True, runtime.sync
        self.reductions.begin()
        self._early.begin()
        grads.begin_backward(runtime)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._issuer.makes_graph = makes_graph
        self._issues.follow(self._issuer.begin(BACKWARD, runtime.phase()))

    def before(self, unit: Unit, call: Call) -> None:
        """A gradient reached the outputs of one forward call of the unit."""
        self.begin()
        self._uses.enter_backward(unit, call)
        self._issues.follow(self._issuer.on(Trigger.BEFORE_BACKWARD, unit.index))
        RECORDER.computes("backward", unit.name)
        self._shown = unit

    def after(self, unit: Unit, call: Call) -> None:
        """Gradients left through the inputs of the call, which needs the unit's values no more."""
        self._uses.leave_backward(unit, call)
        if self._shown is unit:  # the next unit's backward may have begun
            RECORDER.computes()
        hold = self._issuer.units[unit.index].hold
        if hold is None or not hold.kept or self.reductions.took(unit):
            self._issues.follow(self._issuer.on(Trigger.AFTER_BACKWARD, unit.index))
        self._early.left(unit)

    def arrive(self, slot: ParamSlot, grad: torch.Tensor | None) -> None:
        """Takes a parameter's local gradient, which autograd has accumulated."""
        unit, reductions = slot.unit, self.reductions
        if grad is None:
            slot.face.emptied = False  # a hook of the user dropped it
            return
        if unit.travels and not slot.flat.params.full.filled:
            raise UsageError(
                f"A gradient reached '{slot.name}' while unit '{unit.name}' was not gathered, "
                "because its forward returned an unrecognised type; return tensors, "
                "tuples, lists, dicts or dataclasses from forward, or name other units in the plan."
            )
        grads.mark(slot)
        if not slot.flat.grads.local.has_begun:
            self.wait_for(self._issuer.limit().finish)
            if slot.flat.grads.reads_ahead:
                slot.flat.grads.expect(synchronises=self._sync)
        is_complete = reductions.take(slot, grad)
        if reductions.order is None:
            proposed = reductions.proposed_by(slot)
            if proposed is not None:
                self._issues.agree_on_reduction(proposed)
        elif is_complete:
            self._launch_ready()
        unit.arrived.add(slot)
        if len(unit.arrived) == unit.num_trained:
            for call in self._uses.complete(unit):
                self.after(unit, call)

    def finish(self) -> None:
        """Ends a backward: reduces the rest, and shows gradients in ``p.grad``."""
        if not self.active:
            return
        runtime = self._runtime
        dropped: list[ParamSlot] = []
        makes_graph = self._issuer.makes_graph
        try:
            # Gathers first: other ranks may need them before they can reduce.
            self._issues.end_walk(self._issuer.backward_walk, descending=True)
            dropped = self._finish_reductions()
        finally:
            self.active = False
            self._under_way.clear()
            self._issuer.in_flight = 0
            self._early.finish()
        if not makes_graph:
            self._uses.forget_backward()
        self._issues.follow(self._issuer.end_backward())
        runtime.pools.trim()
        grads.end_backward(runtime, dropped)
        runtime.accumulated = not self._sync

    # --- reductions ---------------------------------------------------------------------------

    def skip(self, units: list[Unit]) -> None:
        """This rank skipped units that other ranks may have used and reduce now.

        It contributes the gradients that it has. To wait until the end of backward would deadlock:
        the others would never reach the gathers that this rank needs to get there.
        """
        if self.reductions.order is not None:
            self.reductions.skipped.update(units)
            self._launch_ready()

    def reduce_agreed(self, unit: Unit) -> None:
        """While recording: a rank has completed a unit, so all ranks reduce it now."""
        if self.reductions.agreed(unit):
            self._launch_limited(unit)

    def wait_for(self, count: int) -> None:
        """Waits for the ``count`` oldest reductions in flight."""
        for _ in range(count):
            for ticket in self._under_way.popleft():
                ticket.order_stream()

    def _launch_ready(self) -> None:
        reductions = self.reductions
        while (unit := reductions.next_ready()) is not None:
            if unit in reductions.skipped:  # a buffer of zeros counts as well
                self.wait_for(self._issuer.limit().finish)
            tickets = self._launch(unit)
            if unit.ops.updates_early and self._sync and reductions.is_last(unit):
                self._early.reduced(unit, tickets)

    def _launch_limited(self, unit: Unit) -> None:
        self.wait_for(self._issuer.limit().finish)
        self._launch(unit)

    def _launch(self, unit: Unit) -> list[Ticket]:
        """Reduces a unit's gradients; parameters without a gradient contribute zeros."""
        self.reductions.launched(unit)
        self._uses.taken(unit)
        issue = self._issuer.ready(unit.index, unit.held, unit.summed)
        tickets = self._executor.run(issue.ops)
        self._under_way.append(tickets)
        self._executor.run(issue.later)
        return tickets

    def _finish_reductions(self) -> list[ParamSlot]:
        """Reduces what is left; returns the parameters whose gradient was dropped meanwhile."""
        reductions = self.reductions
        if not reductions.units:
            return []
        if reductions.order is None:
            while self._issues.agree_on_reduction(None):
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
            trim_heap()  # later passes reuse the memory that the first one freed
        return flags.dropped

    def _exchange_flags(self) -> Flags:
        runtime, reductions = self._runtime, self.reductions
        mine = reductions.flags(runtime.steps.updated, grads.dropped(reductions.slots))
        if self._sync or any(unit.rungs.grads > 0 for unit in reductions.units):
            mine = runtime.grid.control.highest(mine, "end of a backward")
        flags = reductions.read_flags(mine.tolist(), synchronises=self._sync)
        runtime.steps.half_updated |= bool(flags.updated)
        flags.require_old()
        return flags
