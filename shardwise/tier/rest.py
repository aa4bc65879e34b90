"""Where this rank's shard of a state rests between uses: in memory or on a disk.

A *resident* shard is one permanent tensor. A *stored* shard has no memory of its own: ``use`` and
``lend`` read it into a buffer of a pool, and write it back if it changed. The optimizer borrows
slices (``lend``); everything else uses the whole shard.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise.core.ticket import DONE, Ticket
from shardwise.device import memory
from shardwise.device.abilities import separate_memory
from shardwise.plans.memory import WRITES_IN_FLIGHT_BYTES
from shardwise.tier.budget import Budget
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import Pool, zeros
from shardwise.tier.store import Store, TierError


class Loan(Protocol):
    """Some elements of a shard, in memory for a while."""

    tensor: torch.Tensor

    def arrived(self) -> torch.Tensor:
        """The tensor, after its contents have been read: blocks the host while a disk reads."""

    def give_back(self, *, changed: bool) -> None:
        """End the loan; changes are written back in the background."""


class Rest(Protocol):
    """This rank's shard of one state."""

    is_resident: bool
    numel: int
    dtype: torch.dtype

    def prefetch(self) -> None:
        """Start to read the whole shard into memory, for the next ``use``."""

    def discard(self) -> None:
        """Drop what was prefetched, because it is stale or was not used."""

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        """Lend elements for reading and writing; without ``reads`` their contents are arbitrary."""

    @contextmanager
    def use(self, *, reads: bool = True, writes: bool = False) -> Iterator[torch.Tensor]:
        """The whole shard; after an error inside, a stored shard is unchanged."""

    def free(self) -> None:
        """Free its memory and space."""


