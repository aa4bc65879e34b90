"""How well the planner predicts: plans on an emulated cluster, simulated and then really trained.

At every rate of the slow link the ranks that will train are probed first, and the planner chooses.
Then its choice and a list of other plans take turns; those that might be the fastest meet in
finals. A prediction is made of probes and of nothing else.

[Note: A machine that changes its pace]
Machines that others share work faster or slower by a fifth within seconds, and by as much within
minutes. So a plan's step takes the median of its steps in several short turns minutes apart, as a
probe's points are medians; and ranks are probed before, between and after the turns. Predictions
are made of these probes' median, and beside that of the first alone, which the choice is made of.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from shardwise.bench.cluster import Cluster, Rate, signals_raised
from shardwise.bench.jobs import Job
from shardwise.bench.messages import Build, Call, Drop, Measured, Returned, Setting, Turn
from shardwise.bench.probe import median_of, probe_job
from shardwise.core import cluster as described
from shardwise.core.topology import Topology
from shardwise.cost.file import dump_cluster, load_cluster
from shardwise.cost.simulate import Estimate
from shardwise.model.named import facts_of
from shardwise.planner.request import Request, evaluate
from shardwise.planner.search import search
from shardwise.planner.space import Batch
from shardwise.plans import presets
from shardwise.plans.file import dump_plan, load_plan
from shardwise.plans.memory import memory
from shardwise.plans.plan import Plan, StatePlan

CHOSEN = "auto"
TURN_S = 6.0
MOST_STEPS = 3
"""Of a turn: on a machine that changes its pace many short turns say more than few long ones."""
LEAST_ROUNDS = 2
ENOUGH_S = 20.0
"""A plan that was timed for so long in these rounds takes no more turns."""
FINALISTS = 3
MEETINGS = 10
"""Of finalists."""
MEETING_S = 3.0
NEAR = 1.15
"""Plans that took up to so many times the chosen one's seconds might be as fast."""
Turns = dict[str, list[float]]
"""Seconds of steps by plan."""
FIXED = ("zero1", "zero2", "zero3", "fsdp", "hsdp", "zeropp")
"""Strategies that people choose without looking at the cluster."""


