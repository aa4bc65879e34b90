"""The runtime of one sharded model on one rank: its components, and what they share.

The issuer (``plans/order.py``) decides, the executor (``execute.py``) executes, and hooks fire the
moments of ``forward.py`` and ``backward.py``. This module has the rest: values for users, contexts,
and recovery after exceptions.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm.carry import Carriers
from shardwise.comm.grid import Grid
from shardwise.core.errors import UsageError
from shardwise.core.flight import RECORDER
from shardwise.plans.ops import Phase, Trigger
from shardwise.plans.order import Issuer
from shardwise.plans.plan import Plan
from shardwise.runtime import values
from shardwise.runtime.backward import Backward
from shardwise.runtime.execute import Done, Executor
from shardwise.runtime.flat import Pools
from shardwise.runtime.forward import Forward, in_autograd
from shardwise.runtime.issues import Issues
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.steps import Steps
from shardwise.runtime.surface.face import Face
from shardwise.runtime.surface.guard import refuse_copy
from shardwise.runtime.surface.watch import Watch
from shardwise.runtime.unit import State, Unit
from shardwise.tier.rest import Homes

if TYPE_CHECKING:
    from shardwise.runtime.activations.recompute import Activations
    from shardwise.runtime.surface.nonfinite import Nonfinite


@dataclass
class Counters:
    """Counts of work beyond the plan; all zero while ranks and passes agree."""

    extra_gathers: int = 0
    """Uses beyond the recorded order, agreed on by all ranks."""
    skipped_gathers: int = 0
    """Gathers that this rank took part in only because others needed its shard."""
    late_reduces: int = 0
    """Units reduced again because a gradient arrived after the first reduction."""


class Runtime:
    """Everything that belongs to one sharded model on this rank."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        grid: Grid,
        units: list[Unit],
        pools: Pools,
        carriers: Carriers,
        homes: Homes,
    ) -> None:
        self.model, self.plan, self.grid, self.units = model, plan, grid, units
        self.pools, self.carriers, self.homes = pools, carriers, homes
        self.slots = [slot for unit in units for slot in unit.slots]
        self.trained_slots = [slot for slot in self.slots if slot.is_trained]
        self.faces: list[Face] = list(dict.fromkeys(slot.face for slot in self.slots))
        """The model's parameters as the user sees them."""
        self.counters = Counters()
        self.sync = True
        """False under no_sync."""
        self.accumulated = False
        """Whether a micro-batch ran under no_sync since the last synchronisation."""
        self.removers: list[Callable[[], None]] = []
        """Run by ``unshard``."""
        self.recoveries: list[Callable[[], None]] = []
        """Run before every pass: each finishes what an exception left unfinished, if anything."""
        self.before_writes: list[Callable[[], None]] = []
        """Run before values change outside a step: each waits for somebody who still reads them."""
        self.forgets: list[Callable[[], None]] = []
        """Run after an interrupted forward: each forgets calls that will never return."""
        self.activations: Activations | None = None
        """Set by ``recompute.install``."""
        self.nonfinite: Nonfinite | None = None
        """The first gradient with a NaN or an Inf, if the last clipping found any."""
        self.issuer = Issuer([unit.ops for unit in units], plan)
        self.executor = Executor(units, grid, carriers)
        self.issues = Issues(self)
        self.steps = Steps(self)
        self.forward = Forward(self)
        self.backward = Backward(self, self.forward)
        self.watch = Watch(self)
        for slot in self.slots:
            slot.runtime = self

    def __deepcopy__(self, memo: object) -> None:
        raise refuse_copy(type(self.model).__name__)

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def observers(self) -> list[Callable[[Done], None]]:
        """Each is called with every executed operation."""
        return self.executor.observers

    @property
    def in_pass(self) -> bool:
        """Whether forward or backward of this model is running."""
        return self.forward.depth > 0 or in_autograd()

    def phase(self) -> Phase:
        """The phase of a pass with gradients that begins now."""
        if self.sync:
            return Phase.LAST if self.accumulated else Phase.ONLY
        return Phase.MIDDLE if self.accumulated else Phase.FIRST

    def stats(self) -> dict[str, Any]:
        """What ``shardwise.stats`` returns."""
        return {
            **asdict(self.counters),
            "param_buffers_peak_bytes": self.pools.params.peak_bytes,
            "grad_buffers_peak_bytes": self.pools.grads.peak_bytes,
            "wire_buffers_bytes": self.carriers.held_bytes,
            "links": self.grid.link_kinds,
        }

    # --- values -------------------------------------------------------------------------------

    def access(self, slot: ParamSlot, what: str) -> None:
        """A guarded parameter's values are read: wait for a refresh, gather, or raise."""
        if slot.unit.state is State.REFRESHING:
            slot.unit.settle()
        elif self.in_pass:
            # Read outside its own module's forward: its unit now stays gathered for whole passes.
            self.issuer.stays(slot.unit.index)
            self.issues.follow(self.issuer.on(Trigger.BEFORE_FORWARD, slot.unit.index))
        else:
            shards = slot.unit.rungs.ladder.parts[slot.unit.rungs.params]
            where = f"as shards on {shards} ranks" if shards > 1 else "on another tier"
            raise UsageError(
                f"'{what}' needs the values of parameter '{slot.name}', which rest {where}: read "
                "them inside 'with shardwise.full_params(model):' (write with write=True), or take "
                "shardwise.state_dict(model)."
            )

    def write(self, slot: ParamSlot, value: torch.Tensor) -> None:
        """Overwrites a parameter with a full value, which must be equal on all ranks."""
        if self.in_pass:
            raise UsageError(f"'{slot.name}' cannot be written inside forward or backward.")
        self.steps.require(f"Writing '{slot.name}'")
        self.await_readers()
        slot.unit.settle()
        self.grid.block_host_until_idle()
        values.write(slot.flat, slot.spec, value)
        self.changed(slot.unit)

    def await_readers(self) -> None:
        """Before values change outside a step."""
        for wait in self.before_writes:
            wait()

    def changed(self, unit: Unit) -> None:
        """A unit's values have changed: drops what was kept or fetched, which is stale."""
        self.executor.run(self.issuer.changed(unit.index))

    def open(self, unit: Unit) -> None:
        """Gathers a unit for the user, without a lossy wire format; collective."""
        self.executor.run(self.issuer.open(unit.index))
        unit.settle()

    def close(self, unit: Unit) -> None:
        self.executor.run(self.issuer.close(unit.index))

    @property
    def opened(self) -> int:
        """How many full_params contexts are open."""
        return self.issuer.opened

    def release_all(self) -> None:
        """Before values change: frees all gathered copies, and waits until no rank reads them."""
        self.forward.uses.forget_backward()
        self.executor.run(self.issuer.release_all())
        for unit in self.units:
            unit.settle()
        self.grid.order_after_transfers()

    # --- contexts and recovery ----------------------------------------------------------------

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def admit(self, unit: Unit) -> None:
        """Raises if a forward cannot begin; then there is nothing to undo."""
        if self.in_pass:
            return
        if unit.encloses:
            self.recover()
            self.homes.check()
            self.watch.look()
        self.steps.require("forward")

    def recover(self) -> None:
        """Finishes a pass that an exception in forward or backward interrupted.

        The transfers that other ranks expect are still made, so that ranks stay in step.
        """
        RECORDER.reset()
        for recover in self.recoveries:
            recover()
        self.backward.finish()
        self.forward.interrupt()

    def notice_interruption(self, running: int = 0) -> None:
        """Recovers from a forward that is marked as running but left this thread's stack.

        After a KeyboardInterrupt torch calls no hooks, not even hooks with ``always_call``.
        ``running``: how many calls of the model are known to be on the stack.
        """
        if self.forward.depth == 0 or in_autograd():
            return
        modules = {self.model} if running else set(self.model.modules())
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                running -= frame.f_locals.get("self") in modules
            if running < 0:
                return
            frame = frame.f_back
        for forget in self.forgets:
            forget()
        self.recover()

    def require_idle(self, what: str, *, before_step: bool = False) -> None:
        """Raises inside a pass. ``before_step``: ``what`` belongs between backward and the step."""
        self.notice_interruption()
        if self.in_pass:
            raise UsageError(f"{what} cannot run inside the model's forward or backward.")
        self.recover()
        self.watch.look()
        if not before_step:
            self.steps.require(what)
