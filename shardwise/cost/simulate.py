"""A step of a plan on a cluster, simulated: the schedule's events, priced and run by the engine.

``program.py`` turns events into what the engine runs, ``price.py`` says what each operation takes,
``engine.py`` lets time pass. What they do not know (flops, speeds) comes from Work and Cluster.
"""

from dataclasses import dataclass, field, replace

from shardwise.core.cluster import Cluster
from shardwise.core.layout import ModelSpec
from shardwise.core.trace import Span
from shardwise.core.work import Work
from shardwise.cost.engine import SLOWED, Run
from shardwise.cost.engine import run as run_program
from shardwise.cost.habits import OURS, Habits
from shardwise.cost.program import Program
from shardwise.plans.memory import Memory, memory
from shardwise.plans.plan import Plan
from shardwise.plans.traffic import step_phases

USES = ("compute", "copies", "update", "gather", "reduce", "refresh", "tier", SLOWED)
"""What a step's time goes for: work, then what is exposed of transfers, then crowded processors."""
EXPOSED = USES[3:]
"""What a step would not take if transfers were free."""


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
    program = Program(plan, model, work, cluster, habits)
    # All in the middle are alike: one will do, unless somebody wants to see them.
    simulated = accumulate if spans else min(accumulate, 3)
    phases = list(step_phases(simulated).elements())
    result = run_program(program.steps(phases), spans=spans)
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
