"""The optimizers of a model, and the units that backward has updated before they step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.core.flight import RECORDER
from shardwise.core.ticket import DONE, Chained, Ticket
from shardwise.plans.ops import Kind, Op
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.surface.face import shown_state
from shardwise.runtime.unit import Unit

if TYPE_CHECKING:
    from shardwise.runtime.optimizer.takeover import OptimizerTakeover
    from shardwise.runtime.runtime import Runtime


class Steps:
    """The optimizers that were taken over for one model."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self.optimizers: WeakKeyDictionary[Optimizer, ref[OptimizerTakeover]] = WeakKeyDictionary()
        """The optimizers, each with its takeover."""
        self.before: list[Callable[[], None]] = []
        """Run before any of them steps, also one that is taken over by that step."""
        self.half_updated = False
        """Whether the last backward updated units on any rank, and no step followed."""

    def begin(self) -> None:
        """An optimizer is about to change values."""
        for action in list(self.before):  # an action may remove itself
            action()

    def takeover_of(self, optimizer: Optimizer) -> "OptimizerTakeover | None":
        """How an optimizer was taken over; None before the first step of one built later."""
        found = self.optimizers.get(optimizer)
        return found() if found is not None else None

    def state_of(self, optimizer: Optimizer, slot: ParamSlot) -> dict[str, Any]:
        """What an optimizer keeps for this rank's shard of a parameter."""
        takeover = self.takeover_of(optimizer)
        return takeover.state_of(slot) if takeover else shown_state(optimizer, slot)

    def update_early(self, unit: Unit, op: Op, reduced: list[Ticket]) -> list[Ticket]:
        """Starts the update of a unit whose last gradients of this step are being reduced."""
        moving = [takeover for takeover in self._takeovers() if takeover.moves(unit)]
        ready = Chained(DONE, reduced)
        found: list[Ticket] = []

        def update(unit: Unit, op: Op) -> Ticket:
            found.extend(takeover.update_in_backward(unit, ready) for takeover in moving)
            return Chained(DONE, found)

        if moving:
            self._runtime.executor.verbs[Kind.UPDATE] = update
            self._runtime.executor.perform(op)
        return found

    @property
    def updated(self) -> set[Unit]:
        """Units that the last backward updated, and whose optimizer has not stepped since."""
        return {unit for takeover in self._takeovers() for unit in takeover.updated}

    def stepped(self) -> None:
        """An optimizer has stepped, or its pending step was cancelled."""
        self.half_updated = bool(self.updated)
        RECORDER.stepped()

    def require(self, what: str) -> None:
        """Raises if some units already have new values while others have old ones."""
        if self.half_updated or self.updated:
            raise UsageError(
                f"{what} cannot run now: the last backward has updated units (tiers.update = "
                "'backward' in the plan), and no optimizer.step() followed. Call it after every "
                "backward outside no_sync; if that failed, load a checkpoint, the optimizer's "
                "state first."
            )

    def _takeovers(self) -> list["OptimizerTakeover"]:
        found = (takeover() for takeover in self.optimizers.values())
        return [takeover for takeover in found if takeover is not None]
