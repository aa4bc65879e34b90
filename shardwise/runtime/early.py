"""Updates beside backward.

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

from contextlib import ExitStack
from typing import TYPE_CHECKING

from shardwise.core.ticket import Ticket
from shardwise.runtime.unit import Unit
from shardwise.runtime.uses import Uses

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


class EarlyUpdates:
    """The updates of one model that do not wait for the optimizer's step."""

    def __init__(self, runtime: "Runtime", uses: Uses) -> None:
        self._runtime, self._issuer, self._uses = runtime, runtime.issuer, uses
        self._under_way: list[Ticket] = []
        self._leaving: dict[Unit, list[Ticket]] = {}
        """Units that are to be updated when their own backward is over, and their reductions."""

    def begin(self) -> None:
        self._leaving.clear()

    def reduced(self, unit: Unit, tickets: list[Ticket]) -> None:
        """A unit's last gradients of this step are being reduced."""
        if not (self._issuer.makes_graph or self._issuer.units[unit.index].external):
            self._leaving[unit] = tickets
            self.left(unit)

    def left(self, unit: Unit) -> None:
        """A call of a unit is over in backward."""
        if unit in self._leaving and (unit.travels or not self._uses.in_backward(unit)):
            reduced = self._leaving.pop(unit)
            for op in self._issuer.update_early(unit.index):
                self._under_way += self._runtime.steps.update_early(unit, op, reduced)

    def finish(self) -> None:
        """Waits for all of them, also after one that failed: none may run on behind the user."""
        updates, self._under_way = self._under_way, []
        with ExitStack() as waiting:
            for update in reversed(updates):
                waiting.callback(update.wait)
