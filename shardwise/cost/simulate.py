"""A step of a plan on a cluster, simulated: the schedule's events, priced and run by the engine.

The program below is the simulator's interpreter of the schedule, as ``runtime/runtime.py`` is that
of a real step: it walks the same events, issues gathers as many units ahead, and lets as many
reductions travel at once. What it does not know (flops, speeds) comes from Work and Cluster.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from shardwise.core.cluster import Cluster
from shardwise.core.layout import DTYPE_BYTES, ModelSpec, UnitSpec
from shardwise.core.trace import Span
from shardwise.core.work import Work
from shardwise.cost.engine import SLOWED, Compute, Instruction, Job, Mark, Run, Stage, Submit, Wait
from shardwise.cost.engine import run as run_program
from shardwise.cost.habits import OURS, Habits
from shardwise.cost.price import Prices
from shardwise.plans.memory import Memory, memory
from shardwise.plans.plan import Plan, Rungs, has_master, resolve, untiled
from shardwise.plans.expected import Event, schedule
from shardwise.plans.hops import shard_bytes as part_bytes
from shardwise.plans.ops import Kind, Op, Phase, Trigger
from shardwise.plans.order import REDUCTIONS_IN_FLIGHT
from shardwise.plans.schedule import outer_step, trained_flats
from shardwise.plans.traffic import step_phases

USES = ("compute", "copies", "update", "gather", "reduce", "refresh", "tier", SLOWED)
"""What a step's time goes for: work, then what is exposed of transfers, then crowded processors."""
EXPOSED = USES[3:]
"""What a step would not take if transfers were free."""
Priced = TypeVar("Priced")
WARM_UP_STEPS = 1
"""A step overlaps the refresh of the one before it, so that the first is not like the others."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step takes, and what of it."""

    plan: Plan
    step_s: float
    exposed: dict[str, float]
    """Seconds by use, see USES; they sum up to ``step_s``."""
    memory: Memory
    tokens: int
    """Of all ranks in a step."""
    flops: float
    """Of one rank in a step, nothing recomputed."""
    spans: list[Span] = field(default_factory=list)
    """Where asked for: what happened when, on the runtime's tracks; in ``core.trace``'s form."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def flops_per_s(self) -> float:
        """Of one rank, as papers count them: without recomputation."""
        return self.flops / self.step_s


def simulate(
    plan: Plan,
    model: ModelSpec,
    work: Work,
    cluster: Cluster,
    *,
    accumulate: int = 1,
    habits: Habits = OURS,
    spans: bool = False,
) -> Estimate:
    """A step of ``accumulate`` micro-batches of ``work`` on every rank of the cluster."""
    steps = _Steps(plan, model, work, cluster, habits)
    # All in the middle are alike: one will do, unless somebody wants to see them.
    simulated = accumulate if spans else min(accumulate, 3)
    phases = list(step_phases(simulated).elements())
    result = run_program(steps.program(phases), spans=spans)
    step_s, exposed = _last_step(result)
    if accumulate > simulated:
        begin, end = result.marks["middle"], result.marks["last"]
        more = accumulate - simulated
        step_s += more * (end - begin)
        for use, seconds in result.uses.get("middle", {}).items():
            exposed[use] = exposed.get(use, 0.0) + more * seconds
    topology = cluster.topology
    needed = memory(
        plan,
        model,
        topology,
        accumulates=accumulate > 1,
        saved=work.saved,
        accelerated=cluster.device.is_accelerator,
    )
    return Estimate(
        plan=plan,
        step_s=step_s,
        exposed={use: exposed.get(use, 0.0) for use in USES},
        memory=needed,
        tokens=work.tokens * topology.world * accumulate,
        flops=work.flops * accumulate,
        spans=_step_spans(result),
    )


def _last_step(result: Run) -> tuple[float, dict[str, float]]:
    """The duration of the last step and what it went for."""
    begin = result.marks["step"]
    exposed: dict[str, float] = {}
    for mark in ("step", "middle", "last"):
        for use, seconds in result.uses.get(mark, {}).items():
            exposed[use] = exposed.get(use, 0.0) + seconds
    return result.marks["over"] - begin, exposed


OWN_TRACKS = ("refresh", "update")
"""What the runtime's traces show on a track of its own, whatever lane or thread does it."""


