"""Plans that take turns on one grid; see Note: A machine that changes its pace."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardwise.bench.accuracy.results import Comparison
from shardwise.bench.accuracy.setup import CHOSEN, Setup
from shardwise.bench.jobs import Job
from shardwise.bench.messages import Build, Drop, Measured, Setting, Turn
from shardwise.bench.probe import median_of, probe_job
from shardwise.core.cluster import Cluster
from shardwise.core.topology import Topology
from shardwise.cost.file import dump_cluster
from shardwise.cost.simulate import Estimate
from shardwise.model.named import facts_of
from shardwise.planner.request import Request, evaluate
from shardwise.planner.search import search
from shardwise.planner.space import Batch
from shardwise.plans.file import dump_plan
from shardwise.plans.plan import Plan

TURN_S = 6.0
MOST_STEPS = 3
"""Steps of a turn: on a machine that changes its pace many short turns tell more than few long."""
LEAST_ROUNDS = 2
ENOUGH_S = 20.0
"""A plan that was timed for this many seconds takes no more turns."""
FINALISTS = 3
MEETINGS = 10
"""Number of meetings of the finalists."""
MEETING_S = 3.0
NEAR = 1.15
"""Plans that took up to this many times as long as the chosen one might be as fast."""
Turns = dict[str, list[float]]
"""Seconds of steps by plan."""


class Kept:
    """The files with the probes and the chosen plan of one cluster."""

    def __init__(self, folder: Path, grid: str, rate: str) -> None:
        nodes, ranks = (Topology.parse(grid).levels[i].size for i in (1, 0))
        self.median, self.first, self.chosen = (
            folder / f"{nodes}x{ranks}-{rate}{what}.toml" for what in ("", "-first", f"-{CHOSEN}")
        )


class Trial:
    """Plans on one grid, run at several rates."""

    def __init__(self, setup: Setup, job: Job, levels: str, folder: Path) -> None:
        self._setup, self._job, self.levels, self._folder = setup, job, levels, folder
        self._facts = facts_of(setup.model)
        self._setting = Setting(model=setup.model, seq=setup.seq, levels=levels, deferred=True)
        self._plans: dict[str, tuple[str, Plan]] = {}

    def add(self, name: str, plan: Plan) -> None:
        """Add a plan; contenders are named by plan files."""
        path = self._folder / f"{len(self._plans)}.toml"
        path.write_text(dump_plan(plan), encoding="utf-8")
        self._plans[name] = (str(path), plan)

    def run(self, where: str, tell: Callable[[str], None]) -> None:
        """Probe, choose, and let the plans take turns at the current rate of the links."""
        tell(f"{where}: probing")
        self._probes = [self._probe()]
        found = search(self._request(self._probes[0])).best
        assert found is not None, "a small model fits"
        self.add(CHOSEN, found.plan)
        expected = {name: one.step_s for name, one in self._estimates(self._probes[0]).items()}
        self._steps: Turns = {name: [] for name in self._plans}
        for number in range(self._setup.rounds):
            tell(f"{where}: round {number + 1} of {self._setup.rounds}")
            for name in takers(number, self._steps):
                self._steps[name] += self._turn(name, expected[name])
            if number == (self._setup.rounds - 1) // 2:
                tell(f"{where}: probing again")
                self._probes.append(self._probe())
        names = finalists(self._steps)
        tell(f"{where}: finals of {', '.join(names) or 'none'}")
        self._finals = self._meet(names, expected)
        tell(f"{where}: probing a last time")
        self._probes.append(self._probe())

    def comparisons(self) -> Iterator[Comparison]:
        """The comparisons of the last run."""
        first = self._estimates(self._probes[0])
        for name, estimate in self._estimates(median_of(self._probes)).items():
            yield Comparison(
                grid=self.levels,
                rate="",
                plan=name,
                predicted_s=estimate.step_s,
                first_s=first[name].step_s,
                measured_s=statistics.median(self._steps[name]),
                exposed=estimate.exposed,
                steps=self._steps[name],
                finals=self._finals.get(name, ()),
            )

    def keep(self, files: Kept) -> None:
        """Write everything that predictions are based on."""
        files.first.write_text(dump_cluster(self._probes[0]), encoding="utf-8")
        files.median.write_text(dump_cluster(median_of(self._probes)), encoding="utf-8")
        files.chosen.write_text(dump_plan(self._plans[CHOSEN][1]), encoding="utf-8")

    def _probe(self) -> Cluster:
        return probe_job(self._job, levels=self.levels, quick=self._setup.quick)

    def _request(self, cluster: Cluster) -> Request:
        return Request(
            facts=self._facts, cluster=cluster, global_batch=cluster.world, seq=self._setup.seq
        )

    def _estimates(self, cluster: Cluster) -> dict[str, Estimate]:
        request = self._request(cluster)
        return {
            name: evaluate(request, plan, Batch(1, 1)).estimate
            for name, (_, plan) in self._plans.items()
        }

    def _turn(self, name: str, expected_s: float) -> list[float]:
        """Seconds of each step. Only one plan exists at a time: each of gloo's groups has threads
        that wake a hundred times per second, and those of 15 plans took half of two processors."""
        self._build(name)
        steps = max(1, min(MOST_STEPS, round(TURN_S / expected_s)))
        # The first step records orders and creates states; the second still has cold new buffers,
        # which matters if steps are short.
        found = self._train(name, 2 if steps > 1 else 1, steps)
        self._drop(name)
        return found

    def _meet(self, names: Sequence[str], expected: dict[str, float]) -> Turns:
        """Few plans exist together and alternate often: their ratios matter, not their seconds."""
        for name in names:
            self._build(name)
            self._train(name, 1, 1)
        found: Turns = {name: [] for name in names}
        for _ in range(MEETINGS if names else 0):
            for name in names:
                steps = max(1, round(MEETING_S / expected[name]))
                found[name].append(statistics.median(self._train(name, 1, steps)))
        for name in names:
            self._drop(name)
        return found

    def _build(self, name: str) -> None:
        self._job.ask(Build(self._plans[name][0], self._setting))

    def _drop(self, name: str) -> None:
        self._job.ask(Drop(self._plans[name][0]))

    def _train(self, name: str, warm_up: int, steps: int) -> list[float]:
        # A simulated step overlaps the refresh of the previous one, and so must these.
        turn = Turn(self._plans[name][0], warm_up, steps, drained=False)
        answers: list[Measured] = self._job.ask(turn)
        by_step = zip(*(answer.steps_s for answer in answers), strict=True)
        return [statistics.mean(ranks) for ranks in by_step]


def takers(number: int, turns: Turns) -> list[str]:
    """The plans that take a turn in a round, in alternating order, so that none is always early
    while the machine changes its pace.

    >>> takers(1, {"slow": [30.0], "quick": [1.0, 1.0]})
    ['quick', 'slow']
    >>> takers(2, {"slow": [30.0, 30.0], "quick": [1.0, 1.0, 1.0, 1.0]})
    ['quick']
    """
    names = list(turns) if number % 2 == 0 else list(reversed(turns))
    if number < LEAST_ROUNDS:
        return names
    return [name for name in names if sum(turns[name]) < ENOUGH_S]


def finalists(turns: Turns) -> list[str]:
    """The planner's choice and the plans that may be as fast; none if there are no such plans."""
    medians = {name: statistics.median(seconds) for name, seconds in turns.items()}
    limit = NEAR * medians.pop(CHOSEN)
    fastest = sorted(medians, key=lambda name: medians[name])[:FINALISTS]
    near = [name for name in fastest if medians[name] <= limit]
    return [CHOSEN, *near] if near else []