def plans() -> dict[str, Plan]:
    """Plans that differ in what they send, where and when.

    With one rank a node eleven do; the others are then one of them by another name.
    """
    zero3, zero1, amsp = presets.zero3(), presets.zero1(), presets.amsp()
    few_bits = StatePlan(spread="world", wire="int4,node=int8")
    return {
        "ddp": presets.ddp(),
        "zero1": zero1,
        "zero2": presets.zero2(),
        "zero3": zero3,
        "fsdp": presets.fsdp(reshard_after_forward=False),
        "hsdp": presets.hsdp(),
        "amsp": amsp,
        "zeropp": presets.zeropp(),
        "lean": presets.lean(),
        "zero3 keep=node": presets.zero3(keep="node"),
        "zero3 int8 gathers": replace(zero3, params=replace(zero3.params, wire="int8")),
        "zero3 int4 gradients": replace(zero3, grads=few_bits),
        "zero3 int8 and int4": replace(
            zero3, params=replace(zero3.params, wire="int8"), grads=few_bits
        ),
        "zero3 bf16": replace(
            zero3,
            params=replace(zero3.params, wire="bf16"),
            grads=replace(zero3.grads, wire="bf16"),
        ),
        "OS in the node": replace(zero1, name="os-node", optim=StatePlan(spread="node")),
        "amsp int4 gradients": replace(amsp, grads=replace(amsp.grads, wire="int4,node=bf16")),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One plan on one cluster."""

    grid: str
    rate: str
    plan: str
    predicted_s: float
    first_s: float
    """What the first probe alone predicts."""
    measured_s: float
    """The median of its steps."""
    exposed: dict[str, float]
    """What the prediction is made of."""
    steps: Sequence[float]
    """Seconds of each step that was timed, of all turns."""
    finals: Sequence[float] = ()
    """Seconds of a step, meeting by meeting, of those that might be the fastest."""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of one plan on one grid: of the rank that has most, above a process without it."""

    grid: str
    plan: str
    predicted_bytes: int
    peak_bytes: int

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and on which clusters."""

    model: str = "gpt-mini"
    seq: int = 512
    grids: tuple[tuple[int, int], ...] = ((2, 2), (4, 1))
    """Nodes, and ranks on each."""
    rates: tuple[Rate, ...]
    rounds: int = 4
    names: tuple[str, ...] = tuple(plans())
    quick: bool = False
    """For tests: a probe whose figures mean little."""


def compare(
    setup: Setup, tell: Callable[[str], None], keep: Path | None = None
) -> Iterator[Comparison]:
    """Probes, predicts, trains; ``keep`` is a folder for probed clusters and chosen plans."""
    for nodes, ranks in setup.grids:
        with signals_raised(), Cluster(nodes) as cluster, ExitStack() as ending:
            job = Job(
                cluster, "accuracy", sys.executable, ranks_per_node=ranks, number=0, apart=True
            )
            ending.callback(job.close)
            folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
            job.wait_until_started()
            tried = _Trial(setup, job, f"node={ranks},world={nodes}", folder)
            for name in setup.names:
                tried.add(name, plans()[name])
            for rate in setup.rates:
                cluster.shape(rate)
                where = f"{nodes} x {ranks}, {rate}"
                tried.run(where, tell)
                if keep is not None:
                    tried.keep(_Kept(keep, tried.levels, str(rate)))
                for one in tried.comparisons():
                    tell(
                        f"{where}: {one.plan} predicted {one.predicted_s:.2f}, "
                        f"measured {one.measured_s:.2f} s"
                    )
                    yield replace(one, rate=str(rate))
            job.leave()


def predict_again(
    found: Sequence[Comparison], kept: Path, *, model: str, seq: int
) -> Iterator[Comparison]:
    """The same turns beside what the simulator says now of the clusters that were kept."""
    facts = facts_of(model)
    for one in found:
        files = _Kept(kept, one.grid, one.rate)
        plan = load_plan(files.chosen) if one.plan == CHOSEN else plans()[one.plan]
        estimates = []
        for file in (files.median, files.first):
            cluster = load_cluster(file)
            request = Request(facts=facts, cluster=cluster, global_batch=cluster.world, seq=seq)
            estimates.append(evaluate(request, plan, Batch(1, 1)).estimate)
        now, first = estimates
        yield replace(one, predicted_s=now.step_s, first_s=first.step_s, exposed=now.exposed)


class _Kept:
    """The files of what was probed and chosen on one cluster."""

    def __init__(self, folder: Path, grid: str, rate: str) -> None:
        nodes, ranks = (Topology.parse(grid).levels[i].size for i in (1, 0))
        self.median, self.first, self.chosen = (
            folder / f"{nodes}x{ranks}-{rate}{what}.toml" for what in ("", "-first", f"-{CHOSEN}")
        )


def footprints(setup: Setup, tell: Callable[[str], None]) -> Iterator[Footprint]:
    """Peak memory, each plan in processes of its own; the rate of a link does not matter."""
    facts = facts_of(setup.model)
    for nodes, ranks in setup.grids:
        grid = f"node={ranks},world={nodes}"
        topology = Topology.parse(grid)
        setting = Setting(model=setup.model, seq=setup.seq, levels=grid, deferred=True)
        with (
            signals_raised(),
            Cluster(nodes) as cluster,
            tempfile.TemporaryDirectory() as folder,
        ):
            for number, name in enumerate(setup.names):
                plan = plans()[name]
                path = Path(folder) / f"{number}.toml"
                path.write_text(dump_plan(plan), encoding="utf-8")
                with ExitStack() as ending:
                    job = Job(
                        cluster, f"m{number}", sys.executable, ranks_per_node=ranks, number=number
                    )
                    ending.callback(job.close)
                    job.wait_until_started()
                    arguments = {"contender": str(path), "setting": asdict(setting)}
                    answers: list[Returned] = job.ask(
                        Call("shardwise.bench.memory:peak_bytes", arguments)
                    )
                    job.leave()
                work = facts.work(1, setup.seq, plan, topology)
                needed = memory(plan, facts.spec(plan, topology), topology, saved=work.saved)
                found = Footprint(
                    grid=grid,
                    plan=name,
                    predicted_bytes=needed.total,
                    peak_bytes=answers[0].value,
                )
                tell(f"{nodes} x {ranks}: {name} predicted {found.error:+.0%}")
                yield found


class _Trial:
    """Plans on one grid, run at several rates."""

    def __init__(self, setup: Setup, job: Job, levels: str, folder: Path) -> None:
        self._setup, self._job, self.levels, self._folder = setup, job, levels, folder
        self._facts = facts_of(setup.model)
        self._setting = Setting(model=setup.model, seq=setup.seq, levels=levels, deferred=True)
        self._plans: dict[str, tuple[str, Plan]] = {}

    def add(self, name: str, plan: Plan) -> None:
        """Takes part from now on; contenders are named by plan files."""
        path = self._folder / f"{len(self._plans)}.toml"
        path.write_text(dump_plan(plan), encoding="utf-8")
        self._plans[name] = (str(path), plan)

    def run(self, where: str, tell: Callable[[str], None]) -> None:
        """Probes, chooses, and lets the plans take turns at the rate that links have now."""
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
        tell(f"{where}: finals of {', '.join(names) or 'nobody'}")
        self._finals = self._meet(names, expected)
        tell(f"{where}: probing at last")
        self._probes.append(self._probe())

    def comparisons(self) -> Iterator[Comparison]:
        """Of what was probed and trained last."""
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

    def keep(self, files: _Kept) -> None:
        """All that predictions are made of."""
        files.first.write_text(dump_cluster(self._probes[0]), encoding="utf-8")
        files.median.write_text(dump_cluster(median_of(self._probes)), encoding="utf-8")
        files.chosen.write_text(dump_plan(self._plans[CHOSEN][1]), encoding="utf-8")

    def _probe(self) -> described.Cluster:
        return probe_job(self._job, levels=self.levels, quick=self._setup.quick)

    def _request(self, cluster: described.Cluster) -> Request:
        return Request(
            facts=self._facts, cluster=cluster, global_batch=cluster.world, seq=self._setup.seq
        )

    def _estimates(self, cluster: described.Cluster) -> dict[str, Estimate]:
        request = self._request(cluster)
        return {
            name: evaluate(request, plan, Batch(1, 1)).estimate
            for name, (_, plan) in self._plans.items()
        }

    def _turn(self, name: str, expected_s: float) -> list[float]:
        """Seconds of each step. One plan lives at a time: each of gloo's groups has threads that
        wake a hundred times a second, and those of 15 plans took half of two processors."""
        self._build(name)
        steps = max(1, min(MOST_STEPS, round(TURN_S / expected_s)))
        # The first step records orders and makes states; the second finds new buffers cold, which
        # matters where steps are short.
        found = self._train(name, 2 if steps > 1 else 1, steps)
        self._drop(name)
        return found

    def _meet(self, names: Sequence[str], expected: dict[str, float]) -> Turns:
        """Few plans live together here and change often: their ratios matter, not their seconds."""
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
        # The simulator's step overlaps the refresh of the one before it, and so must these.
        turn = Turn(self._plans[name][0], warm_up, steps, drained=False)
        answers: list[Measured] = self._job.ask(turn)
        by_step = zip(*(answer.steps_s for answer in answers), strict=True)
        return [statistics.mean(ranks) for ranks in by_step]


def takers(number: int, turns: Turns) -> list[str]:
    """Who takes a turn in a round: there and back, so that nobody is always early in whatever a
    machine goes through.

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
    """The planner's choice and what may be as fast; nobody, where that is nobody else."""
    medians = {name: statistics.median(seconds) for name, seconds in turns.items()}
    limit = NEAR * medians.pop(CHOSEN)
    fastest = sorted(medians, key=lambda name: medians[name])[:FINALISTS]
    near = [name for name in fastest if medians[name] <= limit]
    return [CHOSEN, *near] if near else []


# --- figures ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accuracy:
    """All comparisons together."""

    median_error: float
    worst_error: float
    first_median_error: float
    """Of what the first probe alone predicts."""
    first_worst_error: float
    rank_correlation: float
    """Spearman's, of all plans on all clusters together."""
    least_correlation: float
    """The least of a single cluster's. Where plans take about the same time, it is noise."""
    agreement: float
    """Likewise of the first half of all plans' steps with the second: how well the machine agrees
    with itself over half as many steps. A prediction is compared with all of them."""
    regrets: dict[tuple[str, str], float]
    """By cluster: measured time of the chosen plan over the fastest one's."""


def summarise(found: Sequence[Comparison]) -> Accuracy:
    """The figures that the planner is judged by."""
    errors = [abs(one.error) for one in found]
    firsts = [abs(one.first_s / one.measured_s - 1) for one in found]
    clusters = {(one.grid, one.rate): [] for one in found}  # type: dict[tuple[str, str], list[Comparison]]
    for one in found:
        clusters[one.grid, one.rate].append(one)
    return Accuracy(
        statistics.median(errors),
        max(errors),
        statistics.median(firsts),
        max(firsts),
        _correlation(found),
        min(_correlation(some) for some in clusters.values()),
        _agreement(found),
        {key: _regret(some) for key, some in clusters.items()},
    )


def _regret(found: Sequence[Comparison]) -> float:
    """Of the finals, meeting by meeting: who is fastest of many in few steps was also lucky.

    What is the chosen plan by another name (its step is simulated to the same seconds) is no rival:
    that it took another time is the machine's doing.
    """
    chosen = next(one for one in found if one.plan == CHOSEN)
    rivals = [
        one for one in found if not math.isclose(one.predicted_s, chosen.predicted_s, rel_tol=1e-9)
    ]
    if not chosen.finals:  # nobody came near
        return chosen.measured_s / min(one.measured_s for one in [chosen, *rivals])
    ratios = [
        statistics.median(a / b for a, b in zip(chosen.finals, one.finals, strict=True))
        for one in rivals
        if one.finals
    ]
    return max([1.0, *ratios])


Recorded = TypeVar("Recorded", Comparison, Footprint)


def read(results: Path, kind: type[Recorded]) -> list[Recorded]:
    """What a file has; of one plan on one cluster the last that was written."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [kind(**json.loads(line)) for line in lines]
    return list({(one.grid, getattr(one, "rate", ""), one.plan): one for one in found}.values())


def write(results: Path, one: Comparison | Footprint) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(one)) + "\n")


def _correlation(found: Sequence[Comparison]) -> float:
    return _spearman([one.predicted_s for one in found], [one.measured_s for one in found])


def _agreement(found: Sequence[Comparison]) -> float:
    middles = [len(one.steps) / 2 for one in found]  # an odd number's middle is in both halves
    early = [
        statistics.median(one.steps[: math.ceil(middle)])
        for one, middle in zip(found, middles, strict=True)
    ]
    late = [
        statistics.median(one.steps[math.floor(middle) :])
        for one, middle in zip(found, middles, strict=True)
    ]
    return _spearman(early, late)


def _spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of ranks; equal values share theirs.

    >>> _spearman([1, 2, 3], [10, 30, 20])
    0.5
    >>> round(_spearman([1, 2, 2], [10, 20, 30]), 3) == round(_spearman([1, 2, 2], [10, 30, 20]), 3)
    True
    """

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks(first), ranks(second))
