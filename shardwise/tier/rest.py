"""Where this rank's shard of a state rests between uses: in memory or on a disk.

A *resident* shard is one permanent tensor. A *stored* shard has no memory of its own: ``use`` and
``lend`` read it into a buffer of a pool, and write it back if it changed. The optimizer borrows
slices (``lend``); everything else uses the whole shard.

[Note: Loans beside a device]
Memory of the host that a shard rests in, or is read into, is used by two: by the host itself (the
optimizer, a disk) and by copies to and from the device, which run on streams. Whoever takes a loan
says which it is: ``arrived`` returns when the host may use the tensor, ``for_stream`` when the
caller may enqueue work on it. A loan that was used on a stream ends with a mark, for which the next
user on the host waits, and a disk by itself.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise.core.meter import THREAD, count_moved, counting
from shardwise.core.ticket import DONE, Ticket
from shardwise.device import memory
from shardwise.device.abilities import separate_memory
from shardwise.device.streams import Mark, block_host_until, has_passed, mark, order_after
from shardwise.plans.staged import WRITES_IN_FLIGHT_BYTES
from shardwise.tier.budget import Budget
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import Pool, zeros
from shardwise.tier.store import Store, TierError


class Loan(Protocol):
    """Some elements of a shard, in memory for a while; see [Note: Loans beside a device]."""

    tensor: torch.Tensor

    def arrived(self) -> torch.Tensor:
        """The tensor, for the host: blocks it while a disk reads, or a copy still runs."""

    def for_stream(self) -> torch.Tensor:
        """The tensor, for what the caller enqueues: blocks the host only while a disk reads."""

    def give_back(self, *, changed: bool, last_use: Mark = None) -> None:
        """End the loan; changes are written back in the background. If it was used on a stream,
        ``last_use`` is the end of that, by default what the current stream has so far."""


class Rest(Protocol):
    """This rank's shard of one state."""

    is_resident: bool
    numel: int
    dtype: torch.dtype

    def prefetch(self) -> None:
        """Start to read the whole shard into memory, for the next ``whole`` or ``use``."""

    def discard(self) -> None:
        """Drop what was prefetched, because it is stale or was not used."""

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        """Lend elements for reading and writing; without ``reads`` their contents are arbitrary."""

    def whole(self, *, reads: bool = True) -> Loan:
        """Lend the whole shard, which may have been prefetched."""

    def free(self) -> None:
        """Free its memory and space."""


@contextmanager
def use(rest: Rest, *, reads: bool = True, writes: bool = False) -> Iterator[torch.Tensor]:
    """The whole shard, for the host; after an error inside, a stored shard is unchanged."""
    loan, changed = rest.whole(reads=reads), False
    try:
        yield loan.arrived()
        changed = writes
    finally:
        loan.give_back(changed=changed)


