"""A place where tensors rest between uses: one record a tensor, moved without waiting."""

from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.core.errors import ShardwiseError
from shardwise.core.ticket import Ticket


class TierError(ShardwiseError, OSError):
    """A tier that cannot hold, take or give what it should."""


@dataclass(frozen=True, slots=True)
class Record:
    """Room for one tensor's bytes in a store."""

    label: str
    """What it holds, for messages: ``master of unit 'h.0'``."""
    nbytes: int
    offset: int
    """Where it begins in the store's file; a multiple of a page."""


class Store(Protocol):
    """Keeps the bytes of records. Tensors are contiguous and on CPU; offsets are in bytes.

    Moves are fast where memory and ``start`` begin on a page and whole pages are moved (the memory
    behind a tensor's end must then reach to the end of its last page, as a Pool's does); anything
    else is moved all the same, through a buffer. Moves of one record are done in the order in
    which they were asked for as far as they overlap. Records that were never written read as zero.
    """

    @property
    def held_bytes(self) -> int:
        """Bytes of all records."""

    def reserve(self, nbytes: int, label: str) -> Record:
        """Room for a tensor; raises a TierError where there is none."""

    def scratch(self, nbytes: int) -> torch.UntypedStorage:
        """Memory on CPU that no record has: a store on disk lets the system move it there."""

    def put(self, record: Record, source: torch.Tensor, start: int = 0) -> Ticket:
        """Begins to write; ``source`` may change after the ticket."""

    def get(self, record: Record, out: torch.Tensor, start: int = 0) -> Ticket:
        """Begins to read into ``out``, which is valid after the ticket."""

    def free(self, record: Record) -> None:
        """Gives the room back; a later record may get it."""

    def close(self) -> None:
        """Waits for what was asked for, and removes everything."""
