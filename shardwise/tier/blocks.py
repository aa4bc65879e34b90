"""Blocks of moves: bytes between a tensor and a file, in whole units.

A *unit* here is a page, or the range of one checksum. Only whole units are read and written. If a
tensor begins or ends inside a unit, or its memory is not page-aligned like the file, bytes go
through scratch memory; before a write the rest of such a unit is read. Memory outside the tensor is
never touched.
"""

import ctypes
import errno
import threading
from dataclasses import dataclass, field

from shardwise.core.checksum import crc32
from shardwise.tier.aio import Move, Scratch, read_into, view_memory, write_from
from shardwise.tier.pool import PAGE_BYTES
from shardwise.tier.ranges import Contents, Piece, Where, round_down, round_up
from shardwise.tier.store import Record, TierError

CHECKED_BYTES = 256 << 10
"""Bytes per checksum. A move of some of them reads the rest as well, so that everything that is
read is checked; that costs at most two such blocks per move."""
_HELD = "; its values are kept in memory, where reads find them"


@dataclass(slots=True, eq=False)
class Entry:
    """A record and its state."""

    record: Record
    room: int
    """Bytes in the file, in whole units."""
    contents: Contents = field(default_factory=Contents)
    sums: dict[int, int] = field(default_factory=dict)
    """Checksums of the units on disk, by their start."""
    active: list[Move] = field(default_factory=list)
    """Moves that are not done."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a move, in bytes of the record: the tensor's range, and the range touched."""

    begin: int
    end: int
    outer: int
    """Where the first unit begins; offsets in scratch memory are relative to it."""
    outer_end: int
    inner: int
    """Units from here to ``inner_end`` are moved directly between tensor and file."""
    inner_end: int

    @property
    def bounced(self) -> list[tuple[int, int]]:
        """The ranges that go through scratch memory, in whole units."""
        return [(self.outer, self.inner), (self.inner_end, self.outer_end)]