def _step_spans(result: Run) -> list[Span]:
    """What happened in the last step, as the runtime would have traced it: one span a job."""
    begin, end = result.marks["step"], result.marks["over"]
    found: dict[str, list[Span]] = {}
    for span in sorted(result.spans, key=lambda span: span.begin_s):
        if span.end_s <= begin or span.begin_s >= end:
            continue
        what = span.name.partition(" ")[0]
        spans = found.setdefault(what if what in OWN_TRACKS else span.track, [])
        last = spans[-1] if spans else None
        if last is not None and last.name == span.name and last.end_s == span.begin_s:
            spans[-1] = replace(last, end_s=span.end_s)  # stages of one job
        else:
            spans.append(replace(span, track=what if what in OWN_TRACKS else span.track))
    return [span for spans in found.values() for span in spans]


@dataclass
class _Unit:
    """A unit resolved, with what its operations cost."""

    spec: UnitSpec
    plan: Plan
    rungs: Rungs
    forward_flops: float
    backward_times: float
    """Operations of its backward over those of its forward; 0: no gradient comes here."""

    @cached_property
    def numel(self) -> int:
        return sum(flat.numel for flat in self.spec.flats)

    @cached_property
    def trained_numel(self) -> int:
        return sum(flat.numel for flat in trained_flats(self.spec))

    @cached_property
    def update_numel(self) -> int:
        return self.trained_numel // self.rungs.ladder.parts[self.rungs.optim]

    @cached_property
    def grad_bytes(self) -> int:
        """Of all gradients in full, as they are copied into the buffer that is reduced."""
        dtypes = [(f, self.plan.precision.reduce_dtype(f.dtype)) for f in trained_flats(self.spec)]
        return part_bytes(dtypes, self.rungs, 0)

    def compute_bytes(self, rung: int) -> int:
        """Of all parameters on a rung, as they are computed with."""
        dtypes = [(f, self.plan.precision.compute_dtype(f.dtype)) for f in self.spec.flats]
        return part_bytes(dtypes, self.rungs, rung)

    @cached_property
    def held_bytes(self) -> int:
        """Of the gradients that micro-batches add up, on G's rung."""
        dtypes = [(f, self.plan.precision.master_dtype(f.dtype)) for f in trained_flats(self.spec)]
        return part_bytes(dtypes, self.rungs, self.rungs.grads)

    @cached_property
    def copy_out_bytes(self) -> int:
        """What the update writes of P beside the master: the own elements in the compute dtype."""
        precision = self.plan.precision
        return sum(
            flat.numel // self.rungs.ladder.parts[self.rungs.optim]
            * DTYPE_BYTES[precision.compute_dtype(flat.dtype)]
            for flat in trained_flats(self.spec)
            if has_master(self.plan, self.rungs, flat.dtype)
        )  # fmt: skip

    @cached_property
    def _outer_step(self) -> int | None:
        return outer_step(self.spec, self.rungs, self.plan)

    def overlaps_outer(self, op: Op) -> bool:
        """Whether the last hop of a reduction travels beside its next chunk; under no_sync there
        may be no such hop."""
        return bool(op.hops) and op.hops[-1].step == self._outer_step


