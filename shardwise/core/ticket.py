"""Handles of work that runs elsewhere: in a lane, on a disk, on a stream."""

from collections.abc import Sequence
from typing import Protocol


class Ticket(Protocol):
    """A handle of submitted work."""

    def wait(self) -> None:
        """Return after the work (CUDA: order the current stream after it); raise what it raised."""


class _Done:
    def wait(self) -> None:
        pass


class Chained:
    """A ticket for work that started more work: done when all of it is."""

    def __init__(self, first: Ticket, later: Sequence[Ticket]) -> None:
        self._first, self._later = first, later

    def wait(self) -> None:
        self._first.wait()
        for ticket in self._later:
            ticket.wait()


DONE: Ticket = _Done()
"""The ticket of work that is already done."""
