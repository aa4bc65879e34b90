"""Executes what the issuer issues, in step with the other ranks.

This rank first does everything that other ranks wait for, and only then waits itself. The issuer
asks for an agreement of all ranks (``agreement.py``) while a pass is recorded, and for a use beyond
the recorded order.
"""

from typing import TYPE_CHECKING

from shardwise.plans.order import Asks, Issue
from shardwise.plans.walk import Walk
from shardwise.runtime.agreement import Agreed, Agreement
from shardwise.runtime.unit import Unit

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


class Issues:
    """Executes the issues of one model's issuer."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime, self._units = runtime, runtime.units
        self._issuer, self._executor = runtime.issuer, runtime.executor
        self._agreement = Agreement(runtime.grid.control, runtime.units)

    def follow(self, issue: Issue) -> None:
        """Executes what a trigger sets off."""
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

    def _unseen(self, walk: Walk, descending: bool) -> list[int]:
        """Units that no rank used in the recorded pass, but that a rank may use in the next one."""
        return [
            held.index
            for held in self._issuer.units
            if held.ops.travels
            and not held.external
            and held.index not in walk.recording
            # Units kept in full need no gather in backward.
            and not (descending and held.ops.kept_rung == 0)
        ]

    # --- agreement ----------------------------------------------------------------------------

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
        """While recording: one round of proposals; ``unit`` is what this rank needs, or None.

        Returns whether any rank proposed a unit.
        """
        return self.turn(self._agreement.on_use(unit, descending=descending), walk, unit)

    def agree_on_reduction(self, unit: Unit | None) -> bool:
        """The same for reductions: ``unit`` is complete on this rank; None: no more will be."""
        walk = self._issuer.backward_walk
        agreed = self._agreement.on_reduction(unit, descending=walk is not None)
        return self.turn(agreed, walk, None)

    def turn(self, agreed: Agreed, walk: Walk | None, needed: Unit | None) -> bool:
        """Does what one round agreed on; returns whether any rank proposed a unit."""
        if agreed.gather is not None:
            is_needed = agreed.gather is needed
            self.follow(self._issuer.agreed(agreed.gather.index, needed=is_needed, walk=walk))
        for unit in agreed.reduces:
            self._runtime.backward.reduce_agreed(unit)
        return not agreed.ends
