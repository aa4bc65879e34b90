"""Claims on work that goes on elsewhere: in a lane, on a disk, on a stream."""

from collections.abc import Sequence
from typing import Protocol


class Ticket(Protocol):
    """A claim on submitted work."""

    def wait(self) -> None:
        """Returns (on CUDA: orders the current stream) after the work; raises what it raised."""


class _Done:
    def wait(self) -> None:
        pass


class Chained:
    """A ticket for work that, while it ran, began more: over when all of it is."""

    def __init__(self, first: Ticket, later: Sequence[Ticket]) -> None:
        self._first, self._later = first, later

    def wait(self) -> None:
        self._first.wait()
        for ticket in self._later:
            ticket.wait()


DONE: Ticket = _Done()
"""The ticket of work that is already over."""
