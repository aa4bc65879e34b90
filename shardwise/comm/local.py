"""The link between ranks of one host: each reads its peers' memory directly.

Linux copies between processes of one user with ``process_vm_readv``: one copy, no socket, and no
work for the owner. A small shared page, the *board*, shows which member has posted which exchange
at which address, and which has finished reading. As the board has the exchange's key, ranks that
are out of step raise an error at once, with both names, instead of mixing up their data.

Only on x86-64: the board relies on stores becoming visible in program order.
"""

import ctypes
import logging
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.comm.link import Labels, Summer, pieces
from shardwise.core.errors import SyncError
from shardwise.core.meter import count_sent

if TYPE_CHECKING:
    from shardwise.wire.codec import Codec

_POSTED, _KEY, _ADDRESS, _FINISHED, _PID = range(5)
_FIELDS = 8
_LOOK_AFTER_S = 0.5
"""How often a waiting rank checks that the other is still alive."""
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # x86-64


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LIBC = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger("shardwise")


class Board:
    """A few integers per member, in memory shared by the members of a hop."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        me = list(ranks).index(rank)
        size = max(mmap.PAGESIZE, len(ranks) * _FIELDS * 8)
        path: list[str | None] = [None]
        if me == 0:
            handle, name = tempfile.mkstemp(prefix="shardwise-board-", dir=_shared_folder())
            os.ftruncate(handle, size)
            path = [name]
        dist.broadcast_object_list(path, group_src=0, group=group)
        if me != 0:
            handle = os.open(path[0], os.O_RDWR)  # type: ignore[arg-type]
        self._memory = mmap.mmap(handle, size)
        os.close(handle)
        self._cells = memoryview(self._memory).cast("q")
        self._base = ctypes.c_char.from_buffer(self._memory)
        self.set(me, _PID, os.getpid())
        dist.barrier(group=group)
        if me == 0:
            os.unlink(path[0])  # type: ignore[arg-type]

    def get(self, member: int, field: int) -> int:
        return self._cells[member * _FIELDS + field]

    def set(self, member: int, field: int, value: int) -> None:
        self._cells[member * _FIELDS + field] = value

    def announce(self, member: int, field: int, value: int) -> None:
        """Set a counter and wake all that wait for it."""
        self.set(member, field, value)
        self._futex(member, field, _FUTEX_WAKE, 0x7FFFFFFF, None)

    def wait_while(self, member: int, field: int, value: int, limit_s: float) -> None:
        """Sleep while a counter has a value, but not longer than the limit."""
        self._futex(member, field, _FUTEX_WAIT, value & 0xFFFFFFFF, limit_s)

    def close(self) -> None:
        self._cells.release()
        del self._base
        self._memory.close()

    def _futex(self, member: int, field: int, verb: int, value: int, limit_s: float | None) -> None:
        # The futex is the low half of a counter. The kernel checks the value again before it puts
        # the thread to sleep, so that no wake-up is lost.
        address = ctypes.addressof(self._base) + (member * _FIELDS + field) * 8
        limit = None
        if limit_s is not None:
            limit = ctypes.byref(_TimeSpec(int(limit_s), int(limit_s % 1 * 1e9)))
        _LIBC.syscall(
            ctypes.c_long(_SYS_FUTEX), ctypes.c_void_p(address), ctypes.c_int(verb),
            ctypes.c_uint32(value), limit, None, ctypes.c_int(0),
        )  # fmt: skip


class LocalLink:
    """Exchanges by reading the peers' memory; see the module's docstring."""

    kind = "shared memory"

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        labels: Labels,
        limit_s: float,
    ) -> None:
        self.size, self.coordinate = len(ranks), list(ranks).index(rank)
        self._ranks, self._rank, self._labels, self._limit_s = ranks, rank, labels, limit_s
        self._board = Board(group, ranks, rank)
        self._count = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._summer = Summer()

    def gather(self, buffer: torch.Tensor, key: int) -> None:
        parts = pieces(buffer, self.size)
        nbytes = parts[0].nbytes
        self._post(parts[self.coordinate].data_ptr(), key)
        for i in self._others():
            address = self._await_post(i, key)
            self._read(i, address, parts[i].data_ptr(), nbytes, key)
        self._board.announce(self.coordinate, _FINISHED, self._count)

    def reduce(
        self,
        payload: torch.Tensor,
        own: torch.Tensor,
        out: torch.Tensor,
        key: int,
        codec: "Codec",
        *,
        scale: float,
        add: bool,
    ) -> None:
        self._post(payload.data_ptr(), key)
        offset = self.coordinate * (payload.nbytes // self.size)
        addresses = {i: self._await_post(i, key) + offset for i in self._others()}

        def arrived(member: int, nbytes: slice) -> torch.Tensor:
            count = nbytes.stop - nbytes.start
            if self._scratch.numel() < count:
                self._scratch = torch.empty(count, dtype=torch.uint8)
            address = addresses[member] + nbytes.start
            self._read(member, address, self._scratch.data_ptr(), count, key)
            return self._scratch[:count]

        self._summer.sum(arrived, own, self.coordinate, self.size, codec, out, scale=scale, add=add)
        self._board.announce(self.coordinate, _FINISHED, self._count)

    def finish(self) -> None:
        for i in self._others():
            self._until(i, _FINISHED, "finish")

    def close(self) -> None:
        self._board.close()

    def _others(self) -> list[int]:
        # Start with the next member, so that not all members read from the same one.
        return [(self.coordinate + i) % self.size for i in range(1, self.size)]

    def _post(self, address: int, key: int) -> None:
        self.finish()  # others may still read this rank's cells of the last exchange
        self._count += 1
        board, me = self._board, self.coordinate
        board.set(me, _KEY, key)
        board.set(me, _ADDRESS, address)
        board.announce(me, _POSTED, self._count)

    def _await_post(self, member: int, key: int) -> int:
        self._until(member, _POSTED, self._labels.name(key))
        theirs = self._board.get(member, _KEY)
        if theirs != key:
            raise SyncError(
                f"Ranks are out of step: rank {self._rank} runs the {self._labels.name(key)} while "
                f"rank {self._ranks[member]} runs the {self._labels.name(theirs)}; "
                "all ranks must use the model in the same way."
            )
        return self._board.get(member, _ADDRESS)

    def _until(self, member: int, field: int, what: str) -> None:
        begin = time.monotonic()
        while (value := self._board.get(member, field)) < self._count:
            self._board.wait_while(member, field, value, _LOOK_AFTER_S)
            if (waited_s := time.monotonic() - begin) > _LOOK_AFTER_S:
                self._check_alive(member, waited_s, what)

    def _check_alive(self, member: int, waited_s: float, what: str) -> None:
        pid, peer = self._board.get(member, _PID), self._ranks[member]
        if not os.path.exists(f"/proc/{pid}"):
            raise SyncError(
                f"Rank {peer} (process {pid}) has ended while rank {self._rank} waited for it "
                f"in the {what}."
            )
        if waited_s > self._limit_s:
            doing = self._labels.name(self._board.get(member, _KEY))
            raise SyncError(
                f"Rank {self._rank} waited {waited_s:.0f} s for rank {peer} in the {what}; "
                f"the last exchange of rank {peer} was the {doing}."
            )

    def _read(self, member: int, remote: int, local: int, nbytes: int, key: int) -> None:
        pid = self._board.get(member, _PID)
        done = 0
        while done < nbytes:  # a single call moves less than 2 GiB
            count = _copy_from(pid, remote + done, local + done, nbytes - done)
            if count <= 0:
                raise SyncError(
                    f"Rank {self._rank} could not read the memory of rank {self._ranks[member]} "
                    f"(process {pid}): {os.strerror(ctypes.get_errno())}."
                )
            done += count
        count_sent(key, nbytes)


def readable(group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> bool:
    """Whether all members are on one host and may read each other's memory; collective.

    If they share a host but may not, the group's first rank warns, because such hops are slower.
    """
    probe = torch.full((16,), rank, dtype=torch.int64)
    mine = (host_identity(), os.getpid(), probe.data_ptr())
    seen: list[tuple[str, int, int] | None] = [None] * len(ranks)
    _allow_reading()
    dist.all_gather_object(seen, mine, group=group)
    together = all(peer is not None and peer[0] == mine[0] for peer in seen)
    good = together and _supported()
    target = torch.empty_like(probe)
    if good:
        for peer, rank_there in zip(seen, ranks, strict=True):
            assert peer is not None
            count = _copy_from(peer[1], peer[2], target.data_ptr(), target.nbytes)
            good &= count == target.nbytes and bool((target == rank_there).all())
    verdicts: list[bool | None] = [None] * len(ranks)
    dist.all_gather_object(verdicts, good, group=group)
    if together and not all(verdicts) and rank == ranks[0]:
        _log.warning(
            "Ranks %s share a host but may not read each other's memory (process_vm_readv: ptrace "
            "rules, different users, or not x86-64), so their hops use messages, which is slower.",
            ", ".join(map(str, ranks)),
        )
    return all(verdicts)


def _supported() -> bool:
    return platform.machine() == "x86_64" and hasattr(_LIBC, "process_vm_readv")


def _copy_from(pid: int, remote: int, local: int, nbytes: int) -> int:
    call = _LIBC.process_vm_readv
    call.restype = ctypes.c_ssize_t
    here, there = _IoVec(local, nbytes), _IoVec(remote, nbytes)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    return int(call(pid, ctypes.byref(here), one, ctypes.byref(there), one, none))


def _allow_reading() -> None:
    """Let processes of the same user read this one, where Yama would allow only its parents."""
    pr_set_ptracer, anybody = 0x59616D61, -1
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(pr_set_ptracer, ctypes.c_ulong(anybody & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)


def host_identity() -> str:
    """An identity that is equal for processes with the same kernel, process table and network.

    The network namespace counts, so that emulated nodes communicate over their emulated link.
    """
    parts = [platform.node()]
    for path in ("/proc/self/ns/pid", "/proc/self/ns/net"):
        try:
            parts.append(os.readlink(path))
        except OSError:
            parts.append(f"unknown-{os.getpid()}")
    return "|".join(parts)


def _shared_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
