"""Where the bytes of units' inputs are between forward and backward: on a disk, or in host memory.

``offload.py`` says what has a home, and the issuer when its bytes move.
"""

import contextlib
import math
import time
from collections import defaultdict
from dataclasses import dataclass

import torch

from shardwise.core.meter import THREAD, count_moved
from shardwise.core.ticket import Ticket
from shardwise.device import streams
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import PAGE_BYTES, Pool
from shardwise.tier.store import Record, Store

_LATE_S = 1e-3
"""A read is late if backward has to wait longer than this for it."""


@dataclass
class Moved:
    """Counts of what happened to the inputs of units."""

    out_bytes: int = 0
    in_bytes: int = 0
    num_reads: int = 0
    late_reads: int = 0
    """Reads that backward waited for."""
    waited_s: float = 0.0
    """How long backward waited for reads, in total."""
    recomputed_by_model: int = 0
    """Calls inside the model's own checkpoints, which recompute them from inputs in memory."""


@dataclass(eq=False)
class Home:
    """Where an input's bytes are, and the transfers in flight."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    """Rounded up to whole pages."""
    buffer: torch.UntypedStorage | None = None
    """Host memory that has the values, or into which they are being read."""
    copied: streams.Mark = None
    """The end of the last copy from the device to the buffer, or back."""
    coming: torch.Tensor | None = None
    """Tier cpu: the values on their way back, which are there after ``copied``."""
    record: Record | None = None
    ticket: Ticket | None = None
    """For the last write or read."""
    reading: bool = False
    late: bool = False
    """Whether it is read back only when it is needed."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Home":
        pages = math.ceil(tensor.nbytes / PAGE_BYTES)
        return cls(tensor.shape, tensor.stride(), tensor.dtype, pages * PAGE_BYTES)

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class OnDisk:
    """Inputs in records of a store; buffers return to the pool as soon as they can."""

    def __init__(self, store: Store, pool: Pool, device: torch.device, moved: Moved) -> None:
        self._store, self._device, self._moved = store, device, moved
        self._pool, self._copies = pool, streams.Copies(device)
        self._idle: dict[int, list[Record]] = defaultdict(list)
        """Free records for reuse, by size."""

    def put(self, tensor: torch.Tensor) -> Home:
        """Copies an input to a buffer: it may change at once."""
        home = Home.of(tensor)
        home.buffer = self._pool.take(home.nbytes)
        try:
            home.copied = self._copies.copy(tensor, home.view(home.buffer))
            self._copies.keep_alive(tensor)
            home.record = self._room(home.nbytes)
        except BaseException:
            self.release(home)
            raise
        return home

    def write(self, home: Home) -> None:
        """Starts to write an input from its buffer, once the copy from the device is over."""
        assert home.buffer is not None
        assert home.record is not None
        home.ticket = self._store.put(home.record, _bytes(home.buffer), after=home.copied)
        self._moved.out_bytes += home.nbytes

    def empty(self, home: Home) -> None:
        """Returns the buffer of an input when it is written."""
        if home.ticket is not None:
            home.ticket.block_host()
        self._drop(home)

    def fetch(self, home: Home, *, late: bool) -> None:
        """Starts to read an input, unless a buffer still has it."""
        if home.buffer is not None:
            return
        assert home.record is not None
        home.buffer, home.reading, home.late = self._pool.take(home.nbytes), True, late
        home.ticket = self._store.get(home.record, _bytes(home.buffer))
        self._moved.num_reads += 1
        self._moved.in_bytes += home.nbytes

    def take(self, home: Home, *, gives_back: bool) -> torch.Tensor:
        """The values; ``gives_back``: the buffer is not needed any more."""
        assert home.buffer is not None
        if home.reading and home.ticket is not None:
            start = time.perf_counter()
            home.ticket.block_host()
            waited = time.perf_counter() - start
            self._moved.waited_s += waited
            self._moved.late_reads += home.late or waited > _LATE_S
            home.ticket, home.reading = None, False
        values = home.empty(self._device)
        home.copied = self._copies.copy(home.view(home.buffer), values)
        self._copies.keep_alive(values)
        streams.order_after(home.copied)
        if gives_back:
            self._drop(home)
        return values

    def release(self, home: Home) -> None:
        """Nobody needs an input any more: its record and memory can be reused."""
        if home.ticket is not None:
            with contextlib.suppress(Exception):  # nobody needs the result
                home.ticket.block_host()
        self._drop(home)
        if home.record is not None:
            self._idle[home.nbytes].append(home.record)
            home.record = None

    def close(self) -> None:
        for record in (record for records in self._idle.values() for record in records):
            self._store.free(record)
        self._idle.clear()

    def _room(self, nbytes: int) -> Record:
        idle = self._idle[nbytes]
        return idle.pop() if idle else self._store.reserve(nbytes, "inputs of units")

    def _drop(self, home: Home) -> None:
        buffer, home.buffer = home.buffer, None
        home.ticket, home.reading = None, False
        if buffer is not None:
            self._pool.give(buffer, last_use=home.copied)


class OnHost:
    """Inputs of a model on a device in pinned host memory."""

    def __init__(self, pool: Pool, device: torch.device, moved: Moved) -> None:
        self._device, self._moved = device, moved
        self._pool, self._copies = pool, streams.Copies(device)

    def put(self, tensor: torch.Tensor) -> Home:
        home = Home.of(tensor)
        home.buffer = self._pool.take(home.nbytes)
        home.copied = self._copies.copy(tensor, home.view(home.buffer))
        self._copies.keep_alive(tensor)
        return home

    def write(self, home: Home) -> None:
        """The copy is the write, and it has begun."""
        count_moved(THREAD.meter, home.nbytes, writes=True)
        self._moved.out_bytes += home.nbytes

    def empty(self, home: Home) -> None:
        raise AssertionError("host memory is the tier: inputs stay in their buffers")

    def fetch(self, home: Home, *, late: bool) -> None:
        """Starts to copy an input back; one stream orders this after the copy out."""
        if home.coming is None:
            assert home.buffer is not None
            home.late = late
            home.coming = home.empty(self._device)
            home.copied = self._copies.copy(home.view(home.buffer), home.coming)
            self._copies.keep_alive(home.coming)
            count_moved(THREAD.meter, home.nbytes, writes=False)
            self._moved.num_reads += 1
            self._moved.in_bytes += home.nbytes

    def take(self, home: Home, *, gives_back: bool) -> torch.Tensor:
        """The values; others that need them too get a copy, as a unit may write into its input."""
        assert home.coming is not None
        values = home.coming
        self._moved.late_reads += home.late or not streams.has_passed(home.copied)
        streams.order_after(home.copied)
        if not gives_back:
            return values.clone(memory_format=torch.preserve_format)
        home.coming = None
        return values

    def release(self, home: Home) -> None:
        if home.buffer is not None:
            self._pool.give(home.buffer, last_use=home.copied)
        home.buffer = home.coming = None

    def close(self) -> None:
        pass


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return tensor_on(storage, storage.nbytes(), torch.uint8)
