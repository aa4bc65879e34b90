"""The passes of a step as they are expected: every rank uses every unit, in the model's order.

The issuer (``order.py``) is driven through the triggers that hooks would fire; what it issues are
the events of a pass. ``explain`` prints them, the simulator prices them, traffic sums them up, and
tests compare them with what a run has done.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.layout import ModelSpec
from shardwise.core.topology import Topology
from shardwise.plans.inputs import ExpectedInputs
from shardwise.plans.moments import Moment, backward_moments, calls_of, forward_moments, uses
from shardwise.plans.ops import Op, Phase, Trigger
from shardwise.plans.order import BACKWARD, Asks, Issue, Issuer
from shardwise.plans.placed import trained_flats
from shardwise.plans.plan import Plan, resolve
from shardwise.plans.schedule import UnitOps
from shardwise.plans.sums import Holds
from shardwise.plans.walk import Walk

FORWARD = "forward"
WITHOUT_GRADIENTS = FORWARD + " without gradients"


@dataclass(frozen=True, slots=True)
class Event:
    """A trigger on a unit, and what it sets off; ``unit`` is empty for the step.

    What is gathered ahead of its use belongs to the trigger that sets it off.
    """

    trigger: Trigger
    unit: str
    ops: tuple[Op, ...] = ()
    wait: str | None = None
    """The unit whose values must be there before the program goes on."""
    finish: int = 0
    """So many of the oldest reductions under way must be over before ``ops``."""


def schedule(
    plan: Plan,
    model: ModelSpec,
    topology: Topology,
    phase: Phase = Phase.ONLY,
    order: Sequence[str] | None = None,
    *,
    input_bytes: int = 0,
) -> tuple[Event, ...]:
    """The expected events of one pass (and, where it synchronises, the step), in order.

    ``order`` names the units in the order of their forward; the default is the module tree's.
    The root unit is the model's first. ``input_bytes`` is what a unit's call has of inputs that may
    rest on a tier; without it nothing is said of them.
    """
    training = Training(plan, model, topology, order, input_bytes=input_bytes)
    if phase in (Phase.MIDDLE, Phase.LAST):
        training.run(Phase.FIRST)  # which leaves what these find
    return training.run(phase)


def reached_units(model: ModelSpec) -> set[str]:
    """The units that backward reaches: the root, and all from the first on that is trained.

    The root is taken to be first as a whole: where any of it is trained, all others are reached.
    """
    root, *inner = model.units
    first = 0 if trained_flats(root) else len(inner)
    for index, unit in enumerate(inner[:first]):
        if trained_flats(unit):
            first = index
            break
    return {root.name, *(unit.name for unit in inner[first:])}


def unit_ops(plan: Plan, model: ModelSpec, topology: Topology) -> list[UnitOps]:
    """The operations of every unit; alike units of a plan without exceptions differ in name only.

    A search looks at thousands of schedules of models with dozens of alike blocks.
    """
    alike: dict[tuple[Any, ...], UnitOps] = {}
    found = []
    for index, unit in enumerate(model.units):
        key = (unit.shape, "/" in unit.name)
        known = alike.get(key) if index and not plan.overrides else None
        if known is None:
            rungs, own = resolve(plan, topology, unit.name), plan.for_unit(unit.name)
            made = UnitOps(unit, rungs, own, encloses=index == 0)
            if index:
                alike[key] = made
        else:
            made = known.named(unit)
        found.append(made)
    return found


class Training:
    """A model in training on one rank, as everybody expects it.

    All passes follow the order of uses that the first ones would have recorded.
    """

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        topology: Topology,
        order: Sequence[str] | None = None,
        *,
        input_bytes: int = 0,
    ) -> None:
        self.units = unit_ops(plan, model, topology)
        self._issuer = Issuer(self.units, plan)
        calls, self._reached = calls_of(model, order or model.order), reached_units(model)
        self._forward = list(forward_moments(calls))
        self._backward = list(
            backward_moments(
                [call for call in calls if self.units[call.unit].name in self._reached],
                self.units,
                recomputes=plan.activations != "keep",
            )
        )
        for kind, moments in (
            (FORWARD, self._forward),
            (WITHOUT_GRADIENTS, self._forward),
            (BACKWARD, self._backward),
        ):
            walk = self._issuer.walks[kind] = Walk(plan.prefetch)
            walk.recording = uses(moments, self.units)
            walk.finish_recording()
        self._inputs = ExpectedInputs(self._issuer.inputs, input_bytes)
        self._leaving: set[int] = set()
        """Units that are to be updated when their own backward is over."""
        self._updated: set[int] = set()
        """Units that this step's backward has updated."""
        self._held: dict[int, Holds] = {}
        self._summed: dict[int, Holds] = {}

    def run(self, phase: Phase) -> tuple[Event, ...]:
        """One pass, and the step if it synchronises."""
        return tuple(self._pass(phase))

    def _pass(self, phase: Phase) -> Iterator[Event]:
        issuer = self._issuer
        kind = WITHOUT_GRADIENTS if phase is Phase.EVAL else FORWARD
        yield self._event(Trigger.BEGIN_FORWARD, 0, issuer.begin(kind, phase))
        yield from self._fire_all(self._forward)
        yield self._end_walk(Trigger.END_FORWARD, issuer.end_forward)
        if phase is Phase.EVAL:
            return
        yield self._event(Trigger.BEGIN_BACKWARD, 0, issuer.begin(BACKWARD, phase))
        yield from self._fire_all(self._backward)
        issuer.units[0].busy = False
        self._inputs.end()
        yield self._end_walk(Trigger.END_BACKWARD, issuer.end_backward)
        if phase.synchronises:
            yield self._step()

    def _fire_all(self, moments: Sequence[Moment]) -> Iterator[Event]:
        for trigger, unit in moments:
            if trigger is Trigger.GRADS_READY:
                yield from self._grads(unit)
                continue
            if trigger in _USES:
                self._issuer.units[unit].busy = _USES[trigger]
            issue = self._issuer.on(trigger, unit)
            yield self._event(trigger, unit, issue, self._beside(trigger, unit))

    def _beside(self, trigger: Trigger, unit: int) -> Sequence[Op]:
        """What goes with a trigger beside what the issuer says."""
        ops = self.units[unit]
        if trigger is Trigger.AFTER_BACKWARD:
            return self._update_early(unit)
        if ops.encloses or ops.is_tile:
            return ()
        if trigger is Trigger.BEFORE_FORWARD and self._issuer.phase is not Phase.EVAL:
            return self._inputs.save(ops.name, reached=ops.name in self._reached)
        return self._inputs.load(ops.name) if trigger is Trigger.BEFORE_RECOMPUTE else ()

    # --- gradients ----------------------------------------------------------------------------

    def _update_early(self, unit: int) -> list[Op]:
        """Units that are not gathered compute with P itself: backward must have left them."""
        computes_with_p = self._issuer.units[unit].busy and not self.units[unit].travels
        if unit not in self._leaving or computes_with_p:
            return []
        self._leaving.discard(unit)
        self._updated.add(unit)
        return self._issuer.update_early(unit)

    def _grads(self, unit: int) -> Iterator[Event]:
        ops = self.units[unit]
        if not ops.trained:
            return
        yield self._event(Trigger.FIRST_GRAD, unit, self._issuer.on(Trigger.FIRST_GRAD, unit))
        issue = self._issuer.ready(unit, self._held.get(unit), self._summed.get(unit))
        if ops.updates_early and self._issuer.phase.synchronises:
            self._leaving.add(unit)
        yield self._event(Trigger.GRADS_READY, unit, issue, self._update_early(unit))
        every = (True,) * len(ops.trained)
        if self._issuer.phase.synchronises or ops.rungs.grads == ops.rungs.bottom:
            self._summed[unit] = every
            self._held.pop(unit, None)
        else:
            self._held[unit] = every

    # --- the step -----------------------------------------------------------------------------

    def _step(self) -> Event:
        ops = self._issuer.release_all()
        for issue in self._issuer.step(updated=self._updated):
            ops += issue.ops
        self._updated.clear()
        self._summed.clear()  # the user's zero_grad
        return Event(Trigger.STEP, "", tuple(ops))

    # --- inside -------------------------------------------------------------------------------

    def _end_walk(self, trigger: Trigger, end: Any) -> Event:
        issuer = self._issuer
        walk = issuer.backward_walk if trigger is Trigger.END_BACKWARD else issuer.walk
        issue = Issue()
        if walk is not None:
            issue = issuer.end_walk(walk)
            if walk.order is None:
                walk.finish_recording()
        after = end()
        issue.finish = after.finish
        issue.later += after.later
        return self._event(trigger, 0, issue)

    def _agree(self, unit: int, issue: Issue) -> None:
        """All ranks want a unit beyond the order: what is kept in full is freed when backward has
        used it, and a tied tile is used twice. The next pass is recorded anew."""
        issuer = self._issuer
        walk = issuer.backward_walk if issuer.in_backward else issuer.walk
        if issue.asks is Asks.EXTRA_USE:
            agreed = issuer.extra(unit)
        else:
            agreed = issuer.agreed(unit, needed=True, walk=walk)
        issue.later += agreed.ops

    def _event(self, trigger: Trigger, unit: int, issue: Issue, more: Sequence[Op] = ()) -> Event:
        if issue.asks is not Asks.NOTHING:
            self._agree(unit, issue)
        wait = None if issue.wait is None else self.units[issue.wait].name
        ops = (*issue.ops, *issue.later, *more)
        return Event(trigger, self.units[unit].name, ops, wait, issue.finish)


_USES = {
    Trigger.BEFORE_FORWARD: True,
    Trigger.AFTER_FORWARD: False,
    Trigger.BEFORE_BACKWARD: True,
    Trigger.AFTER_BACKWARD: False,
}
"""Whether a unit is busy after a trigger."""
