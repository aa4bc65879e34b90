"""The probe on an emulated cluster: what the planner would know of it.

Imports no torch.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.bench.cluster import Cluster, Rate, signals_raised
from shardwise.bench.jobs import Job
from shardwise.bench.messages import Call, Returned
from shardwise.core import cluster as described
from shardwise.core.cluster import Curve, LinkSpec
from shardwise.cost.file import parse_cluster

ENTRY = "shardwise.probing.job:work"


def probe_cluster(
    nodes: int = 2, ranks: int = 2, *, rate: Rate, latency_us: int = 0, **arguments: Any
) -> described.Cluster:
    """Emulate a cluster with links of a rate, probe it, and remove it.

    ``arguments`` are those of ``shardwise.probing.job.work``: dtype, path, quick, in_float32.
    """
    with signals_raised(), Cluster(nodes) as cluster:
        job = Job(cluster, "probe", sys.executable, ranks_per_node=ranks, number=0)
        try:
            job.wait_until_started()
            cluster.shape(rate, latency_us)
            found = probe_job(job, **arguments)
            job.leave()
        finally:
            job.close()
    return found


def probe_job(job: Job, **arguments: Any) -> described.Cluster:
    """Probe with the ranks of a job that also trains, at the current rate of its links."""
    answers: list[Returned] = job.ask(Call(ENTRY, arguments))
    return parse_cluster(answers[0].value, origin="of the probe")


def median_of(probes: Sequence[described.Cluster]) -> described.Cluster:
    """A cluster that was probed several times, with the median of its speeds."""

    def curves(found: Sequence[Mapping[str, Curve]]) -> dict[str, Curve]:
        return {key: Curve.median([each[key] for each in found]) for key in found[0]}

    devices = [probe.device for probe in probes]
    device = replace(
        devices[0],
        forward=curves([each.forward for each in devices]),
        backward=curves([each.backward for each in devices]),
        encode=curves([each.encode for each in devices]),
        decode=curves([each.decode for each in devices]),
        update=Curve.median([each.update for each in devices]),
        copy=Curve.median([each.copy for each in devices]),
    )
    levels = tuple(_median_link(links) for links in zip(*(p.levels for p in probes), strict=True))
    return replace(probes[0], device=device, levels=levels)


def _median_link(links: Sequence[LinkSpec]) -> LinkSpec:
    gathers = [link.gather for link in links if link.gather is not None]
    reduces = [link.reduce for link in links if link.reduce is not None]
    return replace(
        links[0],
        gather=Curve.median(gathers) if gathers else None,
        reduce=Curve.median(reduces) if reduces else None,
        busy=statistics.median(link.busy for link in links),
    )
