"""Shards that rest on another tier, on the device for a while: copies that nobody waits for.

The copies run between buffers of pools, so that the plan's budgets hold, and beside compute. Where
the device's memory is the host's, a loan is used as it is.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.core.ticket import Ticket
from shardwise.core.topology import Interval
from shardwise.device.abilities import separate_memory
from shardwise.device.streams import Copies, Mark, block_host_until, mark, order_after
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import Pool
from shardwise.tier.rest import Loan, Rest


class Staging:
    """Brings loans to one device, and back."""

    def __init__(self, device: torch.device, on_device: Pool, on_host: Pool) -> None:
        self.device, self.on_device, self.on_host = device, on_device, on_host
        self.copies = Copies(device)

    def bring(self, loan: Loan, *, reads: bool = True) -> "Brought":
        """A loan's values on the device; without ``reads`` they are arbitrary there."""
        return Brought(self, loan, reads=reads)

    def bring_into(self, target: torch.Tensor, rest: Rest) -> Ticket:
        """Starts to bring a whole shard into memory on the device."""
        return _Arriving(rest, target, self.copies)

    def windows(
        self, rest: Rest, size: int, *, reads: bool
    ) -> Iterator[tuple[Interval, "Brought"]]:
        """A whole shard, a window after the other; beside a device each is read from a disk while
        the one before it is used."""
        most = int(reads and separate_memory(self.device))
        coming: deque[tuple[Interval, Loan]] = deque()
        starts = deque(range(0, rest.numel, size))
        while starts or coming:
            while starts and len(coming) <= most:
                place = Interval(starts[0], min(starts.popleft() + size, rest.numel))
                coming.append((place, rest.lend(place.start, place.stop, reads=reads)))
            place, loan = coming.popleft()
            yield place, self.bring(loan, reads=reads)

    @contextmanager
    def use(
        self, rest: Rest, *, reads: bool = True, writes: bool = False
    ) -> Iterator[torch.Tensor]:
        """A whole shard on the device; after an error inside, a stored shard is unchanged."""
        brought, changed = self.bring(rest.whole(reads=reads), reads=reads), False
        try:
            yield brought.tensor
            changed = writes
        finally:
            brought.end(changed=changed)

    def fetch(self, loan: Loan) -> "Fetched":
        """Starts to copy a loan on the device to the host, which reads it."""
        return Fetched(self, loan)

    def send(self, source: torch.Tensor, target: Loan) -> None:
        """Starts to copy values of the host to a loan on the device, or of the device to one of the
        host, in the loan's dtype, and ends it. ``source`` may change at once; what is enqueued next
        comes after the copy."""
        pool = self.on_device if separate_memory(source.device) else self.on_host
        rounded = pool.take(target.tensor.nbytes)
        buffer = tensor_on(rounded, target.tensor.numel(), target.tensor.dtype).copy_(source)
        over = self.copies.copy(buffer, target.for_stream())
        order_after(over)
        target.give_back(changed=True, last_use=over)
        pool.give(rounded, last_use=over)


class Brought:
    """A loan on the device."""

    def __init__(self, staging: Staging, loan: Loan, *, reads: bool) -> None:
        self._staging, self._loan = staging, loan
        self._storage: torch.UntypedStorage | None = None
        if loan.tensor.device == staging.device:
            self.tensor = loan.arrived()
            return
        self._storage = staging.on_device.take(loan.tensor.nbytes)
        self.tensor = tensor_on(self._storage, loan.tensor.numel(), loan.tensor.dtype)
        if reads:
            self.tensor.copy_(loan.for_stream(), non_blocking=True)

    def end(self, *, changed: bool) -> None:
        """Ends the loan; changed values go back beside whatever is enqueued next."""
        if self._storage is None:
            self._loan.give_back(changed=changed)
            return
        if changed:
            over = self._staging.copies.copy(self.tensor, self._loan.for_stream())
        else:
            over = mark(self._staging.device)
        self._loan.give_back(changed=changed, last_use=over)
        self._staging.on_device.give(self._storage, last_use=over)


class _Arriving:
    """A whole shard on its way to memory of the device, beside compute.

    From a disk it is only read until somebody needs it: to enqueue the copy earlier, the host would
    have to wait for the disk.
    """

    def __init__(self, rest: Rest, target: torch.Tensor, copies: Copies) -> None:
        self._rest, self._target, self._copies = rest, target, copies
        self._over: Mark = None
        self._begun = False
        rest.prefetch()
        if rest.is_resident:
            self._copy()

    def order_stream(self) -> None:
        self._copy()
        order_after(self._over)

    def block_host(self) -> None:
        self._copy()
        block_host_until(self._over)

    def _copy(self) -> None:
        if not self._begun:
            self._begun, loan = True, self._rest.whole()
            self._over = self._copies.copy(loan.for_stream(), self._target)
            loan.give_back(changed=False, last_use=self._over)


class Fetched:
    """A loan of memory on the device, for the host to read."""

    def __init__(self, staging: Staging, loan: Loan) -> None:
        self._staging, self._loan = staging, loan
        self._storage, used = staging.on_host.take_early(loan.tensor.nbytes)
        self.tensor = tensor_on(self._storage, loan.tensor.numel(), loan.tensor.dtype)
        order_after(used)
        self._copied = staging.copies.copy(loan.tensor, self.tensor)

    def arrived(self) -> torch.Tensor:
        block_host_until(self._copied)
        return self.tensor

    def for_stream(self) -> torch.Tensor:
        order_after(self._copied)
        return self.tensor

    def give_back(self, *, changed: bool, last_use: Mark = None) -> None:
        assert not changed
        self._loan.give_back(changed=False, last_use=self._copied)
        self._staging.on_host.give(self._storage, last_use=last_use or self._copied)
