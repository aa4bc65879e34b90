"""A store on a disk: one file per rank, read and written with direct I/O.

The file has no name and vanishes with the process. Bytes that were never written read as zero.
Records begin on a *unit*: here a page, or the range of a checksum. Moves touch whole units; if a
tensor begins or ends inside one, that unit goes through a buffer, and before a write its other
bytes are read.
"""

import contextlib
import errno
import mmap
import os
import threading
import warnings
import weakref
from functools import partial
from pathlib import Path

import torch

from shardwise.core.errors import UsageError
from shardwise.core.meter import count_moved
from shardwise.core.ticket import DONE, Ticket
from shardwise.core.trace import span
from shardwise.device.abilities import separate_memory
from shardwise.device.streams import Mark
from shardwise.tier.aio import BLOCK_BYTES, Move, Movers, Scratch
from shardwise.tier.blocks import BlockFile, Entry
from shardwise.tier.budget import Budget
from shardwise.tier.folder import (
    IN_MEMORY,
    RunFolder,
    check_folder,
    file_system,
    remove_left_behind,
)
from shardwise.tier.ranges import FreeRanges, round_down, round_up
from shardwise.tier.store import Record, TierError

GROWTH_BYTES = 64 << 20
"""The file grows by at least this much, because growing takes a system call and a new note."""


