"""Memory of devices, and pinned host memory, which copies to and from a device can use directly.

[Note: Pinned memory]
Torch's allocator of pinned memory rounds every size up to a power of two and keeps what is freed,
so a shard of 65 MiB takes 128 MiB. Where the runtime can pin existing memory (CUDA's and ROCm's
``cudaHostRegister``), pages come from mmap instead: exactly as many as needed, aligned as direct
I/O wants them, and returned to the system when dropped. Elsewhere torch's allocator is used, and
its sizes count against the budget as they are, rounded up.
"""

import mmap
from contextlib import suppress
from typing import Any

import torch

from shardwise.core.errors import UsageError
from shardwise.device.abilities import has_streams

PAGE_BYTES = mmap.PAGESIZE
_LARGE_PAGE_BYTES = 2 << 20


def free_bytes(device: torch.device) -> int:
    """Free memory of an accelerator."""
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"Device {device} does not say how much memory is free; give the plan's budgets "
            "(tiers.device_bytes) and a cluster's file instead of a probe."
        ) from error


def host_memory(nbytes: int) -> torch.UntypedStorage:
    """Fresh zeroed pages of the host, which return to the system when dropped."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(_map(nbytes), dtype=torch.uint8).untyped_storage()


def pinned_bytes(nbytes: int, device: torch.device) -> int:
    """What ``pinned_memory`` really takes; see [Note: Pinned memory]."""
    if nbytes == 0 or not has_streams(device) or _runtime(device) is not None:
        return nbytes
    return 1 << (nbytes - 1).bit_length()


def pinned_memory(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Fresh zeroed memory of the host for copies to and from a device."""
    if not has_streams(device) or nbytes == 0:
        return host_memory(nbytes)
    runtime = _runtime(device)
    if runtime is None:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
    pages = _map(nbytes, _PinnedPages)
    assert isinstance(pages, _PinnedPages)
    pages.pin(runtime, device)
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


def refuse_access(storage: torch.UntypedStorage, reason: str) -> None:
    """Makes every access to a storage's memory raise, if this build of torch can do that.

    The ban goes wherever the storage's (missing) memory is swapped to, and ends when memory that is
    not banned is swapped in.
    """
    refuse = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if refuse is not None:
        refuse(storage._cdata, reason)


def _runtime(device: torch.device) -> Any:
    """The device's runtime library, if it can pin existing memory."""
    offered = getattr(torch.get_device_module(device), "cudart", None)
    runtime = offered() if offered is not None else None
    return runtime if hasattr(runtime, "cudaHostRegister") else None


def _map(nbytes: int, kind: type[mmap.mmap] = mmap.mmap) -> mmap.mmap:
    """Private pages, large ones if the system has them.

    A disk then gets a few long pieces instead of hundreds: one disk read 2 GB/s into pages of 4 KiB
    and 5 GB/s into large pages (``benchmarks/disk.py``).
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return kind(-1, nbytes)
    mapped = kind(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _LARGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class _PinnedPages(mmap.mmap):
    """Pages that are pinned for as long as they exist."""

    _pinned: tuple[Any, torch.device, int] | None = None

    def pin(self, runtime: Any, device: torch.device) -> None:
        with torch.accelerator.device_index(device.index):
            address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            code = int(runtime.cudaHostRegister(address, len(self), 0))
        if code != 0:
            raise MemoryError(
                f"Pinning {len(self)} bytes of host memory for {device} failed (code {code}); "
                "raise the limit of locked memory (ulimit -l), or keep less on tier cpu."
            )
        self._pinned = runtime, device, address

    def __del__(self) -> None:
        if self._pinned is not None:
            runtime, device, address = self._pinned
            torch.accelerator.synchronize(device)  # no copy may still read or write the pages
            runtime.cudaHostUnregister(address)
