"""A unit at run time: its flats, slots and state. Decisions are made in ``plans/order.py``.

A unit is in one of four states. What each means for the memory of this rank:

RESTING     P's shard, unless it rests on a disk, and the kept rung, if any
COMING      the full buffer has memory and is being filled
GATHERED    the full buffer holds current values; parameters are ordinary tensors
REFRESHING  P rests in full, and updated values are still arriving
"""

from enum import StrEnum
from functools import cached_property

from torch import nn

from shardwise.comm.lane import Lane
from shardwise.core.layout import UnitSpec
from shardwise.core.ticket import DONE, Ticket
from shardwise.model.tiling import Tile
from shardwise.plans.ops import Kind
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
    (State.GATHERED, State.COMING),  # a collective that others need, even if this rank has values
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
        """The parameters of the slots, in the same order."""
        self.arrived: set[ParamSlot] = set()
        """Slots that got a gradient since the backward of the unit's calls began."""
        self.trained = [flat for flat in flats if flat.spec.requires_grad]
        self.encloses, self.travels = ops.encloses, ops.travels
        self.is_tile = isinstance(module, Tile)
        self.state = State.GATHERED if not ops.travels else State.RESTING
        self.coming: Ticket = DONE
        """For the values on their way to the full buffer."""
        self.issued: dict[Kind, tuple[Lane | None, Ticket]] = {}
        """The last operation of each kind: the lane that does it, and its ticket."""
        self.refreshing = False
        """Whether the last refresh may still run."""
        self.new: set[Flat] = set()
        """Flats for which the last update itself wrote this rank's elements of P."""

    def __repr__(self) -> str:
        return f"<unit {self.name!r}: {self.spec.numel} parameters, {self.state}>"

    @cached_property
    def num_trained(self) -> int:
        """The number of trained slots."""
        return sum(len(flat.slots) for flat in self.trained)

    @property
    def rungs(self) -> Rungs:
        return self.ops.rungs

    @property
    def held(self) -> Holds:
        """Per trained flat: whether micro-batches under no_sync have left gradients."""
        return tuple([flat.grads.holds for flat in self.trained])

    @property
    def summed(self) -> Holds:
        """Per trained flat: whether reductions have left sums."""
        return tuple([flat.grads.has_sums for flat in self.trained])

    def move_to(self, state: State) -> None:
        if (self.state, state) not in _MOVES:
            raise AssertionError(f"unit {self.name!r} cannot go from {self.state} to {state}")
        self.state = state

    def settle(self) -> None:
        """Waits for values on their way; afterwards the parameters are ordinary tensors."""
        if self.state is State.COMING or self.state is State.REFRESHING:
            self.coming.order_stream()
            self.move_to(State.GATHERED)
            guard.open_up(self.parameters)

    def close(self) -> None:
        """Guards the parameters: reading them now asks their owner."""
        guard.close(self.parameters)
