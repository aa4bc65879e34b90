"""Handles of work that runs elsewhere: in a lane, on a disk, on a stream.

A ticket has two waits, which must not be confused (see [Note: Two waits] in ``device/streams.py``):
what is enqueued next may have to come after the work, or the host itself may have to.
"""

from collections.abc import Sequence
from typing import Protocol


class Ticket(Protocol):
    """A handle of submitted work. Both waits raise what the work raised."""

    def order_stream(self) -> None:
        """Order the work before whatever the caller enqueues next; on a device the host goes on.

        Work of the host itself (a disk, a thread) is only ordered by waiting for it.
        """

    def block_host(self) -> None:
        """Return after the work: the host may then read and write the memory that it used."""


class _Done:
    def order_stream(self) -> None:
        pass

    def block_host(self) -> None:
        pass


class Chained:
    """A ticket for work that started more work: done when all of it is."""

    def __init__(self, first: Ticket, later: Sequence[Ticket]) -> None:
        self._first, self._later = first, later

    def order_stream(self) -> None:
        self._first.order_stream()
        for ticket in self._later:
            ticket.order_stream()

    def block_host(self) -> None:
        self._first.block_host()
        for ticket in self._later:
            ticket.block_host()


DONE: Ticket = _Done()
"""The ticket of work that is already done."""
