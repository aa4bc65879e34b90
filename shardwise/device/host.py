"""The host's processors beside a device: how many threads an update on the host may use."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.device.abilities import separate_memory


def host_update_threads(device: torch.device) -> int:
    """Threads for an optimizer's update on the host.

    Beside a device the host's processors have little else to do, but torchrun sets OMP_NUM_THREADS
    to 1. Then an update takes this rank's share of the processors. Any other number is the user's
    choice. Without a device it stays, because compute uses the same processors.
    """
    chosen = torch.get_num_threads()
    if not separate_memory(device) or chosen != 1:
        return chosen
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, _processors() // max(1, ranks))


@contextmanager
def host_update(device: torch.device) -> Iterator[None]:
    """Inside, this thread's kernels on the CPU use ``host_update_threads``."""
    before, wanted = torch.get_num_threads(), host_update_threads(device)
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processors() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
