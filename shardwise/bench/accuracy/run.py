"""The comparisons on emulated clusters, and of stored measurements with current predictions."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from shardwise.bench.accuracy.results import Comparison, Footprint
from shardwise.bench.accuracy.setup import CHOSEN, Setup, plans
from shardwise.bench.accuracy.trial import Kept, Trial
from shardwise.bench.cluster import Cluster, signals_raised
from shardwise.bench.jobs import Job
from shardwise.bench.messages import Call, Returned, Setting
from shardwise.core.topology import Topology
from shardwise.cost.file import load_cluster
from shardwise.model.named import facts_of
from shardwise.planner.request import Request, evaluate
from shardwise.planner.space import Batch
from shardwise.plans.file import dump_plan, load_plan
from shardwise.plans.memory import memory


def compare(
    setup: Setup, tell: Callable[[str], None], keep: Path | None = None
) -> Iterator[Comparison]:
    """Probe, predict and train; ``keep`` is a folder for probed clusters and chosen plans."""
    for nodes, ranks in setup.grids:
        with signals_raised(), Cluster(nodes) as cluster, ExitStack() as ending:
            job = Job(
                cluster, "accuracy", sys.executable, ranks_per_node=ranks, number=0, apart=True
            )
            ending.callback(job.close)
            folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
            job.wait_until_started()
            tried = Trial(setup, job, f"node={ranks},world={nodes}", folder)
            for name in setup.names:
                tried.add(name, plans()[name])
            for rate in setup.rates:
                cluster.shape(rate)
                where = f"{nodes} x {ranks}, {rate}"
                tried.run(where, tell)
                if keep is not None:
                    tried.keep(Kept(keep, tried.levels, str(rate)))
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
    """Compare the same turns with what the simulator now predicts for the stored clusters."""
    facts = facts_of(model)
    for one in found:
        files = Kept(kept, one.grid, one.rate)
        plan = load_plan(files.chosen) if one.plan == CHOSEN else plans()[one.plan]
        estimates = []
        for file in (files.median, files.first):
            cluster = load_cluster(file)
            request = Request(facts=facts, cluster=cluster, global_batch=cluster.world, seq=seq)
            estimates.append(evaluate(request, plan, Batch(1, 1)).estimate)
        now, first = estimates
        yield replace(one, predicted_s=now.step_s, first_s=first.step_s, exposed=now.exposed)


def footprints(setup: Setup, tell: Callable[[str], None]) -> Iterator[Footprint]:
    """Peak memory, each plan in separate processes; the rate of a link does not matter."""
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