class Resident:
    """A shard that is always in memory."""

    is_resident = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.numel, self.dtype = tensor, tensor.numel(), tensor.dtype

    def prefetch(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        return _View(self.tensor[start:stop])

    @contextmanager
    def use(self, *, reads: bool = True, writes: bool = False) -> Iterator[torch.Tensor]:
        yield self.tensor

    def free(self) -> None:
        pass


@dataclass
class _View:
    """A loan from a resident shard."""

    tensor: torch.Tensor

    def arrived(self) -> torch.Tensor:
        return self.tensor

    def give_back(self, *, changed: bool) -> None:
        pass


class Stored:
    """A shard that rests in a store."""

    is_resident = False

    def __init__(self, disk: "Disk", numel: int, dtype: torch.dtype, label: str) -> None:
        self.numel, self.dtype = numel, dtype
        self._disk = disk
        self._record = disk.store.reserve(numel * dtype.itemsize, label)
        self._ahead: Loan | None = None
        self._lock = threading.Lock()  # prefetched by one thread, used by another

    def prefetch(self) -> None:
        with self._lock:
            if self._ahead is None:
                self._ahead = self.lend(0, self.numel)

    def discard(self) -> None:
        ahead = self._take_ahead()
        if ahead is not None:
            ahead.arrived()
            ahead.give_back(changed=False)

    def _take_ahead(self) -> Loan | None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
        return ahead

    def read_into(self, out: torch.Tensor) -> Ticket:
        """Start to read the whole shard into memory of the caller."""
        return self._disk.store.get(self._record, out)

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        return _Buffered(self, start, stop, reads)

    @contextmanager
    def use(self, *, reads: bool = True, writes: bool = False) -> Iterator[torch.Tensor]:
        loan = self._take_ahead() or self.lend(0, self.numel, reads=reads)
        changed = False
        try:
            yield loan.arrived()
            changed = writes
        finally:
            loan.give_back(changed=changed)

    def free(self) -> None:
        self.discard()
        self._disk.writes.drain()
        self._disk.store.free(self._record)


class _Buffered:
    """A loan from a store, in a buffer of the pool."""

    def __init__(self, rest: Stored, start: int, stop: int, reads: bool) -> None:
        self._rest, self._start = rest, start * rest.dtype.itemsize
        self._storage = rest._disk.pool.take((stop - start) * rest.dtype.itemsize)
        self.tensor = tensor_on(self._storage, stop - start, rest.dtype)
        self._ticket = DONE
        if reads:
            self._ticket = rest._disk.store.get(rest._record, self.tensor, self._start)

    def arrived(self) -> torch.Tensor:
        self._ticket.block_host()
        return self.tensor

    def give_back(self, *, changed: bool) -> None:
        disk = self._rest._disk
        if not changed:
            disk.pool.give(self._storage)
            return
        ticket = disk.store.put(self._rest._record, self.tensor, self._start)
        disk.writes.add(ticket, self._storage, disk.pool)


class PartOf:
    """Some elements of another shard: the master of a flat whose P has the master's dtype."""

    def __init__(self, whole: Rest, place: slice) -> None:
        self._whole, self._place = whole, place
        self.numel, self.dtype = place.stop - place.start, whole.dtype
        self.is_resident = whole.is_resident
        if isinstance(whole, Resident):
            self.tensor = whole.tensor[place]

    def prefetch(self) -> None:
        pass  # the whole shard is prefetched separately

    def discard(self) -> None:
        pass

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        return self._whole.lend(self._place.start + start, self._place.start + stop, reads=reads)

    @contextmanager
    def use(self, *, reads: bool = True, writes: bool = False) -> Iterator[torch.Tensor]:
        covers = self.numel == self._whole.numel
        with self._whole.use(reads=reads or not covers, writes=writes) as whole:
            yield whole[self._place]

    def free(self) -> None:
        pass


@contextmanager
def on_device(part: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """A shard on the device, for hops: itself, or a copy that is copied back at the end."""
    if part.device.type == device.type:
        yield part
        return
    copy = part.to(device)
    yield copy
    part.copy_(copy)


class Writes:
    """Writes in flight, and the memory that they hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[Ticket, torch.UntypedStorage, Pool]] = deque()
        self._nbytes = 0
        self._error: TierError | None = None

    def add(self, ticket: Ticket, storage: torch.UntypedStorage, pool: Pool) -> None:
        """Add a write; wait for the oldest ones if there are too many."""
        with self._lock:
            self._queue.append((ticket, storage, pool))
            self._nbytes += storage.nbytes()
        while self._nbytes > WRITES_IN_FLIGHT_BYTES and len(self._queue) > 1:
            self._finish_oldest()

    def drain(self) -> None:
        while self._queue:
            self._finish_oldest()

    def check(self) -> None:
        """Raise the error of a failed write; its values are not lost, see ``tier/nvme.py``."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish_oldest(self) -> None:
        with self._lock:
            if not self._queue:
                return  # another lane has finished it
            ticket, storage, pool = self._queue.popleft()
            self._nbytes -= storage.nbytes()
        try:
            ticket.block_host()
        except TierError as error:
            # Not raised here: other ranks would wait for the transfers of a lane that fails.
            with self._lock:
                self._error = self._error or error
        pool.give(storage)


@dataclass(frozen=True)
class Disk:
    """A store, and the buffers between it and memory."""

    store: Store
    pool: Pool
    writes: Writes = field(default_factory=Writes)


@dataclass(frozen=True)
class Homes:
    """The places where the states of one model rest on this rank."""

    device: torch.device
    budgets: dict[str, Budget]
    disk: Disk | None = None
    on_host: list[Resident] = field(default_factory=list)
    """Shards that rest in the host's memory beside a device. Copies on streams read and write them,
    so that the host must wait for these before it does."""

    def rest(self, tier: str, numel: int, dtype: torch.dtype, label: str) -> Rest:
        """A new shard on a tier, initially zero."""
        if tier == "nvme":
            assert self.disk is not None
            return Stored(self.disk, numel, dtype, label)
        nbytes = numel * dtype.itemsize
        if tier == "device":
            self.budgets[tier].claim(nbytes, f"The {label}")
            return Resident(zeros(numel, dtype, self.device))
        self.budgets[tier].claim(memory.pinned_bytes(nbytes, self.device), f"The {label}")
        pinned = Resident(tensor_on(memory.pinned_memory(nbytes, self.device), numel, dtype))
        if separate_memory(self.device):
            self.on_host.append(pinned)
        return pinned

    def settle(self) -> None:
        """Wait for writes; raise the error of one that failed."""
        if self.disk is not None:
            self.disk.writes.drain()
            self.disk.writes.check()

    def trim(self) -> None:
        """Return idle buffers to the system."""
        if self.disk is not None:
            self.disk.pool.trim()

    def check(self) -> None:
        """Raise the error of a write that failed, if any."""
        if self.disk is not None:
            self.disk.writes.check()

    def close(self) -> None:
        if self.disk is not None:
            self.disk.writes.drain()
            self.disk.store.close()
