"""Tensors whose memory is attached and detached.

[Note: Swapped storage]
Autograd saves views of a parameter's storage, so a parameter cannot simply get other memory in
backward: the saved views would still point to the old memory. Instead each flat keeps one storage
permanently, and pooled memory is swapped in and out underneath it; views follow. While no memory is
swapped in, the storage points to a region that reads as NaN in every float format, so a stale alias
shows NaN instead of another tensor's values, and never crashes.

``UntypedStorage._swap_data_ptr_`` is private to torch and used only here.

[Note: Resting on a device]
Addresses cannot be mapped repeatedly through torch's allocators of devices, so there a resting
storage has no bytes. Torch makes no views of such a storage, which is why they are made while it
has memory. An access through a stale alias raises where torch offers a way to say so (builds with
CUDA or ROCm), and is an illegal access for the device elsewhere; it never reads other values.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.device.abilities import separate_memory
from shardwise.device.memory import refuse_access
from shardwise.tier.pool import Pool

_TILE_BYTES = 1 << 21
_STALE = (
    "This tensor shares memory with a sharded parameter that is not gathered now; read the "
    "parameter itself, inside shardwise.full_params(model), and clone what must outlive it."
)


def tensor_on(storage: torch.UntypedStorage, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over memory that has at least its size."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, (numel,), (1,))


class SwappedBuffer:
    """A flat tensor whose memory is swapped in and out; see [Note: Swapped storage]."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, pool: Pool) -> None:
        self._pool = pool
        self._nbytes = numel * dtype.itemsize
        self._vanishes = separate_memory(device)
        """Whether it has no memory at all while it rests: see [Note: Resting on a device]."""
        self._storage: Any = _resting_storage(self._nbytes, device)  # its swap is private to torch
        self._lent: torch.UntypedStorage | None = None
        self.filled = False
        """Whether there is memory under it."""
        with self._memory():
            self.tensor = tensor_on(self._storage, numel, dtype)

    def fill(self) -> None:
        """Swap in memory, with arbitrary contents."""
        if self._lent is None:
            self._lent = self._pool.take(self._nbytes)
            self._storage._swap_data_ptr_(self._lent)
            self.filled = True

    def drop(self) -> None:
        """Swap the memory out; the tensor then reads as NaN, or raises."""
        if self._lent is not None:
            self._storage._swap_data_ptr_(self._lent)
            self._pool.give(self._lent)
            self._lent, self.filled = None, False

    def view(self, place: slice, shape: tuple[int, ...]) -> torch.Tensor:
        """A lasting view of some elements, whether or not there is memory now."""
        with self._memory():
            return self.tensor[place].view(shape)

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Inside, there is memory: torch does not make views of a storage without any."""
        comes = self._vanishes and not self.filled
        if comes:
            self.fill()
        try:
            yield
        finally:
            if comes:
                self.drop()


def _resting_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    if separate_memory(device):
        storage = torch.UntypedStorage(0, device=device)
        refuse_access(storage, _STALE)
        return storage
    return torch.frombuffer(_nan_region(nbytes), dtype=torch.uint8, count=nbytes).untyped_storage()


_regions: list[ctypes.Array[ctypes.c_char]] = []


def _nan_region(nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """A process-wide range of at least ``nbytes`` addresses that all read 0xFF.

    Whatever its length, it takes two megabytes of memory: one tile of a memory file, mapped
    repeatedly. The mappings are private, so a write through a stale alias changes only one page.
    """
    if not _regions or len(_regions[-1]) < nbytes:
        tiles = -(-nbytes // _TILE_BYTES)
        # At least double the size, so that a model with growing units does not map many regions.
        tiles = max(tiles, 2 * len(_regions[-1]) // _TILE_BYTES if _regions else 16)
        _regions.append(_map_tiles(tiles))
    return _regions[-1]


def _map_tiles(tiles: int) -> ctypes.Array[ctypes.c_char]:
    size = tiles * _TILE_BYTES
    if not hasattr(os, "memfd_create"):
        region = (ctypes.c_char * size)()
        ctypes.memset(region, 0xFF, size)
        return region
    tile = os.memfd_create("shardwise-nan")
    os.write(tile, b"\xff" * _TILE_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    words = (ctypes.c_int,) * 3
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *words, ctypes.c_long)
    fixed, protection = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
    base = libc.mmap(None, size, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for i in range(tiles):
        address = base + i * _TILE_BYTES
        got = libc.mmap(address, _TILE_BYTES, protection, mmap.MAP_PRIVATE | fixed, tile, 0)
        if got != address:
            raise MemoryError(f"mmap failed: {os.strerror(ctypes.get_errno())}")
    os.close(tile)
    return (ctypes.c_char * size).from_address(base)


def return_large_blocks() -> None:
    """Make malloc return freed blocks of a megabyte or more to the system (glibc).

    By default it keeps freed blocks of up to 32 MiB, and between the outputs and gradients of many
    tiles most of its heap was unused: 569 of 688 MB after a few steps with 16 tiles of 16 MiB.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3
"""From malloc.h."""


def trim_heap() -> None:
    """Return malloc's free memory to the system, if the C library can (glibc)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
