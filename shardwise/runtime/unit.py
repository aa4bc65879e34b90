"""A unit at run time: its flats, its slots, and its state. No policy: see ``plans/order.py``.

A unit is in one of four states; what each costs in memory on this rank:

RESTING     P's shard only, unless that rests on a disk (and the kept rung, if any)
COMING      the full buffer has memory and is being filled
GATHERED    the full buffer holds current values; parameters are ordinary tensors
REFRESHING  P rests in full, and updated values are still arriving
"""

from enum import StrEnum
from functools import cached_property

from torch import nn

from shardwise.core.layout import UnitSpec
from shardwise.core.ticket import DONE, Ticket
from shardwise.model.tiling import Tile
from shardwise.plans.plan import Rungs
from shardwise.plans.schedule import UnitOps
from shardwise.plans.sums import Holds
from shardwise.runtime.flat import Flat
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface import guard


class State(StrEnum):
    """See the module's docstring."""

    RESTING = "resting"
    COMING = "coming"
    GATHERED = "gathered"
    REFRESHING = "refreshing"


_MOVES = {
    (State.RESTING, State.COMING),
    (State.COMING, State.COMING),  # fetched, and now gathered
    (State.COMING, State.GATHERED),
    (State.GATHERED, State.RESTING),
    (State.GATHERED, State.COMING),  # a collective that others need, though we have it
    (State.GATHERED, State.REFRESHING),
    (State.REFRESHING, State.GATHERED),
    (State.REFRESHING, State.REFRESHING),
}


class Unit:
    """Parameters that are gathered, reduced and updated together."""

    def __init__(
        self, index: int, spec: UnitSpec, module: nn.Module, ops: UnitOps, flats: list[Flat]
    ) -> None:
        self.index, self.name, self.spec, self.module = index, spec.name, spec, module
        self.ops, self.flats = ops, flats
        self.slots: list[ParamSlot] = []
        self.parameters: list[nn.Parameter] = []
        """Of the slots, in their order."""
        self.arrived: set[ParamSlot] = set()
        """Slots that got a gradient since a backward of the unit's calls began."""
        self.trained = [flat for flat in flats if flat.spec.requires_grad]
        self.encloses, self.travels = ops.encloses, ops.travels
        self.is_tile = isinstance(module, Tile)
        self.state = State.GATHERED if not ops.travels else State.RESTING
        self.coming: Ticket = DONE
        """Of the values that are on their way to the full buffer."""
        self.fetching: Ticket = DONE
        """Of a fetch that waits for a refresh."""
        self.refreshed: Ticket = DONE
        """Of updated values' way to P's shard."""
        self.refreshing = False
        """Whether they may still be on it."""
        self.new: set[Flat] = set()
        """Flats whose own elements of P the last update has written itself."""

    def __repr__(self) -> str:
        return f"<unit {self.name!r}: {self.spec.numel} parameters, {self.state}>"

    @cached_property
    def num_trained(self) -> int:
        """How many of the slots are trained."""
        return sum(len(flat.slots) for flat in self.trained)

    @property
    def rungs(self) -> Rungs:
        return self.ops.rungs

    @property
    def held(self) -> Holds:
        """By trained flat: whether micro-batches under no_sync have left something."""
        return tuple([flat.grads.holds for flat in self.trained])

    @property
    def summed(self) -> Holds:
        """By trained flat: whether reductions have left something."""
        return tuple([flat.grads.has_sums for flat in self.trained])

    def move_to(self, state: State) -> None:
        if (self.state, state) not in _MOVES:
            raise AssertionError(f"unit {self.name!r} cannot go from {self.state} to {state}")
        self.state = state

    def settle(self) -> None:
        """Waits for values that are on their way; afterwards parameters are ordinary tensors."""
        if self.state is State.COMING or self.state is State.REFRESHING:
            self.coming.wait()
            self.move_to(State.GATHERED)
            guard.open_up(self.parameters)

    def close(self) -> None:
        """From now on reading the parameters asks their owner."""
        guard.close(self.parameters)
