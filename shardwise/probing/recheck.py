"""Checks a stored probe against the cluster now: free memory, and the speed of hops on each level.

Speeds of processors and memory do not change. Free memory and disk space change by the hour, and
links are shaped, shared or moved to other networks, so these are checked every time.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.comm.grid import Grid, Place
from shardwise.core.cluster import Cluster, Curve
from shardwise.core.topology import Step
from shardwise.device.abilities import separate_memory
from shardwise.probing.clock import Clock
from shardwise.probing.disk import check_disk, node_share
from shardwise.probing.links import time_gather
from shardwise.probing.room import device_bytes, find_room, free_disk_bytes
from shardwise.probing.scope import FULL, Effort

CHANGED = 2.0
"""Hops slower or faster than stored by this factor mean another link; a busy machine's are not."""
PATIENCE_S = 0.1
"""Hops are not made larger once one takes this long."""
_EFFORT = Effort(repeats=3, batch_s=0.02, point_s=0.2)


def recheck(
    stored: Cluster, place: Place, device: torch.device, path: str | os.PathLike[str] | None
) -> tuple[Cluster, dict[str, float]]:
    """The cluster with what is free now, and the levels whose hops are slower or faster than
    stored, each with the factor; collective, with equal results."""
    grid = Grid.build(place, device)
    try:
        now = _with_free(stored, grid, path)
        changed = _changed(stored, grid)
    except BaseException:
        grid.end_lanes()  # closing the groups might wait for a rank that failed
        raise
    grid.close()
    return now, changed


def _with_free(stored: Cluster, grid: Grid, path: str | os.PathLike[str] | None) -> Cluster:
    room = find_room(grid.control)
    separate = separate_memory(grid.device)
    free = device_bytes(grid.control, grid.device) if separate else room.host_bytes
    now = replace(stored, device=replace(stored.device, memory_bytes=free))
    if now.host is not None:
        host_bytes = room.host_bytes * stored.ranks_per_node
        now = replace(now, host=replace(now.host, memory_bytes=host_bytes))
    if now.disk is not None and path is not None:
        check_disk(Path(path), grid.control)
        size = free_disk_bytes(Path(path), grid.control)
        size = node_share(size, room, stored.ranks_per_node)
        now = replace(now, disk=replace(now.disk, size_bytes=size))
    return now


def _changed(stored: Cluster, grid: Grid) -> dict[str, float]:
    steps = {step.level: step for step in grid.place.topology.ladder(()).steps}
    grid.connect(steps.values())
    clock = Clock(grid.control, grid.device, FULL)
    found = {}
    for level in stored.levels:
        if level.gather is not None and level.name in steps:
            times = _times(level.gather, grid, steps[level.name], clock)
            if not 1 / CHANGED <= times <= CHANGED:
                found[level.name] = times
    return found


def _times(curve: Curve, grid: Grid, step: Step, clock: Clock) -> float:
    """Seconds of a hop over the stored ones, for the largest hop, or the first that takes long
    enough. All ranks use the same sizes, because they agree on seconds."""
    times = 1.0
    for amount, _ in curve.points:
        sent, seconds = time_gather(grid, step, clock, amount, _EFFORT)
        times = seconds / curve.seconds(sent)
        if seconds > PATIENCE_S:
            break
    return times