class Resident:
    """A shard that is always in memory. ``beside`` is the device if that memory is its host's."""

    is_resident = True

    def __init__(
        self,
        tensor: torch.Tensor,
        beside: torch.device | None = None,
        on_free: Callable[[], None] | None = None,
    ) -> None:
        self.tensor, self.numel, self.dtype = tensor, tensor.numel(), tensor.dtype
        self.beside, self._on_free = beside, on_free
        self._uses: list[Mark] = []
        """The ends of uses on streams that may not be over."""

    def prefetch(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def used(self, until: Mark) -> None:
        """A stream uses it until then."""
        self._uses = [use for use in self._uses if not has_passed(use)]
        self._uses.append(until)

    def block_host_until_unused(self) -> None:
        while self._uses:
            block_host_until(self._uses.pop())

    def order_after_uses(self) -> None:
        for use in self._uses:
            order_after(use)

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        return _View(self, self.tensor[start:stop])

    def whole(self, *, reads: bool = True) -> Loan:
        return _View(self, self.tensor)

    def free(self) -> None:
        if self._on_free is not None:
            self._on_free()


class _View:
    """A loan from a resident shard."""

    def __init__(self, rest: Resident, tensor: torch.Tensor) -> None:
        self._rest, self.tensor = rest, tensor
        self._streamed = False

    def arrived(self) -> torch.Tensor:
        self._rest.block_host_until_unused()
        return self.tensor

    def for_stream(self) -> torch.Tensor:
        self._streamed = self._rest.beside is not None
        self._rest.order_after_uses()
        return self.tensor

    def give_back(self, *, changed: bool, last_use: Mark = None) -> None:
        if self._streamed:
            assert self._rest.beside is not None
            self._rest.used(last_use or mark(self._rest.beside))


class Stored:
    """A shard that rests in a store."""

    is_resident = False

    def __init__(self, disk: "Disk", numel: int, dtype: torch.dtype, label: str) -> None:
        self.numel, self.dtype = numel, dtype
        self._disk = disk
        self._record = disk.store.reserve(numel * dtype.itemsize, label)
        self._ahead: Loan | None = None
        self._uncounted_bytes = 0
        """What was read ahead for whoever takes it, in whose meter it belongs."""
        self._lock = threading.Lock()  # prefetched by one thread, used by another

    def prefetch(self) -> None:
        with self._lock:
            if self._ahead is None:
                self._ahead = self.lend(0, self.numel)

    def expect(self) -> None:
        """As ``prefetch``, before the operation begins that needs the shard."""
        with counting(None):
            self.prefetch()
        self._uncounted_bytes = self.numel * self.dtype.itemsize

    def discard(self) -> None:
        ahead, self._uncounted_bytes = self._take_ahead(), 0
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

    def whole(self, *, reads: bool = True) -> Loan:
        ahead = self._take_ahead()
        if ahead is None:
            return self.lend(0, self.numel, reads=reads)
        count_moved(THREAD.meter, self._uncounted_bytes, writes=False)
        self._uncounted_bytes = 0
        return ahead

    def free(self) -> None:
        self.discard()
        self._disk.writes.drain()
        self._disk.store.free(self._record)


class _Buffered:
    """A loan from a store, in a buffer of the pool."""

    def __init__(self, rest: Stored, start: int, stop: int, reads: bool) -> None:
        self._rest, self._start = rest, start * rest.dtype.itemsize
        disk, numel = rest._disk, stop - start
        self._storage, self._used = disk.pool.take_early(numel * rest.dtype.itemsize)
        self.tensor = tensor_on(self._storage, numel, rest.dtype)
        self._streamed = False
        self._ticket = DONE
        if reads:
            self._ticket = disk.store.get(rest._record, self.tensor, self._start, after=self._used)
            self._used = None  # whoever gets the values comes after it

    def arrived(self) -> torch.Tensor:
        self._ticket.block_host()
        block_host_until(self._used)
        return self.tensor

    def for_stream(self) -> torch.Tensor:
        self._ticket.block_host()
        order_after(self._used)
        self._streamed = True
        return self.tensor

    def give_back(self, *, changed: bool, last_use: Mark = None) -> None:
        disk = self._rest._disk
        if not changed:
            disk.pool.give(self._storage, last_use=last_use)
            return
        used = None
        if self._streamed:
            used = last_use or mark(disk.pool.beside)
        ticket = disk.store.put(self._rest._record, self.tensor, self._start, after=used)
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

    def whole(self, *, reads: bool = True) -> Loan:
        if self.numel == self._whole.numel:
            return self._whole.whole(reads=reads)  # it may have been prefetched
        return self.lend(0, self.numel, reads=reads)

    def free(self) -> None:
        pass


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
    host: Pool
    """Buffers of the host, between it and a disk or a device."""
    disk: Disk | None = None

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
        pinned = tensor_on(memory.pinned_memory(nbytes, self.device), numel, dtype)
        return Resident(pinned, self.device if separate_memory(self.device) else None)

    def unfilled(self, numel: int, dtype: torch.dtype, label: str) -> "Resident":
        """A shard on the device with arbitrary contents, whose memory ``free`` returns."""
        budget, nbytes = self.budgets["device"], numel * dtype.itemsize
        budget.claim(nbytes, f"The {label}")
        tensor = torch.empty(numel, dtype=dtype, device=self.device)
        return Resident(tensor, on_free=lambda: budget.release(nbytes))

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
