"""Checksums of blocks of a chunk's data: CRC-32, as in zip files, so that blocks add up to the
CRC that the zip needs.

A reader that wants a part of a chunk reads and checks whole blocks only. Imports no torch.
"""

import zlib
from functools import cache

_SMALLEST, _LARGEST = 1 << 12, 1 << 20
_BLOCKS = 128
_POLYNOMIAL = 0xEDB88320


def block_bytes(nbytes: int) -> int:
    """The size of the blocks of a chunk: about a hundredth of it.

    >>> block_bytes(10), block_bytes(1 << 20), block_bytes(1 << 28)
    (4096, 8192, 1048576)
    """
    size = _SMALLEST
    while size * _BLOCKS < nbytes and size < _LARGEST:
        size *= 2
    return size


def num_blocks(nbytes: int) -> int:
    return -(-nbytes // block_bytes(nbytes))


def combined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes, one after the other, from those of each.

    >>> combined(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    for power, matrix in enumerate(_powers() if first else ()):
        if second_bytes >> power & 1:
            first = _times(matrix, first)
    return first ^ second


def _times(matrix: tuple[int, ...], vector: int) -> int:
    found = 0
    for column in matrix:
        if vector & 1:
            found ^= column
        vector >>= 1
    return found


@cache
def _powers() -> list[tuple[int, ...]]:
    """What appending 1, 2, 4, ... zero bytes does to a CRC, as matrices over two elements."""
    matrix = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    found = []
    for bits in range(43):
        if bits >= 3:
            found.append(matrix)
        matrix = tuple(_times(matrix, column) for column in matrix)
    return found


class Blocks:
    """The checksums of a chunk whose data comes in pieces of any size."""

    def __init__(self, nbytes: int) -> None:
        self._size, self._crc = block_bytes(nbytes), 0
        self.found: list[int] = []
        self.whole = 0
        """The CRC-32 of all data."""
        self._left = self._size

    def feed(self, data: memoryview) -> None:
        while data:
            part = data[: self._left]
            self._crc = zlib.crc32(part, self._crc)
            self._left -= len(part)
            data = data[len(part) :]
            if not self._left:
                self._close()

    def end(self) -> None:
        if self._left < self._size:
            self._close()

    def _close(self) -> None:
        self.whole = combined(self.whole, self._crc, self._size - self._left)
        self.found.append(self._crc)
        self._crc, self._left = 0, self._size
