"""How fast ranks compute at this moment, by blocks like those that the probe times.

On a shared machine the same work takes 10 to 30 % longer or shorter within a minute, whoever asks
for it. A comparison of minutes with the probe before them must know how the pace has changed.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from shardwise.bench.jobs import Job
from shardwise.bench.messages import Call, Returned
from shardwise.core.cluster import Cluster, Curve
from shardwise.probe.scope import FULL

if TYPE_CHECKING:
    from shardwise.probe.compute import Passes

ENTRY = "shardwise.bench.pace:work"
SHAPE = FULL.blocks[2]
"""About the work of a block of the model that is trained."""
LAPS = 3


def block_seconds(job: Job) -> float:
    """Seconds of both passes of a block, on all ranks at once; the slowest rank counts."""
    answers: list[Returned] = job.ask(Call(ENTRY, {}))
    laps = zip(*(answer.value for answer in answers), strict=True)
    return statistics.median(max(lap) for lap in laps)


def probed_seconds(cluster: Cluster) -> float:
    """The same, as a probe found it."""
    compute = cluster.device.compute
    return compute("float32", SHAPE.flops) + compute("float32", 2 * SHAPE.flops, backward=True)


def at_pace(cluster: Cluster, pace: float) -> Cluster:
    """The cluster with devices that take ``pace`` times as long for whatever they do."""

    def slowed(curve: Curve) -> Curve:
        return Curve(tuple((amount, seconds * pace) for amount, seconds in curve.points))

    def all_slowed(curves: Mapping[str, Curve]) -> dict[str, Curve]:
        return {key: slowed(curve) for key, curve in curves.items()}

    device = cluster.device
    changed = replace(
        device,
        forward=all_slowed(device.forward),
        backward=all_slowed(device.backward),
        update=slowed(device.update),
        copy=slowed(device.copy),
        encode=all_slowed(device.encode),
        decode=all_slowed(device.decode),
    )
    return replace(cluster, device=changed)


# --- on the ranks -------------------------------------------------------------------------------


def work() -> list[float]:
    """Seconds of a block's passes, lap by lap."""
    import torch.distributed as dist

    passes = _passes()
    passes.run()  # what the steps before left in the caches is not ours
    dist.barrier()
    laps = []
    for _ in range(LAPS):
        begin = time.perf_counter()
        passes.run()
        laps.append((time.perf_counter() - begin) / passes.num_blocks)
    return laps


@cache
def _passes() -> "Passes":
    import torch

    from shardwise.probe.compute import Passes

    return Passes(SHAPE, torch.float32, torch.device("cpu"))
