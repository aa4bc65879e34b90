"""From a gradient's arrival at a parameter to a unit whose gradients are ready.

Gradients arrive one parameter at a time and are copied into their flat's full buffer. A unit is
ready when all gradients that the recorded backward had for it have arrived, and its turn in the
recorded order has come, so that reductions match on all ranks and overlap the rest of backward.
What is missing at the end of backward counts as zeros; what arrives after its unit was reduced is
reduced once more. A tile's gradient is reduced whenever it arrives: once for each use.

Everything here answers questions; ``backward.py`` asks them, and has reductions issued.
"""

from collections import Counter

import torch

from shardwise.core.errors import UsageError
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.unit import Unit


class Reductions:
    """The gradients of the current backward of one model."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = [unit for unit in units if unit.trained]
        self.slots = [slot for unit in units for slot in unit.slots if slot.is_trained]
        self.order: list[Unit] | None = None
        """Units in the order of their reductions; None until one backward was recorded."""
        self._expected: dict[ParamSlot, int] = {}
        """How many gradients each parameter got in the recorded backward."""
        self._missing: dict[Unit, int] = {}
        self._recorded: list[Unit] = []
        self._launched: Counter[Unit] = Counter()
        """How often each unit was reduced in this backward."""
        self.skipped: set[Unit] = set()
        """Units that this rank passed by: others may wait for its zeros."""
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

        Returns whether its unit has all that the recorded backward had.
        """
        full, unit = slot.flat.grads.full, slot.unit
        if full is None:
            full = slot.flat.grads.buffer()
        place = full[slot.place].view(slot.spec.param.shape)
        with torch.no_grad():
            dense = grad.to_dense() if grad.is_sparse else grad.detach()
            place.add_(dense) if slot.pending else place.copy_(dense)
        slot.pending = slot.used = True
        slot.arrivals += 1
        if slot.arrivals <= self._expected.get(slot, 0) and not unit.is_tile:
            self._missing[unit] -= 1
        return unit.is_tile or self._missing[unit] == 0

    def proposed_by(self, slot: ParamSlot) -> Unit | None:
        """While a backward is recorded: the unit that an arrival completes."""
        unit = slot.unit
        if unit.is_tile:
            return unit
        trained = (other for other in unit.slots if other.is_trained)
        if unit not in self._launched and all(other.arrivals for other in trained):
            return unit
        return None

    def next_ready(self) -> Unit | None:
        """The next unit in the recorded order, if it is ready; its turn is over by that."""
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
        """While recording: all ranks reduce a unit now, unless they have; what this one has not
        computed yet arrives late."""
        if unit in self._launched and not unit.is_tile:
            return False
        self._recorded.append(unit)
        return True

    def took(self, unit: Unit) -> bool:
        """Whether all gradients of a unit have been taken in this backward."""
        if unit.is_tile:  # others may come, unless the recorded backward says otherwise
            return self.order is not None and self._launched[unit] >= self.order.count(unit)
        return unit in self._launched

    def rest(self) -> list[Unit]:
        """What is still to be reduced at the end of backward.

        The root last: it surrounds all others, even if some rank used nothing else.
        """
        rest = [unit for unit in self.units if unit not in self._launched]
        if self.order is not None:
            rest = self.order[self._next :]
        return sorted(rest, key=lambda unit: unit.encloses)

    def is_last(self, unit: Unit) -> bool:
        """Whether the gradients that were taken last complete the step's, as far as this rank knows
        by itself: no more come, and all parameters got theirs here."""
        assert self.order is not None
        arrived = all(
            slot.arrivals >= max(1, self._expected.get(slot, 0))
            for flat in unit.trained
            for slot in flat.slots
        )
        return arrived and unit not in self.order[self._next :] and unit not in self.skipped

    def finish_recording(self, rest: list[Unit]) -> None:
        """The recorded reductions become the order."""
        self.order = sorted(self._recorded + rest, key=lambda unit: unit.encloses)
        self._expected = {slot: slot.arrivals for slot in self.slots if slot.arrivals}

    def flags(self, updated: set[Unit], dropped: list[bool]) -> torch.Tensor:
        """What this rank has to tell the others at the end of a backward."""
        found = [slot.used for slot in self.slots]
        found += dropped
        pending = {slot.unit for slot in self.slots if slot.pending}
        found += [unit in pending for unit in self.units]
        found += [unit in updated for unit in self.units]
        return torch.tensor(found, dtype=torch.uint8)

    def read_flags(self, flags: list[int], *, synchronises: bool) -> "Flags":
        """What all ranks have told: which parameters any of them used, among other things."""
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
    """What any rank has to say at the end of a backward."""

    def __init__(self, dropped: list[ParamSlot], late: list[Unit], updated: list[Unit]) -> None:
        self.dropped, self.late, self.updated = dropped, late, updated
        """Parameters whose gradient the user of any rank dropped before backward was finished,
        units that any rank has more gradients for, and units that any rank's backward updated."""

    def require_old(self) -> None:
        """Raises where a unit's gradient changed after it was updated with it."""
        _require_old(self.updated, self.late, "got a gradient")
        _require_old(self.updated, [slot.unit for slot in self.dropped], "lost a gradient")


def _require_old(updated: list[Unit], units: list[Unit], but: str) -> None:
    for unit in units:
        if unit in updated:
            raise UsageError(
                f"Unit '{unit.name}' {but} after it had been updated in the same backward; set "
                "tiers.update = 'step' in the plan, and load a checkpoint."
            )
