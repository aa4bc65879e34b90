"""The simulator's interpreter of the schedule: events in, a program for the engine out.

``plans/expected.py`` drives the issuer through the passes of a step, and the issuer decides what is
issued when, as it does at run time. Nothing is decided here. As ``runtime/execute.py`` does an
operation on the lane that it names, after those it names, this makes a job of it; ``price.py`` says
what it takes. Between operations the units compute.

[Note: Tiers]
The threads of a tier share its bandwidth, and only moves of one kind wait for each other: fetches,
inputs one way, inputs the other way, and what is written to a disk behind other operations.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from shardwise.core.cluster import Cluster
from shardwise.core.layout import ModelSpec
from shardwise.core.work import Work
from shardwise.cost.engine import Compute, Instruction, Job, Mark, Submit, Wait
from shardwise.cost.habits import OURS, Habits
from shardwise.cost.price import Price, Prices
from shardwise.cost.units import backward_times, forward_flops
from shardwise.cost.updates import Updates
from shardwise.plans.expected import Event, Training
from shardwise.plans.ops import Kind, Lane, Op, Phase, Trigger
from shardwise.plans.plan import Plan
from shardwise.plans.schedule import UnitOps

WARM_UP_STEPS = 1
"""A step overlaps the refresh of the one before it, so that the first is not like the others."""

_COMPUTED = {Trigger.BEFORE_FORWARD: "forward", Trigger.BEFORE_RECOMPUTE: "recompute"}
"""What a unit computes after a trigger, beside its backward."""
_ROOT_COMPUTED = {Trigger.AFTER_FORWARD: "forward"}
"""The root's own modules, the head and the loss above all, compute when the others have."""
_VALUES = (Kind.FETCH, Kind.GATHER, Kind.REFRESH)
"""What a unit waits for before it computes."""
_AGAIN = (*_VALUES, Kind.LOAD)
"""The same before it is recomputed."""
_REDUCES = (Kind.REDUCE, Kind.REPLICATE, Kind.STORE)
_FREE = (Kind.FREE, Kind.DROP, Kind.RELEASE)


