"""Ranges of bytes in a file: which are free, and where the bytes of a record are."""

import bisect
from dataclasses import dataclass
from enum import Enum


def round_down(position: int, unit: int) -> int:
    return position // unit * unit


def round_up(position: int, unit: int) -> int:
    return -(-position // unit) * unit


class FreeRanges:
    """Free space of a file: first fit, neighbours are merged.

    >>> room = FreeRanges()
    >>> room.give(0, 100)
    >>> room.take(30), room.take(30), room.take(50)
    (0, 30, None)
    >>> room.give(0, 30)
    >>> room.take(10), room.tail(100)
    (0, 40)
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int | None:
        """Allocate ``nbytes`` and return their start; None: no free range is large enough."""
        for at, (begin, end) in enumerate(self._ranges):
            if end - begin >= nbytes:
                left = [(begin + nbytes, end)] if end - begin > nbytes else []
                self._ranges[at : at + 1] = left
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        at = bisect.bisect(self._ranges, (begin, end))
        if at < len(self._ranges) and self._ranges[at][0] == end:
            end = self._ranges.pop(at)[1]
        if at > 0 and self._ranges[at - 1][1] == begin:
            at -= 1
            begin = self._ranges.pop(at)[0]
        self._ranges.insert(at, (begin, end))

    def tail(self, end: int) -> int:
        """Number of free bytes directly before ``end``, the end of the file."""
        last = self._ranges[-1] if self._ranges else (end, end)
        return last[1] - last[0] if last[1] == end else 0


class Where(Enum):
    """Where the bytes of a range are."""

    NOWHERE = "never written: they are zero"
    DISK = "in the file"
    MEMORY = "held in memory, because writing them failed"


@dataclass(frozen=True, slots=True)
class Piece:
    """A range whose bytes are all in the same place."""

    begin: int
    end: int
    where: Where
    held: memoryview | None = None
    """The bytes, if they are in memory."""

    def cut(self, begin: int, end: int) -> "Piece":
        """The part of it between two positions."""
        begin, end = max(begin, self.begin), min(end, self.end)
        held = self.held[begin - self.begin : end - self.begin] if self.held is not None else None
        return Piece(begin, end, self.where, held)


class Contents:
    """Where the bytes of a record are.

    This, not the file, knows which bytes were never written, so a record may get the space of an
    earlier one without writing zeros.

    >>> contents = Contents()
    >>> contents.set(Piece(10, 20, Where.DISK))
    >>> contents.set(Piece(20, 30, Where.DISK))
    >>> [(piece.begin, piece.end, piece.where.name) for piece in contents.between(5, 25)]
    [(5, 10, 'NOWHERE'), (10, 25, 'DISK')]
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []  # sorted, none of them NOWHERE

    def set(self, new: Piece) -> None:
        """Set where the bytes of a range are."""
        pieces = [new]
        for old in self._pieces:
            pieces += [
                old.cut(begin, end)
                for begin, end in ((old.begin, new.begin), (new.end, old.end))
                if max(begin, old.begin) < min(end, old.end)
            ]
        pieces.sort(key=lambda piece: piece.begin)
        self._pieces = []
        for piece in pieces:
            last = self._pieces[-1] if self._pieces else None
            if last and last.end == piece.begin and last.where is piece.where is Where.DISK:
                self._pieces[-1] = Piece(last.begin, piece.end, Where.DISK)
            else:
                self._pieces.append(piece)

    def between(self, begin: int, end: int) -> list[Piece]:
        """The pieces that make up a range, without gaps."""
        found, at = [], begin
        for piece in self._pieces:
            if piece.begin < end and piece.end > begin:
                part = piece.cut(begin, end)
                if at < part.begin:
                    found.append(Piece(at, part.begin, Where.NOWHERE))
                found.append(part)
                at = part.end
        if at < end:
            found.append(Piece(at, end, Where.NOWHERE))
        return found
