"""Tracks the arrival of gradients, and decides when a unit's gradients are ready to be reduced.

Gradients arrive one parameter at a time and are copied into their flat's full buffer. A unit is
ready when all gradients that it had in the recorded backward have arrived, and it is next in the
recorded order. So reductions match on all ranks and overlap the rest of backward. Gradients that
are missing at the end of backward count as zeros. If a gradient arrives after its unit was reduced,
the unit is reduced again. A tile's gradient is reduced on every arrival: once per use.

Nothing is reduced here: ``backward.py`` asks, and has reductions issued.
"""

from collections import Counter

import torch

from shardwise.core.errors import UsageError
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.unit import Unit


class Reductions:
    """The gradients of a model in the current backward."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = [unit for unit in units if unit.trained]
        self.slots = [slot for unit in units for slot in unit.slots if slot.is_trained]
        self.order: list[Unit] | None = None
        """Units in the order of their reductions; None until the first backward was recorded."""
        self._expected: dict[ParamSlot, int] = {}
        """How many gradients each parameter got in the recorded backward."""
        self._missing: dict[Unit, int] = {}
        self._recorded: list[Unit] = []
        self._launched: Counter[Unit] = Counter()
        """How many times each unit was reduced in this backward."""
        self.skipped: set[Unit] = set()
        """Units that this rank skipped: other ranks may wait for its zeros."""
        self._next = 0

    def begin(self) -> None:
        self._recorded.clear()
        self._launched.clear()
        self.skipped.clear()
        self._next = 0
        self._missing = dict.fromkeys(self.units, 0)
        for slot, count in self._expected.items():
            self._missing[slot.unit] += count

    def take(self, slot: ParamSlot, grad: torch.Tensor) -> bool:
        """Copies a local gradient that autograd has accumulated.

        Returns whether its unit now has all gradients that it had in the recorded backward.
        """
        unit = slot.unit
        with torch.no_grad():
            dense = grad.to_dense() if grad.is_sparse else grad.detach()
            slot.flat.grads.local.arrive(slot, dense, adds=slot.pending)
        slot.pending = slot.used = True
        slot.arrivals += 1
        if slot.arrivals <= self._expected.get(slot, 0) and not unit.is_tile:
            self._missing[unit] -= 1
        return unit.is_tile or self._missing[unit] == 0

    def proposed_by(self, slot: ParamSlot) -> Unit | None:
        """While recording: the unit that this arrival completes, if any."""
        unit = slot.unit
        if unit.is_tile:
            return unit
        trained = (other for other in unit.slots if other.is_trained)
        if unit not in self._launched and all(other.arrivals for other in trained):
            return unit
        return None

    def next_ready(self) -> Unit | None:
        """Takes the next unit of the recorded order, if it is ready."""
        if self.order is None or self._next >= len(self.order):
            return None
        unit = self.order[self._next]
        if not (unit in self.skipped or self._is_complete(unit)):
            return None
        self._next += 1
        return unit

    def _is_complete(self, unit: Unit) -> bool:
        complete = unit.is_tile or self._missing[unit] == 0
        return complete and bool([slot for slot in unit.slots if slot.pending])

    def launched(self, unit: Unit) -> None:
        self._launched[unit] += 1

    def agreed(self, unit: Unit) -> bool:
        """While recording: all ranks reduce a unit now, if they have not yet. Gradients that this
        rank has not computed yet arrive late."""
        if unit in self._launched and not unit.is_tile:
            return False
        self._recorded.append(unit)
        return True

    def took(self, unit: Unit) -> bool:
        """Whether all gradients of a unit have been taken in this backward."""
        if unit.is_tile:  # more may come, unless the recorded backward had no more
            return self.order is not None and self._launched[unit] >= self.order.count(unit)
        return unit in self._launched

    def rest(self) -> list[Unit]:
        """The units that are still to be reduced at the end of backward.

        The root comes last, because it encloses all others, even if a rank used only the root.
        """
        rest = [unit for unit in self.units if unit not in self._launched]
        if self.order is not None:
            rest = self.order[self._next :]
        return sorted(rest, key=lambda unit: unit.encloses)

    def is_last(self, unit: Unit) -> bool:
        """Whether this rank knows by itself that a unit's last reduction completes the step: it
        expects no more gradients, and every parameter of the unit got one on this rank."""
        assert self.order is not None
        arrived = all(
            slot.arrivals >= max(1, self._expected.get(slot, 0))
            for flat in unit.trained
            for slot in flat.slots
        )
        return arrived and unit not in self.order[self._next :] and unit not in self.skipped

    def finish_recording(self, rest: list[Unit]) -> None:
        """Makes the recorded reductions the order."""
        self.order = sorted(self._recorded + rest, key=lambda unit: unit.encloses)
        self._expected = {slot: slot.arrivals for slot in self.slots if slot.arrivals}

    def flags(self, updated: set[Unit], dropped: list[bool]) -> torch.Tensor:
        """What this rank reports to the others at the end of a backward."""
        found = [slot.used for slot in self.slots]
        found += dropped
        pending = {slot.unit for slot in self.slots if slot.pending}
        found += [unit in pending for unit in self.units]
        found += [unit in updated for unit in self.units]
        return torch.tensor(found, dtype=torch.uint8)

    def read_flags(self, flags: list[int], *, synchronises: bool) -> "Flags":
        """Reads what all ranks reported, and notes which parameters any of them used."""
        slots, units, count = self.slots, self.units, len(self.slots)
        for slot, used in zip(slots, flags[:count], strict=True):
            slot.has_grad = slot.has_grad or bool(used)
            slot.used = bool(used) and not synchronises
        rest = flags[2 * count :]
        return Flags(
            dropped=[
                slot for slot, drop in zip(slots, flags[count : 2 * count], strict=True) if drop
            ],
            late=[unit for unit, more in zip(units, rest[: len(units)], strict=True) if more],
            updated=[unit for unit, new in zip(units, rest[len(units) :], strict=True) if new],
        )


class Flags:
    """What the ranks reported at the end of a backward."""

    def __init__(self, dropped: list[ParamSlot], late: list[Unit], updated: list[Unit]) -> None:
        self.dropped, self.late, self.updated = dropped, late, updated
        """Parameters whose gradient was dropped during backward, units with more gradients to
        reduce, and units that backward updated; each on any rank."""

    def require_old(self) -> None:
        """Raises if a unit's gradient changed after backward had updated the unit."""
        _require_old(self.updated, self.late, "got a gradient")
        _require_old(self.updated, [slot.unit for slot in self.dropped], "lost a gradient")


def _require_old(updated: list[Unit], units: list[Unit], but: str) -> None:
    for unit in units:
        if unit in updated:
            raise UsageError(
                f"Unit '{unit.name}' {but} after it had been updated in the same backward; load a "
                "checkpoint, and set tiers.update = 'step' in the plan."
            )
