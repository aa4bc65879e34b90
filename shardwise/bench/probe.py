"""The probe on an emulated cluster: what a planner would know of it.

Imports no torch.
"""

import sys
from typing import Any

from shardwise.bench.cluster import Cluster, Rate, signals_raised
from shardwise.bench.jobs import Job
from shardwise.bench.messages import Call, Returned
from shardwise.core import cluster as described
from shardwise.cost.file import parse_cluster

ENTRY = "shardwise.probe.job:work"


def probe_cluster(
    nodes: int = 2, ranks: int = 2, *, rate: Rate, latency_us: int = 0, **arguments: Any
) -> described.Cluster:
    """Emulates a cluster of links of a rate, probes it, and takes it down.

    ``arguments`` are those of ``shardwise.probe.job.work``: dtype, path, quick, in_float32.
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
    """Probes with the ranks of a job that also trains, at the rate that its links have now."""
    answers: list[Returned] = job.ask(Call(ENTRY, arguments))
    return parse_cluster(answers[0].value, origin="of the probe")
