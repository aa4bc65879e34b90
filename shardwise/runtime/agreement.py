"""How ranks agree on the next operation when there is no recorded order to follow.

All ranks exchange proposals and draw the same conclusion from them. Nothing is gathered or reduced
here: the runtime does what was agreed.

While a pass is recorded, ranks may propose different units, and each gets its turn. For a use
beyond the recorded order, all ranks must propose the same unit.
"""

from dataclasses import dataclass

import torch

from shardwise.comm.control import Control
from shardwise.core.errors import SyncError
from shardwise.runtime.unit import Unit

_END = -1
"""Proposed by a rank that has nothing more to do in the pass being recorded."""
_REDUCES = 1 << 32
"""Added to a unit's index when a rank proposes to reduce the unit instead of gathering it."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks do next in a pass that is being recorded."""

    gather: Unit | None
    reduces: list[Unit]
    ends: bool
    """Whether all ranks proposed the end."""


class Agreement:
    """Proposals of all ranks about the units of one model, exchanged on the control group."""

    def __init__(self, control: Control, units: list[Unit]) -> None:
        self._control, self._units = control, units
        self.diverged = False
        """Whether ranks used units differently; the same value on all ranks."""

    def on_use(self, unit: Unit | None, *, descending: bool) -> Agreed:
        """While recording: propose the unit that this rank needs next, or None for the end."""
        if unit is None:
            return self._propose(_END, "the end of a recorded pass", descending)
        return self._propose(unit.index, f"first use of unit '{unit.name}'", descending)

    def on_reduction(self, unit: Unit | None, *, descending: bool) -> Agreed:
        """While recording: propose the unit whose gradients are complete, or None for the end."""
        if unit is None:
            return self._propose(_END, "end of the first backward", descending)
        what = f"reduction of unit '{unit.name}'"
        return self._propose(_REDUCES + unit.index, what, descending)

    def on_extra_use(self, unit: Unit) -> None:
        """A use beyond the order: all ranks must want the same unit now, otherwise raise."""
        proposals = self._exchange(unit.index, f"use of unit '{unit.name}' beyond the order")
        if len(set(proposals)) > 1:
            wants = ", ".join(
                f"rank {rank} wants {self._name(p)}" for rank, p in enumerate(proposals)
            )
            raise SyncError(
                f"Ranks disagree about a use beyond the recorded order: {wants}; all ranks must "
                "use the model's units alike, or read them inside shardwise.full_params(model)."
            )

    def _propose(self, proposal: int, what: str, descending: bool) -> Agreed:
        """If ranks propose to gather different units, the first one in the model wins (the last one
        if descending), and the other ranks propose theirs again. So each unit is recorded once and
        in order, even if some ranks skip units.
        """
        proposals = set(self._exchange(proposal, what))
        self.diverged |= len(proposals) > 1
        gathers = [p for p in proposals if _END < p < _REDUCES]
        reduces = sorted(p - _REDUCES for p in proposals if p >= _REDUCES)
        turn = max if descending else min
        return Agreed(
            gather=self._units[turn(gathers)] if gathers else None,
            reduces=[self._units[index] for index in reduces],
            ends=proposals == {_END},
        )

    def _name(self, proposal: int) -> str:
        if proposal == _END:
            return "nothing more"
        if proposal >= _REDUCES:
            return f"to reduce '{self._units[proposal - _REDUCES].name}'"
        return f"'{self._units[proposal].name}'"

    def _exchange(self, value: int, what: str) -> list[int]:
        rows = self._control.exchange(torch.tensor([value], dtype=torch.int64), what)
        return [int(row[0]) for row in rows]