class _Steps:
    """The program of some steps."""

    def __init__(
        self, plan: Plan, model: ModelSpec, work: Work, cluster: Cluster, habits: Habits = OURS
    ) -> None:
        self._plan, self._model, self._work, self._habits = plan, model, work, habits
        self._topology = cluster.topology
        self._prices = Prices(cluster, habits)
        self._root = model.units[0].name
        flops, backward = _forward_flops(model, work), backward_times(model)
        self._units = {
            unit.name: _Unit(
                unit,
                plan.for_unit(unit.name),
                resolve(plan, self._topology, unit.name),
                flops[unit.name],
                backward[unit.name],
            )
            for unit in model.units
        }
        self._gathers: dict[str, Job] = {}
        """The last gather of each unit."""
        self._refreshes: dict[str, Job] = {}
        self._fetches: dict[str, Job] = {}
        self._inputs: dict[str, Job] = {}
        """Reads of units' inputs that rest on a tier."""
        self._reductions: deque[list[Job]] = deque()
        self._prices_of: dict[int, tuple[Op, Any]] = {}
        self._updates: list[Job] = []
        """Those that run beside a backward."""
        self._phase = Phase.ONLY
        """Of the pass that is being walked."""
        checkpoints = max(0, work.saved.checkpoints - work.saved.small)
        self._input_bytes = checkpoints / max(1, len(work.forward_flops) - 1)

    def program(self, phases: Sequence[Phase]) -> Iterator[Instruction]:
        """Some steps; marks begin with the last one."""
        events = {
            phase: schedule(self._plan, self._model, self._topology, phase) for phase in phases
        }
        for step in range(WARM_UP_STEPS + 1):
            last = step == WARM_UP_STEPS
            if last:
                yield Mark("step")
            for phase in phases:
                if last and phase in (Phase.MIDDLE, Phase.LAST):
                    yield Mark(phase.value)
                self._phase = phase
                yield from self._pass(events[phase])
        yield Mark("over")

    def _priced(self, op: Op, price: Callable[[], Priced]) -> Priced:
        """What an operation costs, which is the same every time that a program comes to it."""
        if id(op) not in self._prices_of:
            self._prices_of[id(op)] = (op, price())  # the operation lives on, so that its id does
        found: Priced = self._prices_of[id(op)][1]
        return found

    def _climb(self, use: str, op: Op, unit: _Unit) -> list[Stage]:
        numel = unit.numel if op.kind is Kind.GATHER else unit.trained_numel
        return self._priced(op, lambda: self._prices.climb(use, op, numel, unit.rungs))

    @property
    def _is_held(self) -> bool:
        """Whether this pass's gradients stop on G's rung, and wait for those of others."""
        return not self._phase.synchronises

    def _pass(self, events: Sequence[Event]) -> Iterator[Instruction]:
        forward = [event for event in events if event.trigger is Trigger.BEFORE_FORWARD]
        backward = [event for event in events if event.trigger is Trigger.BEFORE_BACKWARD]
        walk = _Walk(self, forward)
        yield from walk.begin()
        for event in events:
            unit = self._units.get(event.unit)
            if event.trigger is Trigger.BEFORE_FORWARD and unit is not None:
                yield from walk.use(event, ahead=True)
                if event.unit != self._root:
                    yield self._compute("forward", unit, backward=False)
            elif event.trigger is Trigger.AFTER_FORWARD and unit is not None:
                if event.unit == self._root:
                    yield self._compute("forward", unit, backward=False)
                yield from self._after_forward(unit, event)
            elif event.trigger is Trigger.BEFORE_BACKWARD and unit is not None:
                if event.unit == self._root:
                    walk = _Walk(self, backward)
                    yield from walk.begin()
                    yield self._compute("backward", unit, backward=True)
                    continue
                yield from walk.use(event, ahead=walk.is_fresh)
                # The unit before it has given its buffer back by now: the next one may come.
                yield from walk.gather_ahead()
                yield from self._read_input(event.unit)
                if self._plan.activations != "keep":
                    yield self._compute("recompute", unit, backward=False)
                yield self._compute("backward", unit, backward=True)
            elif event.trigger is Trigger.GRADS_READY and unit is not None:
                yield from self._reduce(unit, event)
        while self._reductions:
            jobs = self._reductions.popleft()
            for job in jobs if self._habits.late and not self._is_held else ():
                yield Submit(job)
            for job in jobs:
                yield Wait(job)
        for job in self._updates:
            yield Wait(job)
        self._updates.clear()
        for event in events:
            if event.trigger is Trigger.STEP:
                yield from self._step(event)

    # --- compute ------------------------------------------------------------------------------

    def _compute(self, what: str, unit: _Unit, *, backward: bool) -> Compute:
        flops = unit.forward_flops * (unit.backward_times if backward else 1)
        stage = self._prices.compute(self._work.dtype, flops, backward=backward)
        return Compute(f"{what} {unit.spec.name}", stage)

    def _after_forward(self, unit: _Unit, event: Event) -> Iterator[Instruction]:
        if any(op.kind is Kind.KEEP for op in event.ops):
            yield Compute(
                f"keep {unit.spec.name}", self._prices.copy(unit.compute_bytes(unit.rungs.keep))
            )
        tier = self._plan.activations
        if tier in ("cpu", "nvme") and self._is_called(unit):
            stage = self._prices.move(tier, self._input_bytes, writes=True)
            yield Submit(Job("activations", f"save {unit.spec.name}", [stage]))

    def _read_input(self, name: str) -> Iterator[Instruction]:
        """A unit's input from its tier, and the next one's on its way."""
        tier = self._plan.activations
        if tier not in ("cpu", "nvme") or not self._is_called(self._units[name]):
            return
        order = [n for n in reversed(self._model.order) if self._is_called(self._units[n])]
        position = order.index(name)
        for each in order[position : position + 2]:
            if each not in self._inputs:
                stage = self._prices.move(tier, self._input_bytes, writes=False)
                self._inputs[each] = Job("inputs", f"load {each}", [stage])
                yield Submit(self._inputs[each])
        yield Wait(self._inputs.pop(name))

    def _is_called(self, unit: _Unit) -> bool:
        """Whether it is a block with an input of its own, not a part of one."""
        return unit.spec.name != self._root and not unit.spec.inside

    # --- parameters ---------------------------------------------------------------------------

    def gather(self, event: Event) -> Iterator[Instruction]:
        """What brings a unit's parameters to the full buffer."""
        unit = self._units[event.unit]
        for op in event.ops:
            if op.kind is Kind.GATHER:
                stages = self._climb("gather", op, unit)
                if op.hops:  # the part that is held goes to its place in the full buffer first
                    own = unit.compute_bytes(op.hops[0].step + 1)
                    stages = [self._prices.copy(own, "gather"), *stages]
                before = self._fetches.pop(event.unit, None) or self._refreshes.get(event.unit)
                job = Job("gather", f"gather {event.unit}", stages, before)
                self._gathers[event.unit] = job
                yield Submit(job)

    def fetch(self, event: Event) -> Iterator[Instruction]:
        """What brings a unit's part of P from its tier, unless that is under way."""
        fetch = next((op for op in event.ops if op.kind is Kind.FETCH), None)
        if fetch is None or event.unit in self._fetches:
            return
        unit = self._units[event.unit]
        stage = self._prices.move(unit.plan.params.tier, fetch.moved_bytes, writes=False)
        before = self._refreshes.get(event.unit)
        job = Job("fetch", f"fetch {event.unit}", [stage], before)
        self._fetches[event.unit] = job
        yield Submit(job)

    def values(self, event: Event) -> Iterator[Instruction]:
        """Waits until a unit's parameters are there."""
        kinds = [op.kind for op in event.ops]
        if Kind.GATHER not in kinds and (fetch := self._fetches.pop(event.unit, None)):
            yield Wait(fetch)
        for job in (self._gathers.get(event.unit), self._refreshes.get(event.unit)):
            if job is not None:
                yield Wait(job)

    # --- gradients ----------------------------------------------------------------------------

    def _reduce(self, unit: _Unit, event: Event) -> Iterator[Instruction]:
        if not event.ops:
            return
        late = self._habits.late and not self._is_held
        while not late and len(self._reductions) >= REDUCTIONS_IN_FLIGHT:
            for job in self._reductions.popleft():
                yield Wait(job)
        name = unit.spec.name
        yield Compute(f"collect {name}", self._prices.copy(unit.grad_bytes))
        jobs: list[Job] = []
        for op in event.ops:
            if op.kind is Kind.REDUCE:
                jobs += self._descend(unit, op)
                if self._habits.all_reduces:
                    stages = self._prices.spread_back(op, unit.rungs)
                    jobs.append(Job("reduce", f"spread {name}", stages))
            elif op.kind is Kind.SPREAD and not self._habits.all_reduces:
                stages = self._climb("reduce", op, unit)
                jobs.append(Job("reduce", f"spread {name}", stages))
            elif op.kind is Kind.STORE:
                stage = self._prices.move(unit.plan.grads.tier, op.moved_bytes, writes=True)
                jobs.append(Job("store", f"store {name}", [stage], jobs[-1] if jobs else None))
        if held := self._hold(unit):
            jobs.append(Job("reduce", f"hold {name}", held))  # the lane has it behind inner hops
        for job in jobs if not late else ():
            yield Submit(job)
        if jobs:
            self._reductions.append(jobs)
        for op in event.ops:
            if op.kind is Kind.STEP:
                yield from self._update_beside(unit, op, jobs)

    def _hold(self, unit: _Unit) -> list[Stage]:
        """What several micro-batches cost beside their reductions: sums on G's rung.

        The last hop writes there by itself, and reads as much again where it adds; where no hop
        leads there, gradients are copied. At last they go back to where they travel on from.
        """
        rungs = unit.rungs
        rests_below = rungs.grads != rungs.bottom
        copies = 1.0 if rests_below and rungs.ladder.parts[rungs.grads] == 1 else 0.0
        copies += 0.5 if self._phase in (Phase.MIDDLE, Phase.LAST) else 0.0
        copies += 1.0 if self._phase is Phase.LAST and rests_below else 0.0
        if self._phase is Phase.ONLY or not copies:
            return []
        return [self._prices.copy(copies * unit.held_bytes, "reduce")]

    def _descend(self, unit: _Unit, op: Op) -> list[Job]:
        name = f"reduce {unit.spec.name}"
        jobs: list[Job] = []
        outer: list[Job] = []
        chunks = self._priced(
            op,
            lambda: self._prices.descend(
                op, unit.trained_numel, unit.rungs, overlaps=unit.overlaps_outer(op)
            ),
        )
        for index, (inner, last) in enumerate(chunks):
            # Two chunks have memory: the next begins when the outer hop before the last is over.
            after = outer[index - 2] if last and index >= 2 else None
            jobs.append(Job("reduce", name, inner, after))
            if last:
                outer.append(Job("outer", name, last, jobs[-1]))
                jobs.append(outer[-1])
        return jobs

    # --- the step -----------------------------------------------------------------------------

    def _step(self, event: Event) -> Iterator[Instruction]:
        """The update of what is in memory at once, then unit by unit what streams."""
        resident = [unit for unit in self._units.values() if unit.plan.optim.tier == "device"]
        numel = sum(unit.update_numel for unit in resident)
        copied = sum(unit.copy_out_bytes for unit in self._units.values())
        update = self._prices.update(numel, "device")
        yield Compute("update", _both(update, self._prices.copy(copied)))
        self._gathers.clear()  # what was gathered is stale
        self._refreshes.clear()
        for op in event.ops:
            unit = self._units[op.unit]
            if op.kind is Kind.STEP:
                yield from self._stream(unit, op)
            elif op.kind is Kind.REFRESH:
                yield from self._refresh(unit, op)
        if self._habits.waits:
            for job in self._refreshes.values():
                yield Wait(job)

    def _stream(self, unit: _Unit, op: Op) -> Iterator[Instruction]:
        """An update whose states rest elsewhere."""
        tier, moving = unit.plan.optim.tier, unit.plan.moving_tier
        if moving is None:
            return
        name = unit.spec.name
        writes, reads = self._step_moves(moving, op)
        work = [self._prices.update(unit.update_numel, tier)] if tier != "device" else []
        if tier == "cpu":  # gradients come, the host works, the new parameters leave
            for stage in (writes, *work, reads):
                yield Compute(f"update {name}", stage)
            return
        # From a disk and to it windows are read ahead and written behind.
        jobs = [
            Job("fetch", f"read states of {name}", [reads]),
            Job("store", f"write states of {name}", [writes]),
        ]
        jobs += self._exchange(op)
        for job in jobs:
            yield Submit(job)
        for stage in work:
            yield Compute(f"update {name}", stage)
        for job in jobs:
            yield Wait(job)

    def _exchange(self, op: Op) -> list[Job]:
        """Gradients to a host that updates states of a disk, and new parameters back."""
        out, back = op.crossing_bytes
        stages = {
            "gradients": self._prices.move("cpu", out, writes=True),
            "parameters": self._prices.move("cpu", back, writes=False),
        }
        return [
            Job(f"exchange {what}", f"exchange {what} of {op.unit}", [stage])
            for what, stage in stages.items()
            if stage.seconds
        ]

    def _step_moves(self, tier: str, op: Op) -> tuple[Stage, Stage]:
        """What an update moves to a tier, and from it."""
        read = op.moved_bytes - op.written_bytes
        on_host = self._units[op.unit].plan.optim.tier != "device"
        return (
            self._prices.move(tier, op.written_bytes, writes=True, to_host=on_host),
            self._prices.move(tier, read, writes=False, to_host=on_host),
        )

    def _update_beside(self, unit: _Unit, op: Op, reduction: list[Job]) -> Iterator[Instruction]:
        """The same while backward goes on; states are read before gradients are there."""
        name, tier = unit.spec.name, unit.plan.moving_tier
        assert tier is not None
        writes, reads = self._step_moves(tier, op)
        # One thread does it all, so that the next unit's states come when this one is updated.
        before = self._updates[-2] if self._updates else None
        read = Job("read states", f"read states of {name}", [reads], before)
        ready = Job("update", f"update {name}", [], reduction[-1] if reduction else None)
        tier = unit.plan.optim.tier
        work = [self._prices.update(unit.update_numel, tier)] if tier != "device" else []
        done = Job("update", f"update {name}", work, read)
        write = Job("write states", f"write states of {name}", [writes], done)
        exchanged = self._exchange(op)
        for job in (read, ready, *exchanged, done, write):
            yield Submit(job)
        self._updates += [*exchanged, done, write]

    def _refresh(self, unit: _Unit, op: Op) -> Iterator[Instruction]:
        stages = self._climb("refresh", op, unit)
        if op.moved_bytes:
            stages = [
                *stages,
                self._prices.move(unit.plan.params.tier, op.moved_bytes, writes=True),
            ]
        job = Job("outer", f"refresh {unit.spec.name}", stages)
        self._refreshes[unit.spec.name] = job
        yield Submit(job)


