"""A place where tensors rest between uses: one record per tensor, moved asynchronously."""

from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.core.errors import ShardwiseError
from shardwise.core.ticket import Ticket
from shardwise.device.streams import Mark


class TierError(ShardwiseError, OSError):
    """A tier cannot allocate, write or read what it should."""


@dataclass(frozen=True, slots=True)
class Record:
    """Space for the bytes of one tensor in a store."""

    label: str
    """Its contents, for messages: ``master of unit 'h.0'``."""
    nbytes: int
    offset: int
    """Where it begins in the store's file; a multiple of the page size."""


class Store(Protocol):
    """Keeps the bytes of records. Tensors are contiguous and on CPU; offsets are in bytes.

    Moves are fast if memory and ``start`` are page-aligned and whole pages are moved (the memory
    after a tensor's end must then reach to the end of its last page, as in a Pool); other moves go
    through a buffer. Moves of one record that overlap are executed in the order of submission.
    Records that were never written read as zero.
    """

    @property
    def held_bytes(self) -> int:
        """Bytes of all records."""

    def reserve(self, nbytes: int, label: str) -> Record:
        """Reserve space for a tensor; raises a TierError if there is none."""

    def scratch(self, nbytes: int) -> torch.UntypedStorage:
        """CPU memory without a record; a store on disk lets the system move it there."""

    def put(
        self, record: Record, source: torch.Tensor, start: int = 0, *, after: Mark = None
    ) -> Ticket:
        """Start a write, for which the store itself waits until a device has filled ``source``
        (``after``); it may change after the ticket."""

    def get(
        self, record: Record, out: torch.Tensor, start: int = 0, *, after: Mark = None
    ) -> Ticket:
        """Start a read into ``out``, which a device may use until ``after``, and which is valid
        after the ticket."""

    def free(self, record: Record) -> None:
        """Free the record's space; a later record may get it."""

    def close(self) -> None:
        """Wait for all submitted moves, and remove everything."""
