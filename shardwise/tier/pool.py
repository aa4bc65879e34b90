"""Pools of buffers, which are reused by size and never grow silently.

Memory of the host comes from mmap: it is page-aligned, as direct I/O requires, and freeing it
returns it to the system.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.device import memory, streams
from shardwise.device.abilities import has_streams, separate_memory
from shardwise.tier.budget import Budget

PAGE_BYTES = memory.PAGE_BYTES
_Idle = tuple[torch.UntypedStorage, streams.Mark]
"""Idle memory, and the last work that used it."""


class Pool:
    """Lends memory by size and takes it back; thread-safe.

    ``held_bytes`` is what the pool owns, lent or idle. The runtime decides how many buffers of a
    size are lent at once (prefetch, gradients in flight), and the memory model predicts it.

    Memory of a device is allocated on the stream on which the pool was made, whoever asks: torch's
    allocator can then reuse what is freed on that stream, which is the one of compute. With
    ``beside`` the memory is the host's, pinned for copies to and from that device.
    """

    def __init__(
        self,
        device: torch.device,
        budget: Budget | None = None,
        *,
        beside: torch.device | None = None,
    ) -> None:
        self._device, self.beside = device, beside or device
        self._is_hosts, self._has_streams = not separate_memory(device), has_streams(self.beside)
        self._budget = budget if budget is not None else Budget("device")
        self._lock = threading.Lock()
        self._idle: dict[int, list[_Idle]] = defaultdict(list)
        self._home = streams.current_stream(device) if has_streams(device) else None
        self.held_bytes = 0
        self.peak_bytes = 0
        self._budget.before_refusing(self.trim)

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Memory with arbitrary contents, for what the caller enqueues next, or for its host."""
        storage, used = self.take_early(nbytes)
        if used is not None:
            if self._is_hosts:
                streams.block_host_until(used)  # the next user may be a thread or a disk
            else:
                streams.order_after(used)
        return storage

    def take_early(self, nbytes: int) -> tuple[torch.UntypedStorage, streams.Mark]:
        """As ``take``, but memory that work on a device may use until the mark."""
        with self._lock:
            # Beside streams the oldest, whose last work is most likely over; else the latest, which
            # is most likely in the cache.
            which = 0 if self._has_streams else -1
            idle = self._idle[nbytes].pop(which) if self._idle[nbytes] else None
        if idle is not None:
            return idle
        claimed = self._size(nbytes)
        self._budget.claim(claimed, "A buffer")
        with self._lock:
            self.held_bytes += claimed
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return self._allocate(nbytes), None

    def give(self, storage: torch.UntypedStorage, *, last_use: streams.Mark = None) -> None:
        """Take memory back. ``last_use`` is the end of the work that uses it; by default that is
        what the current stream has so far."""
        if last_use is None and self._home is not None and self._is_home():
            # Torch's allocator reuses it in the order of that stream, for anything.
            with self._lock:
                self.held_bytes -= self._size(storage.nbytes())
            self._budget.release(self._size(storage.nbytes()))
            return
        used = last_use
        if used is None and self._has_streams:
            used = streams.mark(self.beside)
        with self._lock:
            self._idle[storage.nbytes()].append((storage, used))

    def trim(self) -> None:
        """Return idle memory to the system, after the work that still uses it."""
        with self._lock:
            idle = [each for found in self._idle.values() for each in found]
            self._idle.clear()
            freed = sum(self._size(storage.nbytes()) for storage, _ in idle)
            self.held_bytes -= freed
        for used in [used for _, used in idle]:
            if self._home is None:
                streams.block_host_until(used)
            elif used is not None:  # whoever gets it next on this stream comes after
                self._home.wait_event(used)
        del idle
        self._budget.release(freed)

    def _is_home(self) -> bool:
        now = streams.current_stream(self._device)
        return self._home is not None and now.stream_id == self._home.stream_id

    def _size(self, nbytes: int) -> int:
        """What a buffer takes of the budget."""
        return memory.pinned_bytes(nbytes, self.beside) if self._is_hosts else nbytes

    def _allocate(self, nbytes: int) -> torch.UntypedStorage:
        if self._home is None:
            return memory.pinned_memory(nbytes, self.beside)
        with self.at_home():
            return torch.UntypedStorage(nbytes, device=self._device)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Inside, torch allocates on the stream of compute, so that compute can use the memory as
        soon as it is freed. What the caller enqueues afterwards may use it."""
        if self._home is None:
            yield
            return
        with streams.on_stream(self._home):
            yield
            free = streams.mark(self._device)
        # The home stream may be behind in work on what it freed: this memory may be of that.
        streams.order_after(free)


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of zeros whose memory returns to the system when dropped."""
    if separate_memory(device):
        return torch.zeros(numel, dtype=dtype, device=device)
    storage = memory.host_memory(numel * dtype.itemsize)  # fresh pages of mmap are zero
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))