class NvmeStore:
    """Keeps records in a file under ``path``; implements `shardwise.tier.store.Store`.

    A failed write loses nothing: its bytes stay in memory, where reads find them, until a later
    write of the same range succeeds. With ``checksum`` every byte is checked when it is read.
    """

    def __init__(
        self,
        path: str,
        *,
        rank: int,
        budget: Budget | None = None,
        checksum: bool = False,
        threads: int = 4,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.path = Path(path)
        check_folder(self.path)
        self._rank = rank
        self._budget = budget if budget is not None else Budget("nvme")
        self._lock = threading.Lock()
        self._entries: dict[int, Entry] = {}
        self._free = FreeRanges()
        self._file_bytes = 0
        self._refusal = ""
        """Why the store cannot be used any more; empty if it can."""
        self.held_bytes = 0
        remove_left_behind(self.path)
        self._folder = RunFolder(self.path, rank)
        try:
            self._file, self.direct = _open(self._folder, self.path)
        except BaseException:
            self._folder.remove()
            raise
        self._blocks = BlockFile(
            self._file,
            block_bytes=block_bytes,
            direct=self.direct,
            checksum=checksum,
            name=f"{path} on rank {rank}",
        )
        self._movers = Movers(threads, block_bytes, f"nvme-{rank}")
        self._finalizer = weakref.finalize(
            self, _dismantle, self._movers, self._file, self._folder, os.getpid()
        )
        _live.add(self)

    def reserve(self, nbytes: int, label: str) -> Record:
        """Reserve space for a tensor; raises a TierError if there is none."""
        self._check_open()
        room = max(self._blocks.unit, round_up(nbytes, self._blocks.unit))
        self._budget.claim(nbytes, label)
        try:
            with self._lock:
                offset = self._take(room)
                record = Record(label, nbytes, offset)
                self._entries[offset] = Entry(record, room)
                self.held_bytes += nbytes
        except BaseException:
            self._budget.release(nbytes)
            raise
        return record

    def scratch(self, nbytes: int) -> torch.UntypedStorage:
        """Memory that the system may move to the disk; its file is removed after the last use."""
        self._check_open()
        file = self._folder.open_data(0)
        try:
            os.truncate(file, nbytes)
            mapped = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
        return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()

    def put(
        self, record: Record, source: torch.Tensor, start: int = 0, *, after: Mark = None
    ) -> Ticket:
        """Start a write when the device's work before ``after`` is done; ``source`` may change
        after the ticket."""
        return self._submit(record, source, start, after, writes=True)

    def get(
        self, record: Record, out: torch.Tensor, start: int = 0, *, after: Mark = None
    ) -> Ticket:
        """Start a read into ``out`` when the device's work before ``after`` is done; ``out`` is
        valid after the ticket."""
        return self._submit(record, out, start, after, writes=False)

    def free(self, record: Record) -> None:
        """Free the record's space, after its submitted moves."""
        with self._lock:
            entry = self._find(record)
            del self._entries[record.offset]
        for move in self._movers.snapshot(entry.active):
            move.settle()
        with self._lock:
            self._free.give(record.offset, record.offset + entry.room)
            self.held_bytes -= record.nbytes
        self._budget.release(record.nbytes)

    def close(self) -> None:
        """Wait for all submitted moves, and remove everything."""
        with self._lock:
            if self._refusal:
                return
            self._refusal = "is closed"
            self._entries.clear()
            held, self.held_bytes = self.held_bytes, 0
        self._movers.end()
        self._finalizer()
        self._budget.release(held)

    def _check_open(self) -> None:
        if self._refusal:
            raise UsageError(
                f"The store of rank {self._rank} in {self.path} {self._refusal}; open a new one."
            )

    def _find(self, record: Record) -> Entry:
        self._check_open()
        entry = self._entries.get(record.offset)
        if entry is None or entry.record is not record:
            raise UsageError(
                f"{record.label} is not a record of the store in {self.path}, or was freed; "
                "reserve it first."
            )
        return entry

    # Space in the file

    def _take(self, room: int) -> int:
        offset, unit = self._free.take(room), self._blocks.unit
        if offset is None:
            least = room - self._free.tail(self._file_bytes)
            step = max(GROWTH_BYTES, round_down(self._file_bytes // 4, unit))
            if self._budget.limit_bytes is not None:
                step = min(step, round_up(self._budget.limit_bytes, unit) - self._file_bytes)
            self._grow(step if least < step <= self._free_bytes() else least)
            offset = self._free.take(room)
        assert offset is not None
        return offset

    def _grow(self, nbytes: int) -> None:
        if nbytes <= 0:
            return
        free_bytes = self._free_bytes()
        if nbytes > free_bytes:
            raise self._no_room(nbytes, free_bytes)
        try:
            _allocate(self._file, self._file_bytes, nbytes)
        except OSError as error:
            os.ftruncate(self._file, self._file_bytes)  # frees what was allocated
            raise self._no_room(nbytes, self._free_bytes()) from error
        self._free.give(self._file_bytes, self._file_bytes + nbytes)
        self._file_bytes += nbytes
        with contextlib.suppress(OSError):  # only a note for people; the disk may be full
            self._folder.note_bytes(self._file_bytes)

    def _free_bytes(self) -> int:
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def _no_room(self, nbytes: int, free_bytes: int) -> TierError:
        error = TierError(
            f"The nvme tier of rank {self._rank} needs {nbytes} more bytes in {self.path}, where "
            f"{free_bytes} are free; free space there, or set tiers.path to a larger disk."
        )
        error.errno = errno.ENOSPC
        return error

    # Moves

    def _submit(
        self, record: Record, tensor: torch.Tensor, start: int, after: Mark, *, writes: bool
    ) -> Ticket:
        entry = self._find(record)
        if separate_memory(tensor.device) or not tensor.is_contiguous():
            raise UsageError(
                f"{record.label} can only be moved from or to a contiguous tensor on CPU, not one "
                f"on {tensor.device} with strides {tuple(tensor.stride())}; copy it first."
            )
        if start < 0 or start + tensor.nbytes > record.nbytes:
            raise UsageError(
                f"{record.label} has {record.nbytes} bytes, too few for {tensor.nbytes} bytes from "
                f"{start} on."
            )
        if tensor.nbytes == 0:
            return DONE

        # A method of the store, not of its file, so that the store lives as long as its moves.
        move = Move(partial(self._move_block, entry), tensor, start, after, writes=writes)
        self._blocks.plan(move)
        self._movers.submit(move, entry.active)
        return move

    def _move_block(self, entry: Entry, move: Move, begin: int, end: int, scratch: Scratch) -> None:
        moves = self._blocks.write if move.writes else self._blocks.read
        track = threading.current_thread().name.removeprefix("shardwise-")
        with span(track, f"{'write' if move.writes else 'read'} {entry.record.label}"):
            moves(entry, move, begin, end, scratch)
        count_moved(move.meter, end - begin, writes=move.writes)

    def _leave(self) -> None:
        """In a forked child: file, folder and threads belong to the parent."""
        self._refusal = "belongs to the process that this one was forked from"
        if self._finalizer.detach() is not None:
            os.close(self._file)
            self._folder.leave()


_live: "weakref.WeakSet[NvmeStore]" = weakref.WeakSet()


def _leave_all() -> None:
    for store in list(_live):
        store._leave()


os.register_at_fork(after_in_child=_leave_all)


def _open(folder: RunFolder, path: Path) -> tuple[int, bool]:
    """The data file, and whether it uses direct I/O."""
    kind = file_system(path)
    direct = kind not in IN_MEMORY
    try:
        try:
            file = folder.open_data(os.O_DIRECT if direct else 0)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            file, direct = folder.open_data(0), False
    except OSError as error:
        raise TierError(
            f"The nvme tier cannot make a file in {path}: {error.strerror}; set tiers.path "
            "to a folder on a local disk that this user may write to."
        ) from error
    if not direct:
        warnings.warn(
            f"The nvme tier in {path} uses the page cache, which takes memory, because the "
            f"file system there ({kind or 'unknown'}) has no direct I/O; set tiers.path to a "
            "folder on a local disk.",
            RuntimeWarning,
            stacklevel=3,
        )
    return file, direct


def _allocate(file: int, begin: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(file, begin, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file, begin + nbytes)  # not supported: space is allocated on writing


def _dismantle(movers: Movers, file: int, folder: RunFolder, pid: int) -> None:
    if os.getpid() == pid:  # otherwise a forked child ends, which owns nothing
        movers.abandon()
        os.close(file)
        folder.remove()
