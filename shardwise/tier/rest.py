"""Where a part of a state is between its uses: in memory, or on a disk from which it is lent.

A part that is *resident* is one tensor for ever. A *stored* one has no memory of its own: ``use``
and ``lend`` bring its contents into a buffer of a pool, and write them back where they changed.
The optimizer borrows slices (``lend``), everybody else the whole.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise.core.ticket import DONE, Ticket
from shardwise.plans.memory import WRITES_IN_FLIGHT_BYTES
from shardwise.tier.budget import Budget
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import Pool, zeros
from shardwise.tier.store import Store, TierError


class Loan(Protocol):
    """Some elements of a part in memory, for a while."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor, once its contents are there."""

    def give_back(self, *, changed: bool) -> None:
        """Ends the loan; what changed is written back beside whatever comes next."""


class Rest(Protocol):
    """One part of one state."""

    is_resident: bool
    numel: int
    dtype: torch.dtype

    def prefetch(self) -> None:
        """Begins to bring the whole part into memory, for the next ``use``."""

    def discard(self) -> None:
        """Drops what was prefetched: it is stale, or nobody came for it."""

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        """Elements for reading and writing; without ``reads`` what they hold is arbitrary."""

    @contextmanager
    def use(self, *, reads: bool = True, writes: bool = False) -> Iterator[torch.Tensor]:
        """The whole part; an error inside leaves a stored one as it was."""

    def free(self) -> None:
        """Ends it, and gives its place back."""


class Resident:
    """A part that is always in memory."""

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
    """A loan of what is in memory anyway."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor

    def give_back(self, *, changed: bool) -> None:
        pass


class Stored:
    """A part that rests in a store."""

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
            ahead.wait()
            ahead.give_back(changed=False)

    def _take_ahead(self) -> Loan | None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
        return ahead

    def read_into(self, out: torch.Tensor) -> Ticket:
        """Begins to read the whole part into memory of the caller's."""
        return self._disk.store.get(self._record, out)

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        return _Buffered(self, start, stop, reads)

    @contextmanager
    def use(self, *, reads: bool = True, writes: bool = False) -> Iterator[torch.Tensor]:
        loan = self._take_ahead() or self.lend(0, self.numel, reads=reads)
        changed = False
        try:
            yield loan.wait()
            changed = writes
        finally:
            loan.give_back(changed=changed)

    def free(self) -> None:
        self.discard()
        self._disk.writes.drain()
        self._disk.store.free(self._record)


class _Buffered:
    """A loan from a store: a buffer of the pool's."""

    def __init__(self, rest: Stored, start: int, stop: int, reads: bool) -> None:
        self._rest, self._start = rest, start * rest.dtype.itemsize
        self._storage = rest._disk.pool.take((stop - start) * rest.dtype.itemsize)
        self.tensor = tensor_on(self._storage, stop - start, rest.dtype)
        self._ticket = DONE
        if reads:
            self._ticket = rest._disk.store.get(rest._record, self.tensor, self._start)

    def wait(self) -> torch.Tensor:
        self._ticket.wait()
        return self.tensor

    def give_back(self, *, changed: bool) -> None:
        disk = self._rest._disk
        if not changed:
            disk.pool.give(self._storage)
            return
        ticket = disk.store.put(self._rest._record, self.tensor, self._start)
        disk.writes.add(ticket, self._storage, disk.pool)


class PartOf:
    """Some elements of another part: the master of a flat whose P has the master's dtype."""

    def __init__(self, whole: Rest, place: slice) -> None:
        self._whole, self._place = whole, place
        self.numel, self.dtype = place.stop - place.start, whole.dtype
        self.is_resident = whole.is_resident
        if isinstance(whole, Resident):
            self.tensor = whole.tensor[place]

    def prefetch(self) -> None:
        pass  # the other part is prefetched for itself

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
    """A part where hops can take it: itself, or a copy that comes back at the end."""
    if part.device.type == device.type:
        yield part
        return
    copy = part.to(device)
    yield copy
    part.copy_(copy)


class Writes:
    """Writes that are under way, and the memory that they hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[Ticket, torch.UntypedStorage, Pool]] = deque()
        self._nbytes = 0
        self._error: TierError | None = None

    def add(self, ticket: Ticket, storage: torch.UntypedStorage, pool: Pool) -> None:
        """Takes over a write; waits for the oldest ones where there are too many."""
        with self._lock:
            self._queue.append((ticket, storage, pool))
            self._nbytes += storage.nbytes()
        while self._nbytes > WRITES_IN_FLIGHT_BYTES and len(self._queue) > 1:
            self._finish_oldest()

    def drain(self) -> None:
        while self._queue:
            self._finish_oldest()

    def check(self) -> None:
        """Raises what a write failed with; the values are still there, see ``tier/nvme.py``."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish_oldest(self) -> None:
        with self._lock:
            if not self._queue:
                return  # another lane was faster
            ticket, storage, pool = self._queue.popleft()
            self._nbytes -= storage.nbytes()
        try:
            ticket.wait()
        except TierError as error:
            # Not here: a lane that raises leaves the other ranks waiting for its transfers.
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
    """Where the states of one model rest on this rank."""

    device: torch.device
    budgets: dict[str, Budget]
    disk: Disk | None = None

    def rest(self, tier: str, numel: int, dtype: torch.dtype, label: str) -> Rest:
        """A new part, zero at first, on a tier."""
        if tier == "nvme":
            assert self.disk is not None
            return Stored(self.disk, numel, dtype, label)
        self.budgets[tier].claim(numel * dtype.itemsize, f"The {label}")
        device = torch.device("cpu") if tier == "cpu" else self.device
        tensor = zeros(numel, dtype, device)
        if tier == "cpu" and self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return Resident(tensor)

    def settle(self) -> None:
        """Waits for writes; raises what one of them failed with."""
        if self.disk is not None:
            self.disk.writes.drain()
            self.disk.writes.check()

    def trim(self) -> None:
        """Returns idle buffers to the system."""
        if self.disk is not None:
            self.disk.pool.trim()

    def check(self) -> None:
        if self.disk is not None:
            self.disk.writes.check()

    def close(self) -> None:
        if self.disk is not None:
            self.disk.writes.drain()
            self.disk.store.close()
