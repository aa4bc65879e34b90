"""Collectives between all devices of the machine, one rank each; called by ``launch``."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.device import streams
from shardwise.device.choice import local_device, make_current

_ROUNDS = 5
_LONG_ENOUGH_S = 0.01

Rows = list[dict[str, Any]]
Call = tuple[Callable[[], object], Callable[[], bool]]
"""A collective, and whether its result is right."""


def measure(largest_bytes: int) -> Rows:
    """Every collective that training uses: whether its result is right, and its bandwidth.

    The bandwidth is what a rank receives from the others, over the time of the slowest rank.
    """
    device = make_current(local_device())
    calls: dict[str, Callable[[int, torch.device], Call]] = {
        "all_gather": _gather,
        "reduce_scatter": _reduce,
        "all_to_all": _exchange,
    }
    rows = []
    for name, make in calls.items():
        nbytes = 1 << 18
        while True:
            call, is_right = make(nbytes // 4 // dist.get_world_size(), device)
            spent, right = _slowest(call, device), is_right()
            if spent > _LONG_ENOUGH_S or nbytes * 4 > largest_bytes:
                break
            nbytes *= 4
        received = nbytes * (dist.get_world_size() - 1) / dist.get_world_size()
        rows.append(
            {
                "collective": name,
                "ranks": dist.get_world_size(),
                "size_bytes": nbytes,
                "right": _all_agree(right),
                "seconds_s": spent,
                "received_gb_s": received / spent / 1e9,
            }
        )
    return rows


def _gather(numel: int, device: torch.device) -> Call:
    own = torch.full((numel,), float(dist.get_rank()), device=device)
    everyone = torch.empty(numel * dist.get_world_size(), device=device)
    return lambda: dist.all_gather_single(everyone, own), lambda: _are_ranks(everyone)


def _exchange(numel: int, device: torch.device) -> Call:
    own = torch.full((numel * dist.get_world_size(),), float(dist.get_rank()), device=device)
    received = torch.empty_like(own)
    return lambda: dist.all_to_all_single(received, own), lambda: _are_ranks(received)


def _reduce(numel: int, device: torch.device) -> Call:
    world = dist.get_world_size()
    own = torch.full((numel * world,), float(dist.get_rank()), device=device)
    total = torch.empty(numel, device=device)
    expected = world * (world - 1) / 2
    return lambda: dist.reduce_scatter_single(total, own), lambda: bool((total == expected).all())


def _are_ranks(values: Tensor) -> bool:
    parts = values.view(dist.get_world_size(), -1)
    ranks = torch.arange(dist.get_world_size(), device=values.device).unsqueeze(1)
    return bool((parts == ranks).all())


def _slowest(call: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):  # the first connects
        call()
    streams.synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        call()
    streams.synchronize(device)
    return largest(time.perf_counter() - begin) / _ROUNDS


def largest(value: float) -> float:
    """The largest value of all ranks; on the host's group."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _all_agree(right: bool) -> bool:
    return largest(float(not right)) == 0.0
