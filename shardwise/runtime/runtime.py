"""The runtime of one sharded model: fires the schedule's operations when hooks say it is time.

Reading order: ``before_forward``, ``after_forward``, ``before_backward``, ``after_backward`` here,
then gradients in ``backward.py`` and the update in ``optim.py``.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.carry import Carriers
from shardwise.comm.grid import Grid
from shardwise.core.errors import UsageError
from shardwise.core.ticket import Ticket
from shardwise.core.trace import active
from shardwise.plans.plan import Plan
from shardwise.plans.schedule import Kind, Op, Phase, Trigger
from shardwise.runtime.agreement import Agreed, Agreement
from shardwise.runtime.flat import ParamSlot, Pools
from shardwise.runtime.order import Hold, Use, Walk
from shardwise.runtime.surface.face import Face, shown_state
from shardwise.runtime.surface.watch import Watch
from shardwise.runtime.unit import State, Unit
from shardwise.tier.rest import Homes

if TYPE_CHECKING:
    from shardwise.runtime.activations.recompute import Activations
    from shardwise.runtime.optimizer.takeover import OptimizerTakeover


@dataclass
class Counters:
    """What happened beyond the plan; all zero when ranks and passes agree."""

    extra_gathers: int = 0
    """Uses beyond the recorded order, agreed on by all ranks."""
    skipped_gathers: int = 0
    """Gathers that this rank took part in only because others needed its part."""
    late_reduces: int = 0
    """Units reduced twice because a gradient arrived after the first time."""


@dataclass
class Runtime:
    """Everything that belongs to one sharded model on this rank."""

    model: nn.Module
    plan: Plan
    grid: Grid
    units: list[Unit]
    pools: Pools
    carriers: Carriers
    homes: Homes
    counters: Counters = field(default_factory=Counters)
    observers: list[Callable[[Op], None]] = field(default_factory=list)
    sync: bool = True
    """False under no_sync."""
    accumulated: bool = False
    """Whether a micro-batch under no_sync came since the last synchronisation."""
    divisor: float = 0.0
    """What reduced gradients are divided by; the number of ranks unless set."""
    opened: int = 0
    """How many full_params contexts are open."""
    removers: list[Callable[[], None]] = field(default_factory=list)
    recoveries: list[Callable[[], None]] = field(default_factory=list)
    """Run before every pass: each ends what an exception left unfinished elsewhere, if anything."""
    forgets: list[Callable[[], None]] = field(default_factory=list)
    """Run after an interrupted forward: each forgets calls whose end it will never see."""
    optimizers: "WeakKeyDictionary[Optimizer, ref[OptimizerTakeover]]" = field(
        default_factory=WeakKeyDictionary
    )
    """Those that were taken over, and by whom."""

    def __post_init__(self) -> None:
        from shardwise.runtime.backward import Backward

        self.divisor = float(self.grid.place.world)
        self.activations: Activations | None = None
        """Set by ``activations.install``."""
        self.backward = Backward(self)
        self.half_updated = False
        """Whether any rank's last backward has updated units, and no step followed."""
        self.forward_depth = 0
        self._lone_depth = 0
        self._traced: str | None = None
        """What the trace shows as being computed."""
        self.trained_slots = [s for s in self.slots if s.spec.param.requires_grad]
        self.watch = Watch(self)
        self._walks: dict[str, Walk] = {}
        self._walk: Walk | None = None
        self._backward_walk: Walk | None = None
        self._agreement = Agreement(self.grid.control, self.units)

    def __deepcopy__(self, memo: object) -> None:
        from shardwise.runtime.surface.guard import refuse_copy

        raise refuse_copy(type(self.model).__name__)

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]

    def state_of(self, optimizer: Optimizer, slot: ParamSlot) -> dict[str, Any]:
        """What an optimizer keeps for this rank's part of a parameter."""
        found = self.optimizers.get(optimizer)
        takeover = found() if found is not None else None
        return takeover.state_of(slot) if takeover else shown_state(optimizer, slot)

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def slots(self) -> Iterator[ParamSlot]:
        return (slot for unit in self.units for slot in unit.slots)

    @property
    def faces(self) -> list[Face]:
        """The model's parameters as the user sees them."""
        return list(dict.fromkeys(slot.face for slot in self.slots))

    @property
    def in_pass(self) -> bool:
        """Whether forward or backward of this model is running."""
        return self.forward_depth > 0 or in_autograd()

    def phase(self) -> Phase:
        """Where in a step the current pass is."""
        if not in_autograd() and not (torch.is_grad_enabled() or self.model.training):
            return Phase.EVAL
        if self.sync:
            return Phase.LAST if self.accumulated else Phase.ONLY
        return Phase.MIDDLE if self.accumulated else Phase.FIRST

    def _trace(self, name: str | None) -> None:
        trace, self._traced = active(), name
        if trace is not None:
            trace.switch("compute", name)

    def emit(self, op: Op | None) -> None:
        if op is not None:
            for observer in self.observers:
                observer(op)

    # --- the four verbs -----------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        """A module's forward begins: its unit's values are needed."""
        if in_autograd():
            self.begin_backward(recomputes=True)  # activation checkpointing
        else:
            if unit.encloses and self.forward_depth == 0:
                self._begin_forward()
            self.forward_depth += 1
            unit.running += 1
        self._use(unit)
        self._trace(f"forward {unit.name}")

    def after_forward(self, unit: Unit) -> None:
        """A module's forward is over: its unit's values go, or the kept rung stays."""
        if in_autograd():
            # Recomputed in backward, which needs them next; but of tiles the last ones first.
            if unit.is_tile and unit.hold is not None and not unit.hold.kept:
                self._give_back_in_backward(unit)
            return
        self.forward_depth -= 1
        unit.running -= 1
        if unit.running == 0 and not unit.external:
            self._give_back(unit)
        self._trace(None)
        if unit.encloses and self.forward_depth == 0:
            self._end_forward()

    def before_backward(self, unit: Unit, call: object) -> None:
        """A gradient reached the output of one forward call of the unit."""
        self.begin_backward()
        if not unit.in_backward:
            unit.arrived.clear()
        unit.in_backward.add(call)
        self._use(unit)
        self._trace(f"backward {unit.name}")

    def after_backward(self, unit: Unit, call: object) -> None:
        """Gradients left through the inputs of the call: its values are not needed any more."""
        unit.in_backward.discard(call)
        if self._traced == f"backward {unit.name}":  # the next unit's may have begun
            self._trace(None)
        kept = unit.hold is not None and unit.hold.kept
        if not kept or self.backward.took(unit):
            self._give_back_in_backward(unit)
        self.backward.left(unit)

    def grad_arrived(self, slot: ParamSlot) -> None:
        """A parameter got its gradient: with the last one, calls that no input can end are over."""
        unit = slot.unit
        unit.arrived.add(slot)
        if self.has_all_grads(unit):
            for call in [c for c in unit.in_backward if not getattr(c, "leaves_by_inputs", False)]:
                self.after_backward(unit, call)

    def has_all_grads(self, unit: Unit) -> bool:
        """Whether all trained parameters got a gradient in the current calls' backward."""
        return len(unit.arrived) == sum(len(flat.slots) for flat in unit.trained)

    def grads_taken(self, unit: Unit) -> None:
        """All gradients of a unit have arrived: calls that no input can end are over."""
        unit.in_backward = {c for c in unit.in_backward if getattr(c, "leaves_by_inputs", False)}
        self._give_back_in_backward(unit)

    def _give_back_in_backward(self, unit: Unit) -> None:
        if not unit.external and not self.backward.creates_graph:
            self._give_back(unit)
        # Not earlier: the gradient that ends one unit's backward begins the next one's first,
        # and for that moment both are gathered.
        if self._backward_walk is not None:
            self._gather_ahead(self._backward_walk)

    # --- passes -------------------------------------------------------------------------------

    def before_lone_forward(self) -> None:
        """A module of the root unit begins its forward, perhaps without the model's."""
        if self.in_pass:
            return
        self.require_stepped("forward")
        self.forward_depth = self._lone_depth = 1
        self._use(self.root)

    def after_lone_forward(self) -> None:
        if self._lone_depth and not in_autograd():
            self.forward_depth = self._lone_depth = 0
            if not torch.is_grad_enabled():
                self._release_external()

    @contextmanager
    def late_forward(self) -> Iterator[None]:
        """Tiles are used after the model's forward, by a loss outside of it: a pass of its own."""
        if self.in_pass or self.opened:
            yield
            return
        self.homes.check()
        kind = "late forward" if torch.is_grad_enabled() else "late forward without gradients"
        self.forward_depth, self._walk = 1, self._begin_walk(kind)
        try:
            yield
        finally:
            self.forward_depth = 0
            self._end_forward()

    def admit(self, unit: Unit) -> None:
        """Raises if a forward cannot begin; nothing is left to end then."""
        if self.forward_depth or in_autograd():
            return
        if unit.encloses:
            self.recover()
            self.homes.check()
            self.watch.look()
        self.require_stepped("forward")

    def _begin_forward(self) -> None:
        kind = "forward" if torch.is_grad_enabled() else "forward without gradients"
        self._walk = self._begin_walk(kind)

    def _end_forward(self) -> None:
        if self._walk is not None:
            self._end_walk(self._walk)
            self._walk = None
        if self.phase() is Phase.EVAL or not torch.is_grad_enabled():
            self._release_external()

    def begin_backward(self, *, recomputes: bool = False) -> None:
        """Idempotent: the first sign of a backward starts it."""
        # A recomputed forward has gradients enabled, whether backward makes a graph or not.
        if self.backward.begin(torch.is_grad_enabled() and not recomputes):
            self._backward_walk = self._begin_walk("backward")

    def end_uses(self) -> None:
        """The first part of a backward's end: this rank uses no more units."""
        if self._backward_walk is not None:
            try:
                self._end_walk(self._backward_walk)
            finally:
                self._backward_walk = None

    def end_backward(self) -> None:
        """The last part of a backward's end: all gradients have been reduced."""
        if self.backward.creates_graph:
            return  # a second backward will need the values: the next one frees them
        for unit in self.units:
            unit.in_backward.clear()
            self._give_back(unit)
            if not self._keeps_on():
                unit.drop_kept()
        self._release_external()

    def _begin_walk(self, kind: str) -> Walk | None:
        if self.opened or not any(unit.travels for unit in self.units):
            return None
        walk = self._walks.setdefault(kind, Walk(self.plan.prefetch))
        for unit in self.units:
            unit.fix_source()
        for unit in self.units:  # root first: its forward surrounds the others'
            if unit.external and unit.travels and unit.state is State.RESTING:
                self._gather(unit)
        for index in walk.begin():
            self._issue(index)
        for index in walk.beyond(self.plan.prefetch):
            self.units[index].fetch()
        return walk

    def _end_walk(self, walk: Walk) -> None:
        try:
            self._finish_walk(walk)
        finally:
            for unit in self.units:
                unit.release_source()
                unit.drop_fetched()

    def _finish_walk(self, walk: Walk) -> None:
        if walk.order is None:
            while self._agree(walk, None):
                pass
            if self._agreement.diverged:
                walk.record_unseen(self._unseen(walk), descending=self._is_backward(walk))
            walk.finish_recording()
            return
        self._advance(walk, walk.end())
        self.counters.skipped_gathers += walk.skipped
        if walk.extra:
            walk.stale = True  # the same on all ranks: every extra use was agreed on

    def _unseen(self, walk: Walk) -> list[int]:
        """Units that no rank used in a recorded pass, but any of them may use in the next one."""
        units = [
            unit.index
            for unit in self.units
            if unit.travels and not unit.external and unit.index not in walk.recording
        ]
        if not self._is_backward(walk):
            return units
        # What is kept in full comes to backward without a walk.
        return [index for index in units if self.units[index].rungs.keep > 0]

    def _is_backward(self, walk: Walk) -> bool:
        return walk is self._walks.get("backward")

    def recover(self) -> None:
        """Brings an unfinished pass (an exception in forward or backward) to its regular end.

        Transfers that other ranks expect are still made, so that ranks stay in step.
        """
        for recover in self.recoveries:
            recover()
        self.backward.finish_interrupted()
        if self.forward_depth or self._walk is not None:
            self.forward_depth = 0
            for unit in self.units:
                unit.running = 0
            if self._walk is not None:
                self._end_walk(self._walk)
                self._walk = None
            for unit in self.units:
                self._give_back(unit)

    # --- uses ---------------------------------------------------------------------------------

    def _use(self, unit: Unit) -> None:
        """Makes a unit's values readable, through the walk of the current pass."""
        if not unit.travels or self.opened or unit.hold is not None:
            unit.settle()
            return
        if unit.external:
            self._use_external(unit)
            return
        if in_autograd() and unit.leases == 0 and unit.state is not State.RESTING:
            unit.hold = Hold(last=True, kept=True)
            unit.settle()
            return
        walk = self._backward_walk if in_autograd() else self._walk
        if walk is not None and walk.order is not None:
            use = walk.use(unit.index)
            self._advance(walk, use)
            unit.hold = use.hold
            if use.gathers is None and unit.state is State.RESTING:
                self._gather_extra(unit)
            if not in_autograd() or walk.is_fresh:
                self._gather_ahead(walk)
        elif walk is not None:
            unit.hold = Hold(last=True)
            while unit.leases == 0:
                self._agree(walk, unit)
        else:
            unit.hold = Hold(last=True)
            if unit.state is State.RESTING:
                self._gather_extra(unit)
            else:
                unit.leases += 1
        unit.settle()

    def _advance(self, walk: Walk, use: Use) -> None:
        """What a step of a walk asks for; all that others wait for comes before any waiting."""
        for index in use.gathers or []:
            self._issue(index)
        if self._is_backward(walk):
            self.backward.skip([self.units[index] for index in use.skipped])
        for index in use.given_up:
            self._give_up(self.units[index])

    def _gather_ahead(self, walk: Walk) -> None:
        for index in walk.ahead():
            self._issue(index)
        for index in walk.beyond(self.plan.prefetch):
            self.units[index].fetch()

    def _use_external(self, unit: Unit) -> None:
        # Gathered when the pass began, unless its module is called outside the model's forward.
        if unit.state is State.RESTING:
            self._gather_extra(unit)
        unit.settle()

    def demand(self, slot: ParamSlot) -> None:
        """A parameter is read outside its own module's forward: its unit stays for whole passes."""
        unit = slot.unit
        assert isinstance(unit, Unit)
        if not unit.external:
            unit.external = True
            for walk in self._walks.values():
                walk.stale = True  # recorded anew, without this unit
        self._use_external(unit)

    def _give_back(self, unit: Unit) -> None:
        """Ends this rank's use of a unit; frees it when no claim is left."""
        if unit.running or unit.in_backward or not unit.travels:
            return
        if unit.external:
            return
        if unit.hold is not None:
            last, unit.hold = unit.hold.last, None
            if last:
                self._give_up(unit)

    def _give_up(self, unit: Unit) -> None:
        unit.leases = max(0, unit.leases - 1)
        if unit.leases == 0 and not unit.running and not unit.in_backward:
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        if unit.state not in (State.COMING, State.GATHERED) or self.opened:
            return
        phase = self.phase()
        if in_autograd() or self.backward.active:
            unit.free()
            self.emit(Op(Kind.FREE, unit.name))
            walk = self._backward_walk
            if not self._keeps_on() and not (walk and walk.comes_again(unit.index)):
                unit.drop_kept()
            return
        kinds = [op.kind for op in unit.ops(phase, Trigger.AFTER_FORWARD)]
        if Kind.KEEP in kinds:
            unit.settle()
            unit.keep()
            self.emit(Op(Kind.KEEP, unit.name))
        if Kind.FREE in kinds:
            unit.free()
            self.emit(Op(Kind.FREE, unit.name))

    def _keeps_on(self) -> bool:
        """Whether kept rungs outlive the current backward."""
        return self.plan.keep_until == "step" and not self.phase().synchronises

    def _release_external(self) -> None:
        for unit in self.units:
            if unit.external and not unit.in_backward:
                unit.leases = 0
                if (
                    unit.state in (State.COMING, State.GATHERED)
                    and unit.travels
                    and not self.opened
                ):
                    unit.free()
                    self.emit(Op(Kind.FREE, unit.name))

    def _issue(self, index: int) -> None:
        unit = self.units[index]
        unit.leases += 1
        self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        if unit.state is State.COMING:
            unit.settle()  # another gather of the same unit: in order, into the same buffer
        for op in unit.gather():
            self.emit(op)

    # --- agreement ----------------------------------------------------------------------------

    def _agree(self, walk: Walk, unit: Unit | None) -> bool:
        """While recording: one turn of all ranks, in which this one needs a unit, or none more.

        Returns whether any rank still proposed something.
        """
        agreed = self._agreement.on_use(unit, descending=self._is_backward(walk))
        return self._follow(agreed, walk, unit)

    def agree_on_reduction(self, unit: Unit | None) -> bool:
        """Likewise in backward, where this rank has completed a unit's gradients, or no more."""
        walk = self._backward_walk
        agreed = self._agreement.on_reduction(unit, descending=walk is not None)
        return self._follow(agreed, walk, None)

    def _follow(self, agreed: Agreed, walk: Walk | None, needed: Unit | None) -> bool:
        if agreed.gather is not None:
            if walk is not None:
                walk.recording.append(agreed.gather.index)
            self._issue(agreed.gather.index)
            if agreed.gather is not needed:
                self._give_up(agreed.gather)  # for others only
        for unit in agreed.reduces:
            self.backward.reduce_agreed(unit)
        return not agreed.ends

    def _gather_extra(self, unit: Unit) -> None:
        """A use beyond the order: all ranks gather the unit now, or there is an error."""
        self._agreement.on_extra_use(unit)
        self.counters.extra_gathers += 1
        # From P's own rung: what is kept of the unit may be gone already on some ranks.
        unit.drop_kept()
        unit.fix_source()
        self._issue(unit.index)

    # --- values -------------------------------------------------------------------------------

    def access(self, slot: ParamSlot, what: str) -> None:
        """A guarded parameter's values are asked for: wait, gather, or refuse."""
        if slot.unit.state is State.REFRESHING:
            slot.unit.settle()
        elif self.in_pass:
            self.demand(slot)
        else:
            raise UsageError(
                f"'{what}' needs the values of parameter '{slot.name}', which rest "
                f"{self._where(slot)}: read them inside "
                "'with shardwise.full_params(model):' (write with write=True), or take "
                "shardwise.state_dict(model)."
            )

    def _where(self, slot: ParamSlot) -> str:
        """Where the values of a parameter are, for people."""
        parts = slot.unit.rungs.ladder.parts[slot.unit.rungs.params]
        return f"in parts on {parts} ranks" if parts > 1 else "on another tier"

    def write(self, slot: ParamSlot, value: torch.Tensor) -> None:
        """Overwrites a parameter by a full value that all ranks pass alike."""
        if self.in_pass:
            raise UsageError(f"'{slot.name}' cannot be written inside forward or backward.")
        self.require_stepped(f"Writing '{slot.name}'")
        slot.unit.settle()
        self.grid.drain()
        slot.flat.write(slot.spec, value)
        slot.unit.bump()

    # --- context ------------------------------------------------------------------------------

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def release_all(self) -> None:
        """Before values change: no gathered copy of the old ones stays, and no rank reads them."""
        for unit in self.units:
            unit.in_backward.clear()
            unit.hold, unit.leases = None, 0
            unit.free()
            unit.settle()
        self.grid.drain()
        for unit in self.units:
            unit.drop_fetched()

    def notice_interruption(self, running: int = 0) -> None:
        """Recovers from a forward that counts as running but left this thread's stack.

        After a KeyboardInterrupt torch calls no hooks, not even those that it calls after errors.
        ``running`` is how many calls of the model are known to be on the stack.
        """
        if self.forward_depth == 0 or in_autograd():
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
        """``before_step``: it belongs between backward and the step."""
        self.notice_interruption()
        if self.in_pass:
            raise UsageError(f"{what} cannot run inside the model's forward or backward.")
        self.recover()
        self.watch.look()
        if not before_step:
            self.require_stepped(what)

    # --- updates in backward: see [Note: Update in backward] in backward.py -----------------------

    def update_in_backward(self, unit: Unit, reduced: Ticket) -> list[Ticket]:
        """Begins the update of a unit whose last gradients of this step are being reduced."""
        tickets = [t.update_in_backward(unit, reduced) for t in self._takeovers()]
        if self.is_updated(unit):
            self.emit(unit.update_op)
        return tickets

    def is_updated(self, unit: Unit) -> bool:
        """Whether the last backward updated a unit, and its optimizer has not stepped since."""
        return any(unit in takeover.updated for takeover in self._takeovers())

    def stepped(self) -> None:
        """An optimizer has stepped, or forgets that it should."""
        self.half_updated = any(takeover.updated for takeover in self._takeovers())

    def require_stepped(self, what: str) -> None:
        """Raises if some units have new values already and others still the old ones."""
        if self.half_updated or any(takeover.updated for takeover in self._takeovers()):
            raise UsageError(
                f"{what} cannot run now: the last backward has updated units (tiers.update = "
                "'backward' in the plan), and no optimizer.step() followed. Call it after every "
                "backward outside no_sync; if that failed, load a checkpoint, the optimizer's "
                "state first."
            )

    def _takeovers(self) -> list["OptimizerTakeover"]:
        found = (takeover() for takeover in self.optimizers.values())
        return [takeover for takeover in found if takeover is not None]


def in_autograd() -> bool:
    """Whether the current thread runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1
