"""A discrete-event engine: one program, lanes beside it, and resources that they share.

The program (what a rank's main thread does) computes, submits jobs to lanes and waits for them. A
lane runs its jobs in order, stage by stage. A stage takes its seconds while it is alone. Stages
that run at once and together ask for more than there is of a resource share it as threads share a
processor: who asks for little gets it, the others get equal parts of the rest. What a stage
reserves of a resource it has to itself before all that.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shardwise.core.trace import Span


@dataclass(frozen=True, slots=True)
class Stage:
    """Something that takes time: how long alone, and what share of which resources."""

    use: str
    """What the time is for, in the words of ``Estimate.exposed``."""
    seconds: float
    needs: tuple[tuple[str, float], ...] = ()
    """Resources and the share of each that it takes at full speed. Whoever gets less of the first
    one asks for less of the next: messages on a crowded link keep no processor busy."""
    reserves: tuple[tuple[str, float], ...] = ()
    """Shares that nobody else gets while it runs."""


class Job:
    """Stages in order, on one lane; begins when the jobs that it comes after are over."""

    __slots__ = ("after", "done", "lane", "name", "stages")

    def __init__(
        self, lane: str, name: str, stages: Sequence[Stage], after: Sequence["Job"] = ()
    ) -> None:
        self.lane, self.name, self.stages, self.after = lane, name, stages, after
        self.done = False

    @property
    def blocker(self) -> "Job | None":
        """One that must be over first, and is not."""
        for job in self.after:
            if not job.done:
                return job
        return None


@dataclass(frozen=True, slots=True)
class Compute:
    """The program is busy itself."""

    name: str
    stage: Stage


@dataclass(frozen=True, slots=True)
class Submit:
    """The program hands a job to its lane and goes on."""

    job: Job


@dataclass(frozen=True, slots=True)
class Wait:
    """The program goes on when a job is done."""

    job: Job


@dataclass(frozen=True, slots=True)
class Mark:
    """The program passes a point whose time is of interest."""

    name: str


Instruction = Compute | Submit | Wait | Mark

EPSILON = 1e-12
LEAST_FREE = 0.05
"""Of a resource, whatever is reserved."""


@dataclass
class Run:
    """What happened."""

    marks: dict[str, float] = field(default_factory=dict)
    uses: dict[str, dict[str, float]] = field(default_factory=dict)
    """By the mark that was passed last: seconds of the program by what they went for."""
    spans: list[Span] = field(default_factory=list)


class _Running:
    """A stage under way, of a lane's job or (lane None) of the program."""

    __slots__ = ("begun", "demand", "job", "least", "left", "name", "speed", "stage", "track")

    def __init__(self, track: str, name: str, stage: Stage, job: Job | None, now: float) -> None:
        self.track, self.name, self.stage, self.job = track, name, stage, job
        self.left, self.begun, self.speed = stage.seconds, now, 1.0
        self.demand = _number((stage.needs, stage.reserves))
        self.least = EPSILON * max(1.0, stage.seconds)
        """What is left when it counts as over: arithmetic leaves crumbs."""


Shares = tuple[tuple[str, float], ...]
Demand = tuple[Shares, Shares]
"""What a stage needs, and what it reserves."""

SLOWED = "sharing"
"""What the program loses to stages that run beside it on the same processors."""


def run(program: Iterator[Instruction], *, spans: bool = False) -> Run:
    """Runs a program to its end."""
    return _Engine(program, spans=spans).run()


