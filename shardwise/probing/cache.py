"""Probes are stored in the user's cache folder, so that a cluster is measured once.

A file's name is a fingerprint of everything that the figures depend on: hosts, devices, cores,
threads, levels, torch, dtype and path. Rank 0 reads and writes, and broadcasts what it read. What
changes by the hour (the speed of links, free memory) is checked every time, see ``recheck.py``.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.control import Control
from shardwise.comm.grid import Place, find_place
from shardwise.comm.limits import DEFAULT_PATIENCE_S
from shardwise.core.cluster import Cluster, ClusterError
from shardwise.core.topology import Topology
from shardwise.cost.file import dump_cluster, parse_cluster
from shardwise.device.abilities import device_name
from shardwise.device.choice import Asked, local_device, make_current
from shardwise.probing.probe import Progress, probe
from shardwise.probing.recheck import recheck
from shardwise.probing.scope import check_dtype

_log = logging.getLogger("shardwise")
FORM = 3
"""Version of what a probe measures, and how: probes of other versions are not used."""
_INTERFACE = "_SOCKET_IFNAME"
"""How the names end of variables that choose an interface, one for each backend."""


def cached_probe(
    levels: str | Topology | None = None,
    *,
    dtype: str = "float32",
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    quick: bool = False,
    device: Asked = None,
) -> Cluster:
    """The stored probe of this cluster, otherwise a new one, which is stored; collective."""
    check_dtype(dtype)
    used = make_current(local_device(device))
    place = find_place(levels, used)
    file = _file(place, used, dtype, path, quick)
    control = Control(place.world, place.rank, DEFAULT_PATIENCE_S)
    try:
        stored = _read(file) if place.rank == 0 else None
        text = control.broadcast_object(stored, "stored probe")
    finally:
        control.close()
    if text is not None:
        now, changed = recheck(parse_cluster(str(text), origin=str(file)), place, used, path)
        if not changed:
            return now
        if place.rank == 0:
            _log.warning("%s", _sentence(changed))
    return fresh_probe(levels, dtype=dtype, path=path, progress=progress, quick=quick, device=used)[
        0
    ]


def _sentence(changed: dict[str, float]) -> str:
    """
    >>> _sentence({"world": 4.0})
    'Hops on level world take 4 times as long as in the stored probe: probing the cluster again.'
    """
    levels = " and ".join(f"on level {name} take {times:.2g}" for name, times in changed.items())
    return f"Hops {levels} times as long as in the stored probe: probing the cluster again."


def fresh_probe(
    levels: str | Topology | None = None,
    *,
    dtype: str = "float32",
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    quick: bool = False,
    device: Asked = None,
) -> tuple[Cluster, Path | None]:
    """A new probe, which replaces a stored one, and the path of its file; collective."""
    check_dtype(dtype)
    used = make_current(local_device(device))
    file = _file(find_place(levels, used), used, dtype, path, quick)
    cluster = probe(levels, dtype=dtype, path=path, progress=progress, quick=quick, device=used)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    stored = _write(file, dump_cluster(cluster)) if is_first else False
    return cluster, file if stored else None


def cache_folder() -> Path:
    """The folder of stored probes: under XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "shardwise"


def fingerprint(facts: dict[str, Any]) -> str:
    """A short name for facts that does not depend on their order.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1})
    True
    """
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _file(
    place: Place,
    device: torch.device,
    dtype: str,
    path: str | os.PathLike[str] | None,
    quick: bool,
) -> Path:
    """The file of the stored probe; collective."""
    facts = {
        "ranks": _ranks(place, device),
        "levels": str(place.topology),
        "torch": torch.__version__,
        "shardwise": FORM,
        "dtype": dtype,
        "path": os.path.abspath(path) if path is not None else None,
        "quick": quick,
    }
    return cache_folder() / f"probe-{fingerprint(facts)}.toml"


def _ranks(place: Place, device: torch.device) -> list[Any]:
    """The hardware and software of each rank."""
    named = [value for name, value in sorted(os.environ.items()) if name.endswith(_INTERFACE)]
    mine = {
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "device": device_name(device),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "threads": torch.get_num_threads(),
        # Loopback joins ranks of one host, as happens without a named interface.
        "interfaces": [name for name in named if name not in ("", "lo")],
    }
    ranks: list[Any] = [mine] * place.world
    if place.world > 1:
        dist.all_gather_object(ranks, mine)
    return ranks


def _read(file: Path) -> str | None:
    """A stored probe; None if it cannot be used any more."""
    try:
        text = file.read_text(encoding="utf-8")
        parse_cluster(text, origin=str(file))
    except (OSError, UnicodeDecodeError, ClusterError):
        return None
    return text


def _write(file: Path, text: str) -> bool:
    """Store a probe as a whole or not at all; returns whether it was stored."""
    try:
        write_whole(file, text)
    except OSError as error:
        _log.warning("The probe could not be stored in %s: %s.", file, error.strerror or error)
        return False
    return True


def write_whole(file: Path, text: str) -> None:
    """Write a file so that no reader ever sees a part of it; creates its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
