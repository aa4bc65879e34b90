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
from shardwise.plans.inputs import Inputs
from shardwise.plans.ops import Op, Phase, Trigger
from shardwise.plans.order import BACKWARD, Asks, Issue, Issuer
from shardwise.plans.plan import Plan, resolve, untiled
from shardwise.plans.schedule import Holds, UnitOps, trained_flats

FORWARD = "forward"


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
    """A model in training on one rank, as everybody expects it."""

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        topology: Topology,
        order: Sequence[str] | None = None,
        *,
        input_bytes: int = 0,
    ) -> None:
        self._plan = plan
        self._ops = unit_ops(plan, model, topology)
        self._issuer = Issuer(self._ops, plan.prefetch, plan.keep_until)
        self._index = {ops.name: index for index, ops in enumerate(self._ops)}
        root = model.units[0].name
        self._calls = list(
            _nested([name for name in (order or model.order) if name != root], model)
        )
        self._reached = {self._index[name] for name in reached_units(model)}
        self._inputs = Inputs(plan, input_bytes)
        self._leaving: set[int] = set()
        """Units that are to be updated when their own backward is over."""
        self._updated: set[int] = set()
        """Units that this step's backward has updated."""
        self._held: dict[int, Holds] = {}
        self._summed: dict[int, Holds] = {}
        self._is_recorded: set[bool] = set()
        """Passes with a backward, passes without, or both."""

    @property
    def units(self) -> list[UnitOps]:
        """The operations of every unit."""
        return self._ops

    def run(self, phase: Phase) -> tuple[Event, ...]:
        """One pass, and the step if it synchronises."""
        if (phase is Phase.EVAL) not in self._is_recorded:
            self._record(Phase.EVAL if phase is Phase.EVAL else Phase.ONLY)
        return tuple(self._pass(phase))

    def _record(self, phase: Phase) -> None:
        """The first pass of its kind, which is forgotten but for the order of its uses."""
        self._is_recorded.add(phase is Phase.EVAL)
        for _ in self._pass(phase):
            pass
        for walk in self._issuer.walks.values():
            if walk.order is None:
                walk.finish_recording()

    def _pass(self, phase: Phase) -> Iterator[Event]:
        yield from self._forward(phase)
        if phase is Phase.EVAL:
            return
        yield from self._backward(phase)
        if phase.synchronises:
            yield self._step()

    # --- forward ------------------------------------------------------------------------------

    def _forward(self, phase: Phase) -> Iterator[Event]:
        kind = FORWARD if phase is not Phase.EVAL else FORWARD + " without gradients"
        yield self._event(Trigger.BEGIN_FORWARD, 0, self._issuer.begin(kind, phase))
        yield self._before_forward(0)
        for unit, inside in self._calls:
            yield self._before_forward(unit)
            for tile in inside:
                yield self._before_forward(tile)
                yield self._after_forward(tile)
            yield self._after_forward(unit)
        yield self._after_forward(0)
        yield self._end_walk(Trigger.END_FORWARD, self._issuer.end_forward)

    def _before_forward(self, unit: int) -> Event:
        self._issuer.units[unit].busy = True
        return self._fire(Trigger.BEFORE_FORWARD, unit)

    def _after_forward(self, unit: int) -> Event:
        self._issuer.units[unit].busy = False
        ops, saved = self._ops[unit], ()
        if not (ops.encloses or ops.is_tile or self._issuer.phase is Phase.EVAL):
            saved = self._inputs.save(ops.name)
        return self._event(
            Trigger.AFTER_FORWARD, unit, self._issuer.on(Trigger.AFTER_FORWARD, unit), saved
        )

    # --- backward -----------------------------------------------------------------------------

    def _backward(self, phase: Phase) -> Iterator[Event]:
        yield self._event(Trigger.BEGIN_BACKWARD, 0, self._issuer.begin(BACKWARD, phase))
        yield self._before_backward(0)
        left: list[int] = []
        """What the gradient leaves that reaches the next unit."""
        for unit, inside in reversed(self._calls):
            uses = [use for use in (unit, *reversed(inside)) if use in self._reached]
            for use in uses:
                yield self._before_backward(use)
                for each in left:
                    yield self._after_backward(each)
                left = []
                # The first gradient that needs what is computed again: of a block, its last tile's.
                if use == (inside or [unit])[-1] and self._plan.activations != "keep":
                    yield from self._recompute(unit, inside)
                if use != unit:
                    yield from self._grads(use)
                    left = [use]
            if unit in self._reached:
                yield from self._grads(unit)
                left.append(unit)
        for each in left:
            yield self._after_backward(each)
        yield from self._grads(0)
        self._issuer.units[0].busy = False
        self._inputs.forget()
        yield self._end_walk(Trigger.END_BACKWARD, self._issuer.end_backward)

    def _recompute(self, unit: int, inside: Sequence[int]) -> Iterator[Event]:
        """A call's forward once more; tiles of the root belong to no call that is."""
        if self._ops[unit].is_tile:
            return
        inputs = self._inputs.load(self._ops[unit].name)
        issue = self._issuer.on(Trigger.BEFORE_RECOMPUTE, unit)
        yield self._event(Trigger.BEFORE_RECOMPUTE, unit, issue, inputs)
        for tile in inside:
            yield self._fire(Trigger.BEFORE_RECOMPUTE, tile)
            yield self._fire(Trigger.AFTER_RECOMPUTE, tile)
        yield self._fire(Trigger.AFTER_RECOMPUTE, unit)

    def _before_backward(self, unit: int) -> Event:
        self._issuer.units[unit].busy = True
        return self._fire(Trigger.BEFORE_BACKWARD, unit)

    def _after_backward(self, unit: int) -> Event:
        self._issuer.units[unit].busy = False
        issue = self._issuer.on(Trigger.AFTER_BACKWARD, unit)
        return self._event(Trigger.AFTER_BACKWARD, unit, issue, self._update_early(unit))

    def _update_early(self, unit: int) -> list[Op]:
        """Units that are not gathered compute with P itself: backward must have left them."""
        computes_with_p = self._issuer.units[unit].busy and not self._ops[unit].travels
        if unit not in self._leaving or computes_with_p:
            return []
        self._leaving.discard(unit)
        self._updated.add(unit)
        return self._issuer.update_early(unit)

    def _grads(self, unit: int) -> Iterator[Event]:
        ops = self._ops[unit]
        if not ops.trained:
            return
        yield self._fire(Trigger.FIRST_GRAD, unit)
        held, summed = self._held.get(unit), self._summed.get(unit)
        issue = self._issuer.ready(unit, held, summed)
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
        issues = [self._issuer.release_all(), *self._issuer.step(updated=self._updated)]
        self._updated.clear()
        self._summed.clear()  # the user's zero_grad
        ops = [op for issue in issues for op in (*issue.ops, *issue.later)]
        return Event(Trigger.STEP, "", tuple(ops))

    # --- inside -------------------------------------------------------------------------------

    def _fire(self, trigger: Trigger, unit: int) -> Event:
        return self._event(trigger, unit, self._issuer.on(trigger, unit))

    def _end_walk(self, trigger: Trigger, end: Any) -> Event:
        issuer = self._issuer
        walk = issuer.backward_walk if trigger is Trigger.END_BACKWARD else issuer.walk
        issue = Issue()
        if walk is not None:
            issue = issuer.end_walk(walk)
        after = end()
        issue.finish = after.finish
        issue.later += after.later
        return self._event(trigger, 0, issue)

    def _event(
        self, trigger: Trigger, unit: int, issue: Issue, more: Sequence[Op] = ()
    ) -> Event:
        """``more``: what goes with it, beside what the issuer says."""
        ops = [*issue.ops, *issue.later, *more]
        if issue.asks is not Asks.NOTHING:  # the pass that is recorded
            backward = self._issuer.in_backward
            walk = self._issuer.backward_walk if backward else self._issuer.walk
            ops += self._issuer.agreed(unit, needed=True, walk=walk).ops
        wait = None if issue.wait is None else self._ops[issue.wait].name
        return Event(trigger, self._ops[unit].name, tuple(ops), wait, issue.finish)


Call = tuple[int, list[int]]
"""A unit, and the tiles that its forward computes with."""


def _nested(order: Sequence[str], model: ModelSpec) -> Iterator[Call]:
    """The calls of a forward: tiles of a layer in a block belong to the block's."""
    index = {unit.name: i for i, unit in enumerate(model.units)}
    inside = {unit.name for unit in model.units if unit.inside}
    call: Call | None = None
    for name in order:
        if call is not None and name in inside and untiled(name) == model.units[call[0]].name:
            call[1].append(index[name])
            continue
        if call is not None:
            yield call
        call = (index[name], [])
    if call is not None:
        yield call
