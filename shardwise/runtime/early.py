"""Updates beside backward.

[Note: Update in backward]
With ``tiers.update = "backward"`` a unit with a state on a tier is updated as soon as it is
reduced, in a separate thread, so that reads and writes of its states overlap the rest of backward.
A rank does this only if it knows all that the update in the step would know: the recorded backward
had no more gradients for the unit, and every parameter of the unit got its gradient on this rank,
so that nothing depends on other ranks. The rest is updated in the step: the root, the first
backward, and units that this rank skipped. The reduction needs all ranks, so each has gathered the
unit for the last time by then. A unit that computes with P itself must also be out of its backward.

Whatever would have changed the update in the step is then an error: a gradient that arrives late,
is dropped or is replaced, changed optimizer options (``optimizer/windows.py``), or a missing step.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from shardwise.core.ticket import Ticket
from shardwise.runtime.unit import Unit
from shardwise.runtime.uses import Uses

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime


class EarlyUpdates:
    """The updates of one model that run before the optimizer's step."""

    def __init__(self, runtime: "Runtime", uses: Uses) -> None:
        self._runtime, self._issuer, self._uses = runtime, runtime.issuer, uses
        self._under_way: list[Ticket] = []
        self._leaving: dict[Unit, list[Ticket]] = {}
        """Units to update when their backward is over, with the tickets of their reductions."""

    def begin(self) -> None:
        self._leaving.clear()

    def reduced(self, unit: Unit, tickets: list[Ticket]) -> None:
        """A unit's last gradients of this step are being reduced: update it when possible."""
        if not (self._issuer.makes_graph or self._issuer.units[unit.index].external):
            self._leaving[unit] = tickets
            self.left(unit)

    def left(self, unit: Unit) -> None:
        """The backward of a unit's call is over."""
        if unit in self._leaving and (unit.travels or not self._uses.in_backward(unit)):
            reduced = self._leaving.pop(unit)
            for op in self._issuer.update_early(unit.index):
                self._under_way += self._runtime.steps.update_early(unit, op, reduced)

    def finish(self) -> None:
        """Waits for all updates, even after one failed: none may go on in the background."""
        updates, self._under_way = self._under_way, []
        with ExitStack() as waiting:
            for update in reversed(updates):
                waiting.callback(update.block_host)