class _Engine:
    def __init__(self, program: Iterator[Instruction], *, spans: bool) -> None:
        self._program, self._keeps_spans = program, spans
        self._now = 0.0
        self._queues: dict[str, deque[Job]] = defaultdict(deque)
        self._running: dict[str, _Running] = {}
        """By track: what is under way; the program's is the one named compute."""
        self._stage_of: dict[str, int] = {}
        self._blocked: dict[Job, list[str]] = {}
        """By the job that they wait for: lanes whose next job may not begin."""
        self._waiting: Job | None = None
        self._ended = False
        self._result = Run()
        self._mark = "begin"

    def run(self) -> Run:
        while True:
            self._advance_program()
            if not self._running:
                break
            self._pass_time()
        assert self._ended, f"the program waits for {self._waiting}, which never comes"
        self._result.marks["end"] = self._now
        return self._result

    def _advance_program(self) -> None:
        """Runs instructions that take no time, until the program computes, waits or ends."""
        if self._ended or "compute" in self._running:
            return
        if self._waiting is not None and not self._waiting.done:
            return
        self._waiting = None
        for instruction in self._program:
            if isinstance(instruction, Submit):
                self._submit(instruction.job)
            elif isinstance(instruction, Mark):
                self._mark = instruction.name
                self._result.marks[self._mark] = self._now
            elif isinstance(instruction, Wait):
                if not instruction.job.done:
                    self._waiting = instruction.job
                    return
            elif instruction.stage.seconds > EPSILON:
                stage = instruction.stage
                self._running["compute"] = _Running(
                    "compute", instruction.name, stage, None, self._now
                )
                return
        self._ended = True

    def _submit(self, job: Job) -> None:
        self._queues[job.lane].append(job)
        if len(self._queues[job.lane]) == 1:
            self._begin(job.lane)

    def _begin(self, lane: str) -> None:
        """Begins the next stage of a lane, if there is one that may."""
        queue = self._queues[lane]
        while queue:
            job = queue[0]
            if job.after and (blocker := job.blocker) is not None:
                self._blocked.setdefault(blocker, []).append(lane)
                return
            index = self._stage_of.get(lane, 0)
            while index < len(job.stages) and job.stages[index].seconds <= EPSILON:
                index += 1
            if index < len(job.stages):
                self._stage_of[lane] = index
                self._running[lane] = _Running(lane, job.name, job.stages[index], job, self._now)
                return
            job.done = True
            queue.popleft()
            self._stage_of[lane] = 0
            for waiting in self._blocked.pop(job, ()):
                self._begin(waiting)

    def _pass_time(self) -> None:
        """Until the first of the running stages is over."""
        running = list(self._running.values())
        speeds = _speeds(tuple([one.demand for one in running]))
        step = math.inf
        for one, speed in zip(running, speeds, strict=True):
            one.speed = speed
            step = min(step, one.left / speed)
        self._now += step
        self._account(step)
        for one in running:
            one.left -= step * one.speed
            if one.left <= one.least:
                self._finish(one)

    def _account(self, step: float) -> None:
        """Says what the program spent the time on."""
        if self._ended:
            return
        uses = self._result.uses.setdefault(self._mark, defaultdict(float))
        own = self._running.get("compute")
        if own is not None:
            uses[own.stage.use] += step * own.speed
            uses[SLOWED] += step * (1.0 - own.speed)
        elif self._waiting is not None:
            # Whatever its lane does now is what the program waits for: perhaps an earlier job, or
            # one on another lane that must come first.
            lane = self._waiting.lane
            while lane not in self._running and (job := self._queues[lane][0].blocker):
                lane = job.lane
            if lane in self._running:
                uses[self._running[lane].stage.use] += step

    def _finish(self, one: _Running) -> None:
        del self._running[one.track]
        if self._keeps_spans:
            self._result.spans.append(Span(one.track, one.name, one.begun, self._now))
        if one.job is not None:
            self._stage_of[one.track] += 1
            self._begin(one.track)


_numbers: dict[Demand, int] = {}
_demands: list[Demand] = []


def _number(demand: Demand) -> int:
    """A short name of a demand: there are few, and a search looks at each a million times."""
    found = _numbers.get(demand)
    if found is None:
        found = _numbers[demand] = len(_demands)
        _demands.append(demand)
    return found


@lru_cache(maxsize=1 << 14)
def _speeds(numbers: tuple[int, ...]) -> list[float]:
    """Of each stage that runs, by what it demands."""
    demands = [_demands[number] for number in numbers]
    speeds = [1.0] * len(demands)
    first: dict[str, list[tuple[int, float]]] = {}
    others: dict[str, list[tuple[int, float]]] = {}
    free: dict[str, float] = {}
    for index, (needs, reserves) in enumerate(demands):
        group = first
        for resource, share in needs:
            group.setdefault(resource, []).append((index, share))
            group = others
        for resource, share in reserves:
            free[resource] = max(LEAST_FREE, free.get(resource, 1.0) - share)
    for resource, asking in others.items():
        asking += first.pop(resource, ())
    for group in (first, others):
        for resource, asking in group.items():
            _share(asking, free.get(resource, 1.0), speeds)
    return speeds


def _share(asking: list[tuple[int, float]], free: float, speeds: list[float]) -> None:
    """Slows those down that ask for more than an equal part of what is free."""
    demands = sorted(share * speeds[index] for index, share in asking)
    if sum(demands) <= free:
        return
    most = free
    for left, demand in zip(range(len(demands), 0, -1), demands, strict=True):
        most = free / left
        if demand > most:
            break
        free -= demand
    for index, share in asking:
        if share * speeds[index] > most:
            speeds[index] = most / share