class _Walk:
    """A pass's uses in order: what is gathered ahead of which; see ``runtime/order.py``."""

    def __init__(self, steps: _Steps, uses: Sequence[Event]) -> None:
        self._steps, self._prefetch = steps, steps._plan.prefetch
        self._root = next((event for event in uses if event.unit == steps._root), None)
        self._order = [event for event in uses if event.unit != steps._root and event.ops]
        self._used = self._issued = 0

    @property
    def is_fresh(self) -> bool:
        return self._used <= 1

    def begin(self) -> Iterator[Instruction]:
        if self._root is not None:
            yield from self._steps.fetch(self._root)
            yield from self._steps.gather(self._root)
        yield from self._issue(self._prefetch)
        yield from self._fetch_beyond()

    def use(self, event: Event, *, ahead: bool) -> Iterator[Instruction]:
        if event.ops and event.unit != self._steps._root:
            self._used += 1
            yield from self._issue(self._used)
            if ahead:
                yield from self.gather_ahead()
        yield from self._steps.values(event)

    def gather_ahead(self) -> Iterator[Instruction]:
        yield from self._issue(self._used + self._prefetch)
        yield from self._fetch_beyond()

    def _issue(self, until: int) -> Iterator[Instruction]:
        while self._issued < min(until, len(self._order)):
            event = self._order[self._issued]
            self._issued += 1
            yield from self._steps.fetch(event)
            yield from self._steps.gather(event)

    def _fetch_beyond(self) -> Iterator[Instruction]:
        for event in self._order[self._issued : self._issued + self._prefetch]:
            yield from self._steps.fetch(event)