class BlockFile:
    """Moves blocks of records from and to an open file; thread-safe."""

    def __init__(
        self, file: int, *, block_bytes: int, direct: bool, checksum: bool, name: str
    ) -> None:
        self._file, self._block_bytes, self._direct = file, block_bytes, direct
        self._checksum, self._name = checksum, name
        self.unit = CHECKED_BYTES if checksum else PAGE_BYTES
        self._lock = threading.Lock()  # protects entries

    def plan(self, move: Move) -> None:
        """Cut a move into blocks."""
        move.span = (round_down(move.begin, self.unit), round_up(move.end, self.unit))
        size = self._block_bytes
        cuts = range(round_down(move.begin, size), move.end, size)
        move.blocks = [(max(move.begin, cut), min(move.end, cut + size)) for cut in cuts]
        move.num_left = len(move.blocks)

    def _shape(self, move: Move, begin: int, end: int) -> _Block:
        outer, outer_end = round_down(begin, self.unit), round_up(end, self.unit)
        inner, inner_end = round_up(begin, self.unit), round_down(end, self.unit)
        aligned = not self._direct or (move.address - move.begin) % PAGE_BYTES == 0
        if not aligned or inner >= inner_end:
            inner = inner_end = outer
        return _Block(begin, end, outer, outer_end, inner, inner_end)

    def read(self, entry: Entry, move: Move, begin: int, end: int, scratch: Scratch) -> None:
        """Read one block of a move."""
        block = self._shape(move, begin, end)
        with self._lock:
            pieces = entry.contents.between(block.outer, block.outer_end)
        try:
            if [piece.where for piece in pieces] == [Where.DISK]:
                buffers = _buffers(move, block, scratch)
                read_into(self._file, buffers, entry.record.offset + block.outer)
                self._check(entry, buffers, block.outer)
                bounced = block.bounced
            else:
                self._gather(entry, block.outer, block.outer_end, block.outer, scratch)
                bounced = [(block.outer, block.outer_end)]
        except OSError as error:
            raise self._failure(entry, "Reading", block, error) from error
        for first, last, address in _tensor_parts(move, block, bounced):
            ctypes.memmove(address, scratch.address + first - block.outer, last - first)

    def write(self, entry: Entry, move: Move, begin: int, end: int, scratch: Scratch) -> None:
        """Write one block of a move; on failure its bytes are kept in memory."""
        block = self._shape(move, begin, end)
        try:
            self._complete(entry, block, scratch)
        except OSError as error:
            own = view_memory(move.address + begin - move.begin, end - begin)
            self._hold(entry, begin, end, bytes(own))
            raise self._failure(entry, "Writing", block, error) from error
        for first, last, address in _tensor_parts(move, block, block.bounced):
            ctypes.memmove(scratch.address + first - block.outer, address, last - first)
        buffers = _buffers(move, block, scratch)
        sums = self._sums(buffers, block.outer)
        try:
            write_from(self._file, buffers, entry.record.offset + block.outer)
        except OSError as error:
            # Units may be partly written: all their bytes are kept.
            self._hold(entry, block.outer, block.outer_end, b"".join(buffers))
            raise self._failure(entry, "Writing", block, error) from error
        with self._lock:
            entry.contents.set(Piece(block.outer, block.outer_end, Where.DISK))
            entry.sums.update(sums)

    def _complete(self, entry: Entry, block: _Block, scratch: Scratch) -> None:
        """Read into scratch memory the bytes of a block's units that are not the tensor's."""
        at_end = block.end == entry.record.nbytes  # no bytes follow
        partial = {block.outer} if block.begin > block.outer else set()
        if block.end < block.outer_end and not at_end:
            partial.add(block.outer_end - self.unit)
        for unit in partial:
            self._gather(entry, unit, unit + self.unit, block.outer, scratch)
        if at_end:
            padding = block.outer_end - block.end
            ctypes.memset(scratch.address + block.end - block.outer, 0, padding)

    def _gather(self, entry: Entry, begin: int, end: int, origin: int, scratch: Scratch) -> None:
        """Copy units into scratch memory, wherever their bytes are."""
        with self._lock:
            pieces = entry.contents.between(begin, end)
        for piece in pieces:
            if piece.where is Where.DISK:
                first, last = round_down(piece.begin, self.unit), round_up(piece.end, self.unit)
                buffer = scratch.view[first - origin : last - origin]
                read_into(self._file, [buffer], entry.record.offset + first)
                self._check(entry, [buffer], first)
        for piece in pieces:  # overwrites what was read around the others
            address, nbytes = scratch.address + piece.begin - origin, piece.end - piece.begin
            if piece.where is Where.NOWHERE:
                ctypes.memset(address, 0, nbytes)
            elif piece.held is not None:
                scratch.view[piece.begin - origin : piece.end - origin] = piece.held

    def _hold(self, entry: Entry, begin: int, end: int, held: bytes) -> None:
        with self._lock:
            entry.contents.set(Piece(begin, end, Where.MEMORY, memoryview(held)))

    def _sums(self, buffers: list[memoryview], begin: int) -> dict[int, int]:
        """The checksum of each unit in buffers of whole units."""
        sums: dict[int, int] = {}
        if self._checksum:
            for buffer in buffers:
                for at in range(0, len(buffer), self.unit):
                    sums[begin + at] = crc32(buffer[at : at + self.unit])
                begin += len(buffer)
        return sums

    def _check(self, entry: Entry, buffers: list[memoryview], begin: int) -> None:
        for at, found in self._sums(buffers, begin).items():
            if entry.sums[at] != found:
                raise OSError(
                    f"by their checksum, bytes {at} to {at + self.unit} differ from what was "
                    "written"
                )

    def _failure(self, entry: Entry, verb: str, block: _Block, cause: OSError) -> TierError:
        code = errno.errorcode.get(cause.errno or 0)  # our own OSErrors have no number
        name = f" ({code})" if code else ""
        way, remark = ("to", _HELD) if verb == "Writing" else ("from", "")
        error = TierError(
            f"{verb} {entry.record.label} (bytes {block.begin} to {block.end}) {way} {self._name} "
            f"failed: {cause.strerror or cause}{name}{remark}; check the disk's space and health."
        )
        error.errno = cause.errno
        return error


def _buffers(move: Move, block: _Block, scratch: Scratch) -> list[memoryview]:
    """The memory of a block in order: scratch, the tensor itself, scratch."""
    head = scratch.view[: block.inner - block.outer]
    tail = scratch.view[block.inner_end - block.outer : block.outer_end - block.outer]
    own = view_memory(move.address + block.inner - move.begin, block.inner_end - block.inner)
    return [head, own, tail] if len(own) else [head, tail]


def _tensor_parts(
    move: Move, block: _Block, ranges: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """The tensor's bytes in some ranges: begin, end, and the address in memory."""
    parts = []
    for begin, end in ranges:
        begin, end = max(begin, block.begin), min(end, block.end)
        if begin < end:
            parts.append((begin, end, move.address + begin - move.begin))
    return parts
