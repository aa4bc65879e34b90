"""probe(): every figure of a cluster, measured by all of its ranks at once."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.comm.grid import Grid, find_place
from shardwise.core.cluster import Cluster, Curve, Device, Host, LinkSpec
from shardwise.core.errors import UsageError
from shardwise.core.topology import Topology
from shardwise.core.wire import KINDS
from shardwise.cost.file import dump_cluster, parse_cluster
from shardwise.device.abilities import HOST, device_name, forked_random, separate_memory
from shardwise.device.choice import Asked, local_device, make_current
from shardwise.probing.clock import Clock
from shardwise.probing.compute import measure_passes, measured_dtypes
from shardwise.probing.disk import check_disk, measure_disk
from shardwise.probing.links import measure_level
from shardwise.probing.memory import (
    measure_codec,
    measure_copy,
    measure_host_copy,
    measure_update,
)
from shardwise.probing.room import device_bytes, find_room
from shardwise.probing.scope import DTYPES, FULL, QUICK, Scope, check_dtype

VISITS = 3
"""How often passes are measured: at the beginning, in the middle, and at the end."""

Progress = Callable[[int, int, str], None]
"""Called with the number of measurements done, their total, and the one that begins."""


def probe(
    levels: str | Topology | None = None,
    *,
    dtype: str = "float32",
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    quick: bool = False,
    device: Asked = None,
) -> Cluster:
    """Measure the cluster of this rank's process group; collective, with equal results.

    ``levels`` describes the grid as for ``shard``. Compute is measured in float32, in ``dtype``,
    and in bfloat16 if the device has instructions for it. ``path`` is a folder on a disk that is
    measured as well. This takes about a minute. ``quick`` is for tests: its figures mean little.
    ``device`` is what is measured, by default this rank's accelerator if there is one.

    >>> import shardwise as sw
    >>> cluster = sw.probe(quick=True)
    >>> sw.simulate("zero3", "gpt-mini", cluster, seq=128, dtype="float32").step_s > 0
    True
    """
    check_dtype(dtype)
    used = make_current(local_device(device))
    place = find_place(levels, used)
    grid = Grid.build(place, used)
    folder = Path(path) if path is not None else None
    try:
        with forked_random(used):
            probing = _Probing(grid, dtype, folder, QUICK if quick else FULL, progress)
            text = dump_cluster(probing.run())
        # All ranks take the date and names of rank 0.
        text = str(grid.control.broadcast_object(text, "result of a probe"))
    except BaseException:
        grid.end_lanes()  # closing the groups might wait for a rank that failed
        raise
    grid.close()
    return parse_cluster(text, origin="of the probe")


class _Probing:
    """One probe."""

    def __init__(
        self,
        grid: Grid,
        dtype: str,
        path: Path | None,
        scope: Scope,
        progress: Progress | None,
    ) -> None:
        self._grid, self._path, self._scope = grid, path, scope
        self._clock = Clock(grid.control, grid.device, scope)
        if path is not None:
            check_disk(path, grid.control)
        self._dtypes = self._agreed(measured_dtypes(dtype, grid.device), dtype)
        self._room = find_room(grid.control)
        self._beside_host = separate_memory(grid.device)
        self._memory = (
            device_bytes(grid.control, grid.device) if self._beside_host else self._room.host_bytes
        )
        self._visits: dict[str, list[tuple[Curve, Curve]]] = {name: [] for name in self._dtypes}
        """By dtype: the curves of forward and backward of each visit."""
        self._progress, self._done = progress, 0
        joined = [level for level in grid.place.topology.levels if level.size > 1]
        # Three per level, copies and the update; beside a host also its copies and its update.
        self._total = (
            3 * len(joined) + VISITS * len(self._dtypes) + 2 + len(KINDS)
            + 2 * self._beside_host + (path is not None)
        )  # fmt: skip

    def run(self) -> Cluster:
        topology, disk = self._grid.place.topology, None
        self._visit_passes()
        levels = self._measure_levels()
        self._visit_passes()
        device, host = self._measure_device(), self._measure_host()
        if self._path is not None:
            self._tell(f"the disk at {self._path}")
            ranks_per_node = topology.ranks_per_node
            disk = measure_disk(
                self._path, self._clock, self._scope, self._grid.control, self._room, ranks_per_node
            )
        today = datetime.date.today().isoformat()
        return Cluster(
            name=f"probed {topology}",
            levels=levels,
            device=device,
            host=host,
            disk=disk,
            source=f"shardwise probe, {today}, torch {torch.__version__}",
        )

    def _measure_levels(self) -> tuple[LinkSpec, ...]:
        grid, topology = self._grid, self._grid.place.topology
        steps = {step.level: step for step in topology.ladder(()).steps}
        grid.connect(steps.values())
        return tuple(
            measure_level(
                grid,
                steps[level.name],
                self._clock,
                self._scope,
                self._memory,
                self._room.processors,
                self._tell,
            )
            if level.name in steps
            else LinkSpec(name=level.name, size=level.size)
            for level in topology.levels
        )

    def _measure_device(self) -> Device:
        clock, scope, device = self._clock, self._scope, self._grid.device
        self._tell("copies in memory")
        copy = measure_copy(clock, scope, device, self._memory)
        self._tell("the optimizer's update")
        update = measure_update(clock, scope, device, self._memory)
        codes = {}
        for kind in KINDS:
            self._tell(f"codec {kind}")
            codes[kind] = measure_codec(kind, clock, scope, device, self._memory)
        self._visit_passes()
        return Device(
            name=device_name(device),
            kind=device.type,
            memory_bytes=self._memory,
            forward=self._median_passes(0),
            backward=self._median_passes(1),
            update=update,
            copy=copy,
            encode={kind: curves[0] for kind, curves in codes.items()},
            decode={kind: curves[1] for kind, curves in codes.items()},
            share=self._share(),
        )

    def _visit_passes(self) -> None:
        for dtype, visits in self._visits.items():
            self._tell(f"passes of blocks in {dtype}")
            visits.append(measure_passes(self._clock, self._scope, dtype, self._grid.device))

    def _median_passes(self, index: int) -> dict[str, Curve]:
        return {
            dtype: Curve.median([visit[index] for visit in visits])
            for dtype, visits in self._visits.items()
        }

    def _share(self) -> float:
        """The share of the host's processors that compute takes; 1 if the device has its own."""
        if self._beside_host:
            return 1.0
        threads = self._room.ranks_on_host * torch.get_num_threads()
        return min(1.0, threads / len(self._room.processors))

    def _measure_host(self) -> Host | None:
        """The host's memory; None for CPUs, where it is the device's."""
        if not self._beside_host:
            return None
        self._tell("copies between host and device")
        bandwidth = measure_host_copy(self._clock, self._grid.device)
        self._tell("the optimizer's update on the host")
        room = self._room
        update = measure_update(self._clock, self._scope, HOST, room.host_bytes)
        return Host(
            memory_bytes=room.host_bytes * self._grid.place.topology.ranks_per_node,
            bandwidth=bandwidth,
            update=update,
        )

    def _agreed(self, dtypes: tuple[str, ...], asked: str) -> tuple[str, ...]:
        """The dtypes that all ranks can measure; raises on all if one cannot measure ``asked``."""
        lacking = self._clock.slowest([float(name not in dtypes) for name in DTYPES])
        found = tuple(name for name, lacks in zip(DTYPES, lacking, strict=True) if not lacks)
        if asked not in found:
            raise UsageError(
                f"A product in {asked} kills a process on the CPU of one of these ranks, which "
                "advertises AMX but refuses it; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before "
                "torch is imported."
            )
        return found

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, what)
        self._done += 1
