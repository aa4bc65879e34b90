"""Pools of buffers, which are reused by size and never grow silently.

On CPU memory comes from mmap: it is page-aligned, as direct I/O requires, and freeing it returns it
to the system.
"""

import mmap
import threading
from collections import defaultdict
from contextlib import suppress

import torch

from shardwise.tier.budget import Budget

PAGE_BYTES = mmap.PAGESIZE
_LARGE_PAGE_BYTES = 2 << 20


class Pool:
    """Lends memory by size and takes it back; thread-safe.

    ``held_bytes`` is what the pool owns, lent or idle. The runtime decides how many buffers of a
    size are lent at once (prefetch, gradients in flight), and the memory model predicts it.
    """

    def __init__(
        self, device: torch.device, budget: Budget | None = None, *, pinned: bool = False
    ) -> None:
        self._device, self._pinned = device, pinned
        self._budget = budget if budget is not None else Budget("device")
        self._lock = threading.Lock()
        self._idle: dict[int, list[tuple[torch.UntypedStorage, torch.cuda.Event | None]]] = (
            defaultdict(list)
        )
        self.held_bytes = 0
        self.peak_bytes = 0
        self._budget.before_refusing(self.trim)

    def take(self, nbytes: int) -> torch.UntypedStorage:
        with self._lock:
            idle = self._idle[nbytes].pop() if self._idle[nbytes] else None
        if idle is not None:
            storage, used = idle
            if used is not None and self._pinned:
                used.synchronize()  # the next user may be a thread, without a stream
            elif used is not None:
                torch.cuda.current_stream(self._device).wait_event(used)
            return storage
        self._budget.claim(nbytes, "A buffer")
        with self._lock:
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return allocate(nbytes, self._device, pinned=self._pinned)

    def give(self, storage: torch.UntypedStorage) -> None:
        """Take memory back; on CUDA the current stream may still be using it."""
        used = None
        if self._pinned or self._device.type == "cuda":
            used = torch.cuda.Event()
            used.record(torch.cuda.current_stream())
        with self._lock:
            self._idle[storage.nbytes()].append((storage, used))

    def trim(self) -> None:
        """Return idle memory to the system."""
        with self._lock:
            freed = sum(nbytes * len(idle) for nbytes, idle in self._idle.items())
            self.held_bytes -= freed
            self._idle.clear()
        self._budget.release(freed)


def allocate(nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.UntypedStorage:
    """Fresh memory; on CPU from mmap, unless it is ``pinned`` for copies to CUDA."""
    if pinned and nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
    if device.type != "cpu" or nbytes == 0:
        return torch.UntypedStorage(nbytes, device=device)
    return torch.frombuffer(_map(nbytes), dtype=torch.uint8).untyped_storage()


def _map(nbytes: int) -> mmap.mmap:
    """Private pages, large ones if the system has them.

    A disk then gets a few long pieces instead of hundreds: one disk read 2 GB/s into pages of 4 KiB
    and 5 GB/s into large pages (``benchmarks/disk.py``).
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _LARGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of zeros whose memory returns to the system when dropped."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    storage = allocate(numel * dtype.itemsize, device)  # fresh pages of mmap are zero
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))