class Program:
    """The program of some steps of a plan."""

    def __init__(
        self, plan: Plan, model: ModelSpec, work: Work, cluster: Cluster, habits: Habits = OURS
    ) -> None:
        self._training = Training(plan, model, cluster.topology, input_bytes=work.input_bytes)
        self._units = {ops.name: ops for ops in self._training.units}
        self._root = model.units[0].name
        self._prices, self._habits, self._dtype = Prices(cluster, habits), habits, work.dtype
        self._flops, self._backward = forward_flops(model, work), backward_times(model)
        self._updates = Updates(self._prices, self._units)
        self._priced: dict[tuple[object, ...], tuple[Op, Price]] = {}
        self._jobs: dict[tuple[str, Kind], list[Job]] = {}
        """The jobs that a unit's last operation of a kind has become."""
        self._under_way: deque[list[Job]] = deque()
        """Reductions, unit by unit, that nobody has waited for."""
        self._due: str | None = None
        """A unit whose backward has begun, and computes when nothing else comes first."""
        self._synchronises = True

    def steps(self, phases: Sequence[Phase]) -> Iterator[Instruction]:
        """Some steps; marks begin with the last one. A step leaves what it has found."""
        passes = [(phase, self._training.run(phase)) for phase in phases]
        for step in range(WARM_UP_STEPS + 1):
            last = step == WARM_UP_STEPS
            if last:
                yield Mark("step")
            for phase, events in passes:
                if last and phase in (Phase.MIDDLE, Phase.LAST):
                    yield Mark(phase.value)
                self._synchronises = phase.synchronises
                for event in events:
                    yield from self._event(event)
        yield Mark("over")

    def _event(self, event: Event) -> Iterator[Instruction]:
        """What the main thread does at a trigger."""
        if self._due is not None and not self._comes_first(event):
            yield self._compute("backward", self._due)
            self._due = None
        if event.finish or event.trigger is Trigger.END_BACKWARD:
            yield from self._finish(event)
        if event.trigger is Trigger.STEP:
            yield from self._updates.of_all_in_memory(event.ops)
        for op in event.ops:
            yield from self._operation(op)
        if event.trigger is Trigger.GRADS_READY:
            self._begin_reduction(event)
        if event.wait is not None:
            recomputes = event.trigger is Trigger.BEFORE_RECOMPUTE
            yield from self._wait(event.wait, _AGAIN if recomputes else _VALUES)
        if event.trigger is Trigger.STEP and self._habits.waits:
            for name in self._units:
                yield from self._wait(name, (Kind.REFRESH,))
        computed = _ROOT_COMPUTED if event.unit == self._root else _COMPUTED
        if event.trigger in computed:
            yield self._compute(computed[event.trigger], event.unit)
        if event.trigger is Trigger.BEFORE_BACKWARD:
            self._due = event.unit

    # --- operations ---------------------------------------------------------------------------

    def _operation(self, op: Op) -> Iterator[Instruction]:
        if op.kind is Kind.RELEASE:
            yield from self._wait(op.unit, op.after)
        if op.kind in _FREE:
            return
        before = [job for kind in op.after for job in self._jobs.get((op.unit, kind), ())]
        if op.kind is Kind.UPDATE:
            yield from self._updates.of_one(op, before)
            return
        price = self._price(op)
        if op.lane is Lane.COMPUTE:
            for stage in price.chunks[0][0]:
                yield Compute(f"{op.kind} {op.unit}", stage)
            jobs = _behind(op, price, before)
        else:
            jobs = self._jobs_of(op, price, before)
        self._jobs[op.unit, op.kind] = jobs
        if op.kind in _REDUCES and self._is_late:
            return
        for job in jobs:
            yield Submit(job)

    def _price(self, op: Op) -> Price:
        """The same for all units that are alike, whose operations share their hops."""
        key = (op.kind, id(op.hops), op.moves, op.copies)
        found = self._priced.get(key)
        if found is None:
            unit = self._units[op.unit]
            price = self._prices.operation(op, _numel(unit, op), unit.rungs)
            if self._habits.all_reduces:
                price = self._as_all_reduce(op, unit, price)
            found = self._priced[key] = (op, price)  # the hops live on, so that their id does
        return found[1]

    def _as_all_reduce(self, op: Op, unit: UnitOps, price: Price) -> Price:
        """A rank gets the sums of all gradients of its parameters."""
        if op.kind is Kind.REDUCE:
            back = self._prices.replicate_back(op, unit.rungs)
            return Price([*price.chunks, (back, [])], price.then, price.behind)
        return Price([([], [])], [], price.behind) if op.kind is Kind.REPLICATE else price

    def _jobs_of(self, op: Op, price: Price, before: list[Job]) -> list[Job]:
        lane = op.kind.value if op.lane is Lane.TIER else op.lane.value
        name = f"{op.kind} {op.unit}"
        jobs: list[Job] = []
        outer: list[Job] = []
        for index, (inner, last) in enumerate(price.chunks):
            after: Sequence[Job] = () if jobs else before
            if last and index >= 2:
                # Two chunks have memory: the next begins when the last hop before the last is over.
                after = (outer[index - 2],)
            if inner or last:
                jobs.append(Job(lane, name, inner, after))
            if last:
                outer.append(Job(Lane.OUTER.value, name, last, (jobs[-1],)))
                jobs.append(outer[-1])
        if price.then:
            jobs.append(Job(lane, f"hold {op.unit}", price.then, () if jobs else before))
        return jobs + _behind(op, price, jobs or before)

    # --- waiting ------------------------------------------------------------------------------

    def _wait(self, unit: str, kinds: Sequence[Kind]) -> Iterator[Instruction]:
        for kind in kinds:
            for job in self._jobs.get((unit, kind), ()):
                if not job.done:
                    yield Wait(job)

    @property
    def _is_late(self) -> bool:
        """Whether reductions begin when backward is over."""
        return self._habits.late and self._synchronises

    def _begin_reduction(self, event: Event) -> None:
        kinds = [op.kind for op in event.ops if op.unit == event.unit and op.kind in _REDUCES]
        self._under_way.append([job for kind in kinds for job in self._jobs[event.unit, kind]])

    def _finish(self, event: Event) -> Iterator[Instruction]:
        """Waits for the oldest reductions; at the end of backward for all that goes on beside."""
        ends = event.trigger is Trigger.END_BACKWARD
        for _ in range(len(self._under_way) if ends else 0 if self._is_late else event.finish):
            jobs = self._under_way.popleft()
            for job in jobs if self._is_late else ():
                yield Submit(job)
            for job in jobs:
                yield Wait(job)
        if ends:
            yield from self._updates.finish()

    # --- computing ----------------------------------------------------------------------------

    def _comes_first(self, event: Event) -> bool:
        """Whether an event precedes what the due unit computes in backward: it is recomputed, or
        the gradient that has reached it leaves another unit, which gives back its buffer."""
        if event.trigger is Trigger.AFTER_BACKWARD:
            return event.unit != self._due
        return event.trigger in (Trigger.BEFORE_RECOMPUTE, Trigger.AFTER_RECOMPUTE)

    def _compute(self, what: str, unit: str) -> Compute:
        backward = what == "backward"
        flops = self._flops[unit] * (self._backward[unit] if backward else 1)
        stage = self._prices.compute(self._dtype, flops, backward=backward)
        return Compute(f"{what} {unit}", stage)


def _behind(op: Op, price: Price, after: Sequence[Job]) -> list[Job]:
    return [Job("store", f"{op.kind} {op.unit}", price.behind, after)] if price.behind else []


def _numel(unit: UnitOps, op: Op) -> int:
    """Of what is encoded: all parameters, or those that are trained."""
    flats = unit.unit.flats if op.kind is Kind.GATHER else unit.trained
    return sum(flat.numel for flat in flats)
