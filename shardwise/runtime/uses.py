"""Claims: which calls need a unit, and until when.

A call runs from its module's forward pre-hook to its forward hook. It is in backward from the first
gradient at its outputs until gradients leave through its inputs; if none leave there, until all
parameters of the unit have a gradient. The issuer learns only whether any call needs the unit.
"""

from typing import Protocol

from shardwise.plans.order import Issuer
from shardwise.runtime.unit import Unit


class Call(Protocol):
    """One forward call of a unit's module; see ``hooks.py``."""

    leaves_by_inputs: bool
    """Whether gradients leave through its inputs: then that ends the call's backward."""


class Uses:
    """The running calls of one model's units."""

    def __init__(self, units: list[Unit], issuer: Issuer) -> None:
        self._units, self._held = units, issuer.units
        self._running = [0] * len(units)
        self._in_backward: list[set[Call]] = [set() for _ in units]

    def is_open(self, unit: Unit) -> bool:
        """Whether any call is running or in backward."""
        return self._held[unit.index].busy

    def in_backward(self, unit: Unit) -> bool:
        return bool(self._in_backward[unit.index])

    # --- forward ------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        self._running[unit.index] += 1
        self._held[unit.index].busy = True

    def leave(self, unit: Unit) -> bool:
        """A call's forward is over; returns whether no other forward of the unit runs."""
        self._running[unit.index] -= 1
        self._note(unit.index)
        return self._running[unit.index] == 0

    # --- backward -----------------------------------------------------------------------------

    def enter_backward(self, unit: Unit, call: Call) -> None:
        calls = self._in_backward[unit.index]
        if not calls:
            unit.arrived.clear()
        calls.add(call)
        self._held[unit.index].busy = True

    def leave_backward(self, unit: Unit, call: Call) -> None:
        self._in_backward[unit.index].discard(call)
        self._note(unit.index)

    def complete(self, unit: Unit) -> list[Call]:
        """The calls that end because all parameters of the unit got their gradients."""
        return [call for call in self._in_backward[unit.index] if not call.leaves_by_inputs]

    def has_all_grads(self, unit: Unit) -> bool:
        """Whether all trained parameters got a gradient in the current calls' backward."""
        return len(unit.arrived) == unit.num_trained

    def taken(self, unit: Unit) -> None:
        """A unit's gradients are being reduced: ends the calls that no input can end."""
        calls = self._in_backward[unit.index]
        self._in_backward[unit.index] = {call for call in calls if call.leaves_by_inputs}
        self._note(unit.index)

    # --- ends ---------------------------------------------------------------------------------

    def forget_running(self) -> None:
        """Forgets running forwards after an interruption."""
        self._running = [0] * len(self._units)
        self._note_all()

    def forget_backward(self) -> None:
        """Backward is over: forgets its calls."""
        for calls in self._in_backward:
            calls.clear()
        self._note_all()

    def _note_all(self) -> None:
        for index in range(len(self._units)):
            self._note(index)

    def _note(self, index: int) -> None:
        self._held[index].busy = self._running[index] > 0 or bool(self._in_backward[index])