def _forward_flops(model: ModelSpec, work: Work) -> dict[str, float]:
    """Of every unit: its share of its untiled unit's operations, by parameters."""
    numels: Counter[str] = Counter()
    members: Counter[str] = Counter()
    for unit in model.units:
        numels[untiled(unit.name)] += unit.numel
        members[untiled(unit.name)] += 1
    found = {}
    for unit in model.units:
        name = untiled(unit.name)
        share = 1.0 if members[name] == 1 else unit.numel / max(1, numels[name])
        found[unit.name] = work.forward_flops.get(name, 0.0) * share
    return found


def backward_times(model: ModelSpec) -> dict[str, float]:
    """Of every unit: operations of its backward over those of its forward.

    As many for the gradients of its inputs, if anything before it is trained (the root is taken to
    be first as a whole) or some of it, and as many for those of its weights as far as they are.
    """
    root, *inner = model.units
    reached = bool(trained_flats(root))
    found = {root.name: 2.0 if reached else 1.0}
    for unit in inner:  # in the order of a forward
        trained = sum(flat.numel for flat in trained_flats(unit))
        total = sum(flat.numel for flat in unit.flats)
        passes = reached or 0 < trained < total  # what is trained may lie behind what is not
        found[unit.name] = float(passes) + trained / max(1, total)
        reached = reached or trained > 0
    return found


def _both(first: Stage, second: Stage) -> Stage:
    """Two stages of the program as one."""
    return Stage(first.use, first.seconds + second.seconds, first.needs)
