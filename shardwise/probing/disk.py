"""Measures a disk with the store that training uses: large transfers of all ranks at once."""

from pathlib import Path

import torch

from shardwise.comm.control import Control
from shardwise.core.cluster import Disk
from shardwise.core.errors import UsageError
from shardwise.probing.clock import Clock
from shardwise.probing.room import Room, free_disk_bytes
from shardwise.probing.scope import Scope
from shardwise.tier.folder import check_folder
from shardwise.tier.nvme import NvmeStore
from shardwise.tier.pool import PAGE_BYTES, zeros


def check_disk(path: Path, control: Control) -> None:
    """Raise on all ranks unless all can use the folder: one rank alone would leave the others
    waiting.

    A store is opened and closed, so that errors come before anything is measured.
    """
    error: BaseException | None = None
    try:
        check_folder(path)
        NvmeStore(str(path), rank=control.rank).close()
    except (OSError, UsageError) as failure:
        error = failure
    failed = control.exchange(torch.tensor([int(error is not None)]), "disk of a probe")
    if error is not None:
        raise error
    if failed.any():
        ranks = ", ".join(str(rank) for rank in failed.flatten().nonzero().flatten().tolist())
        raise UsageError(f"{path} cannot be used on rank {ranks}; give another folder.")


def measure_disk(
    path: Path, clock: Clock, scope: Scope, control: Control, room: Room, ranks_per_node: int
) -> Disk:
    """Reads and writes that bypass the page cache, in bytes per second of a node."""
    free = free_disk_bytes(path, control)
    limit = min(scope.disk_bytes, free // (4 * room.ranks_on_host), room.host_bytes // 8)
    nbytes = max(PAGE_BYTES, limit // PAGE_BYTES * PAGE_BYTES)
    buffer = zeros(nbytes, torch.uint8, torch.device("cpu"))
    buffer.view(torch.int64).random_()  # some disks are faster with zeros
    store = NvmeStore(str(path), rank=control.rank)
    try:
        record = store.reserve(nbytes, "a probe")
        write_s = clock.seconds(lambda: store.put(record, buffer).block_host())
        read_s = clock.seconds(lambda: store.get(record, buffer).block_host())
    finally:
        store.close()
    return Disk(
        size_bytes=node_share(free, room, ranks_per_node),
        read=float(f"{ranks_per_node * nbytes / read_s:.4g}"),
        write=float(f"{ranks_per_node * nbytes / write_s:.4g}"),
        source=f"{path}, {nbytes >> 20} MiB per rank",
    )


def node_share(nbytes: int, room: Room, ranks_per_node: int) -> int:
    """A node's share of its host's disk: several emulated nodes have the disk of one host."""
    return nbytes * ranks_per_node // room.ranks_on_host
