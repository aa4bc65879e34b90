"""How much memory and disk there is per rank: its share of the host's."""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from shardwise.comm.control import Control
from shardwise.device.memory import free_bytes

_GROUPS = Path("/sys/fs/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Room:
    """What each rank has; all ranks agree on the minimum."""

    host_bytes: int
    """The host's memory per rank, without what the process itself takes."""
    ranks_on_host: int
    """The largest number of ranks on one host; emulated nodes share a host."""
    processors: frozenset[int]
    """The processors of this host that any of its ranks may use."""


def find_room(control: Control) -> Room:
    """Query the system and the control groups; collective."""
    group, limit = _memory_limit()
    mine = torch.tensor([_number(_host()), _number(f"{_host()} {group}")])
    rows = control.exchange(mine, "hosts of a probe")
    on_host, in_group = (rows == mine).sum(0).tolist()
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    share = memory.available // on_host
    if limit is not None:
        share = min(share, max(limit // in_group - own, limit // in_group // 2))
    figures = torch.tensor([-share, on_host])
    most = control.highest(figures, "memory of a probe").tolist()
    return Room(-most[0], most[1], _host_processors(control, rows[:, 0] == mine[0]))


def _host_processors(control: Control, here: torch.Tensor) -> frozenset[int]:
    """The processors that any rank on this host may use; ``here`` marks its ranks. Collective."""
    own = sorted(_own_processors())
    most = int(control.highest(torch.tensor([own[-1] + 1]), "processors of a probe").item())
    allowed = torch.zeros(most, dtype=torch.int64)
    allowed[own] = 1
    every = control.exchange(allowed, "processors of a probe")
    return frozenset(every[here].sum(0).nonzero().flatten().tolist())


def _own_processors() -> set[int]:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def device_bytes(control: Control, device: torch.device) -> int:
    """Free memory of the device itself, on the rank that has least."""
    return -int(
        control.highest(torch.tensor([-free_bytes(device)]), "device memory of a probe").item()
    )


def _host() -> str:
    try:
        return f"{platform.node()} {_BOOT.read_text(encoding='ascii')}"
    except OSError:
        return platform.node()


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _memory_limit() -> tuple[str, int | None]:
    """The tightest control group of this process, and its limit; None: there is no limit."""
    tightest: tuple[str, int | None] = ("", None)
    for group in _own_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (group / name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            limit = int(text) if text.isdecimal() else None
            if limit is not None and limit < (tightest[1] or psutil.virtual_memory().total):
                tightest = (str(group), limit)
    return tightest


def _own_groups() -> list[Path]:
    """The memory control groups of this process, of both versions, with their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _GROUPS / controllers
        inner = root / path.lstrip("/")
        found += [inner, *(above for above in inner.parents if above.is_relative_to(root))]
        found.append(root)  # in a container the path may not exist, but the root is its own group
    return found


def free_disk_bytes(path: Path, control: Control) -> int:
    """Free bytes at a path, on the rank that finds least."""
    facts = os.statvfs(path)
    free = facts.f_bavail * facts.f_frsize
    return -int(control.highest(torch.tensor([-free]), "disk of a probe").item())
