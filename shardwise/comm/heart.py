"""The heart of a rank: a thread that beats, notices ranks that failed, and ends this one then.

[Note: A failure]
Every rank sends a beat to a few others and watches these (``core/liveness.py``). The first that
notices a failure alarms all, each rank answers with what it was doing, and when all have, or after
a short grace, the lowest rank prints the one report, it is written to the run's folder with the
flight recorders, and all ranks end. That happens in this thread, because the main one may be stuck
in a collective that nothing can interrupt.

An exception goes first where it can: a rank that notices by itself that another is missing (its
transfer fails) has a moment to raise that error, and to handle it.
"""

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from shardwise.comm.alarm import Alarm, Member, gone
from shardwise.comm.courier import Courier, Message, Refusal
from shardwise.comm.testimony import communicates
from shardwise.core.failure import Fault, Kind, Report
from shardwise.core.flight import RECORDER
from shardwise.core.liveness import Liveness, Peer
from shardwise.core.processes import Life

_log = logging.getLogger("shardwise")
_SIGTERM_GRACE_S = 1.0
"""A launcher ends the others when a rank has failed: so long is looked for one that has."""
_RESEND_S = 0.1
_MEETING_S = 3.0
_SMALL_WORLD, _FIRST_RANKS = 64, 8
"""In larger jobs an alarm goes to neighbours, who pass it on, and to a few ranks that collect."""


class Heart:
    """Beats for this rank, and watches the others."""

    def __init__(
        self,
        me: Member,
        members: Iterable[Member],
        courier: Courier,
        timeout_s: float,
        publish: Callable[[Report, dict[int, bytes], bool], None],
    ) -> None:
        self._me, self._courier, self._publish = me, courier, publish
        self._members = {member.rank: member for member in members}
        self.place = me.rank, len(self._members)
        """This process's rank, and how many there are."""
        self._alarm = Alarm(me, self._members)
        others = [member for member in self._members.values() if member.rank != me.rank]
        self._watched = neighbours(me.rank, len(self._members))
        peers = (_peer(member, me.host) for member in others)
        self._liveness = Liveness(peers, timeout_s, self._watched)
        small = len(self._members) <= _SMALL_WORLD
        self._collectors = set(self._members if small else range(_FIRST_RANKS))
        self._told_first = self._collectors | set(self._watched) | set(self._alarm.rings)
        self._wake_reader, self.wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self.wake_writer, False)
        self.told_to_end_s: float | None = None
        """When a SIGTERM came."""
        self.on_sigterm: Callable[[], None] = self._end_by_sigterm
        """What a SIGTERM that no failure explains does."""
        self.hears_sigterm: Callable[[], bool] = lambda: True
        """Whether a SIGTERM is for this heart, and not for a handler of the program's own."""
        self._error: Fault | None = None
        """An exception that ends this rank's program."""
        self._noticed_s: float | None = None
        self._communicates_since: float | None = None
        self._ending_s: float | None = None
        self._seen: list[Fault] = []
        """What had failed when it began to end: a stopped rank may go on meanwhile."""
        self._sent_s = self._beat_s = 0.0
        self._begun_s = 0.0
        self._met = threading.Event()
        """Set when all that are watched have been heard of."""
        self._over = threading.Event()
        self._judged = threading.Event()
        """Set when it is known what has failed, just before this process ends."""
        self._shown = threading.Event()
        """Set by the main thread when it has shown its own error."""
        self._is_cause = False
        """Whether this rank's error began it."""
        self._thread = threading.Thread(target=self._run, name="shardwise-heart", daemon=True)

    @property
    def timeout_s(self) -> float:
        return self._liveness.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._liveness.timeout_s = value

    @property
    def beats_s(self) -> float:
        """Between two beats."""
        return min(1.0, max(0.05, self.timeout_s / 20))

    @property
    def is_beating(self) -> bool:
        return self._thread.is_alive() and not self._over.is_set()

    def start(self) -> None:
        self._begun_s = time.perf_counter()
        self._thread.start()

    def meet(self) -> list[int]:
        """Wait a moment for the first beats; returns the ranks that were not heard of, and are not
        watched therefore."""
        self._met.wait(_MEETING_S)
        return self._liveness.strangers(self._watched)

    def leave(self) -> None:
        """This rank ends, and nothing is wrong."""
        if self._ending_s is not None:
            self._thread.join()  # too late: it ends this process
        if self._over.is_set():
            return
        self._over.set()
        _wake(self.wake_writer)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        for _ in range(2):  # one may be lost
            for rank in self._others():
                self._courier.send(rank, "bye")
        self._courier.close()

    def die_of(self, sentence: str, show: Callable[[], object] | None, *, is_symptom: bool) -> None:
        """Tell all ranks that an error ends this one, and end with them; returns if there are none.

        ``is_symptom``: another rank's failure has probably caused it, which is waited for.
        """
        if not self.is_beating or not self._others():
            return
        kind = Kind.STUCK if is_symptom else Kind.RAISED
        self._alarm.state()
        self._error = Fault(self._me.rank, kind, time.perf_counter(), sentence)
        _wake(self.wake_writer)
        if self._judged.wait(2 * self.timeout_s + 10):
            if self._is_cause and show is not None:
                show()
            self._shown.set()
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._beat()
        except Exception:
            if self._ending_s is not None:
                _exit()  # others end as well, and nobody else would end this one
            _log.exception("Rank %d does not watch the others any more", self._me.rank)

    def _beat(self) -> None:
        _wake(self.wake_writer)
        poll, now = select.poll(), time.perf_counter()  # select is limited to 1024 files
        poll.register(self._courier.fileno(), select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        while not self._over.is_set():
            meets = not self._met.is_set() and time.perf_counter() - self._begun_s < _MEETING_S
            hurries = meets or self._ending_s or self._error or self._noticed_s
            soon = _RESEND_S if hurries else self.beats_s
            with contextlib.suppress(OSError):
                poll.poll(soon * 1000)
            if self._over.is_set():
                return
            self._look_for_signals()
            before_s, now = now, time.perf_counter()
            if now - before_s > self._liveness.silence_s:  # all may have been stopped, and go on
                self._liveness.pardon(now)
            for message in self._courier.receive():
                self._take(message, now)
            if not self._met.is_set() and not self._liveness.strangers(self._watched):
                self._met.set()
            if now - self._beat_s >= (_RESEND_S if meets else self.beats_s):
                self._beat_s = now
                for rank in self._watched:
                    self._courier.send(rank, "beat", {"at": RECORDER.position()[:200]})
            self._ask_for_silent(now)
            if self._ending_s is None:
                self._judge(now)
            if self._ending_s is not None:
                self._go_on_ending(now)

    def _take(self, message: Message | Refusal, now: float) -> None:
        if isinstance(message, Refusal):
            self._liveness.refuse(message.rank, now)
            return
        self._liveness.hear(message.rank, now)
        if message.kind == "beat" and "at" in message.body:
            self._alarm.positions[message.rank] = str(message.body["at"])
        elif message.kind == "ask":
            self._courier.send(message.rank, "beat")
        elif message.kind == "bye":
            self._liveness.leave(message.rank)
        elif message.kind == "alarm":
            self._alarm.hear(message.rank, message.body, now)
            if self._ending_s is None:
                self._begin_ending(now)

    def _ask_for_silent(self, now: float) -> None:
        """Where a rank is quiet, every rank of its host is asked whether the host is there."""
        quiet_s = max(3 * self.beats_s, self._liveness.silence_s / 3)
        for peer in self._liveness.peers.values():
            heard = peer.heard_s
            if peer.rank in self._watched and heard is not None and not peer.has_left:
                was, peer.silent = peer.silent, now - heard > quiet_s
                if peer.silent and not was:
                    for member in self._members.values():
                        if member.host == peer.host and member.rank != self._me.rank:
                            self._courier.send(member.rank, "ask")

    def _judge(self, now: float) -> None:
        """Whether this rank has to end."""
        faults = self._liveness.faults(now)
        if not faults:
            self._noticed_s = self._communicates_since = None
        elif self._noticed_s is None:
            self._noticed_s = now
            return  # what a rank said just before it ended may be on its way
        if self._error is not None:
            waited = now - self._error.since_s
            if (
                faults
                or self._error.kind is Kind.RAISED
                or waited > self._liveness.doubt_s(now, self.beats_s)
            ):
                self._begin_ending(now)
            return
        if self.told_to_end_s is not None and not faults:
            if now - self.told_to_end_s > _SIGTERM_GRACE_S:
                self.told_to_end_s = None
                self.on_sigterm()
            return
        if not faults or self._noticed_s is None:
            return
        if not communicates():
            self._communicates_since = None
        elif self._communicates_since is None:
            self._communicates_since = now
        moment = min(1.5, self.timeout_s / 4)
        since = self._communicates_since
        stuck = since is not None and now - since > moment
        if stuck or self.told_to_end_s is not None or now - self._noticed_s > self.timeout_s / 4:
            self._begin_ending(now)

    def _begin_ending(self, now: float) -> None:
        self._ending_s, self._seen = now, self._liveness.faults(now)
        self._alarm.state()

    def _go_on_ending(self, now: float) -> None:
        assert self._ending_s is not None
        own = [self._error] if self._error is not None else []
        faults = self._alarm.faults(own, [*self._seen, *self._liveness.faults(now)])
        said = self._alarm.statements
        collects = self._me.rank in self._collectors
        waited_for = [rank for rank in self._others(gone(faults)) if rank not in said and collects]
        if now - self._sent_s >= _RESEND_S:
            self._sent_s = now
            for rank in self._others():
                if rank in self._told_first:
                    self._courier.send(rank, "alarm", self._alarm.message(faults, now))
        if waited_for and now - self._ending_s < min(3.0, max(0.5, self.timeout_s / 8)):
            return
        if now - self._ending_s >= 2 * _RESEND_S:  # every rank has heard it twice
            self._finish(faults, now)

    def _finish(self, faults: tuple[Fault, ...], now: float) -> NoReturn:
        left = {peer.rank for peer in self._liveness.peers.values() if peer.has_left}
        report = self._alarm.report(faults, left, now)
        self._is_cause = self._error is not None and report.cause[0].rank == self._me.rank
        speakers = set(self._members) - gone(faults) - left
        here = speakers & set(self._alarm.rings)
        if here and min(here) == self._me.rank and not report.is_shared:
            flights = {rank: bytes(ring[:]) for rank, ring in self._alarm.rings.items()}
            told = report, flights, min(speakers) == self._me.rank
            publishing = threading.Thread(target=self._publish, args=told, daemon=True)
            publishing.start()
            publishing.join(min(10.0, self.timeout_s))  # a disk may hang, but this process ends
            stopped = [self._members[fault.rank] for fault in faults if fault.kind is Kind.STOPPED]
            _kill_stopped([member for member in stopped if member.host == self._me.host])
        self._judged.set()  # the main thread shows its error after the report, not in it
        if self._error is not None:
            self._shown.wait(2.0)
        else:
            time.sleep(_RESEND_S)
        _exit()

    # --- inside -------------------------------------------------------------------------------

    def _others(self, absent: Iterable[int] = ()) -> list[int]:
        gone = set(absent) | {p.rank for p in self._liveness.peers.values() if p.has_left}
        return [rank for rank in self._liveness.peers if rank not in gone]

    def _end_by_sigterm(self) -> None:
        """As if nobody handled it; the others need not wonder."""
        for rank in self._others():
            self._courier.send(rank, "bye")
        ctypes.CDLL(None).signal(signal.SIGTERM, 0)
        os.kill(os.getpid(), signal.SIGTERM)

    def _look_for_signals(self) -> None:
        try:
            data = os.read(self._wake_reader, 4096)
        except BlockingIOError:
            return
        if bytes([signal.SIGTERM]) in data and self.hears_sigterm():
            self.told_to_end_s = self.told_to_end_s or time.perf_counter()


def neighbours(rank: int, world: int) -> list[int]:
    """Those that a rank sends beats to, and expects them from: at distances 1, 2, 4 ...

    So each is watched by several, on its host and beyond, and a large job sends few messages.

    >>> neighbours(0, 4), neighbours(0, 16)
    ([1, 2, 3], [1, 2, 4, 8, 12, 14, 15])
    """
    found = set()
    distance = 1
    while distance < world:
        found |= {(rank + distance) % world, (rank - distance) % world}
        distance *= 2
    return sorted(found - {rank})


def _wake(writer: int) -> None:
    with contextlib.suppress(OSError):
        os.write(writer, b"\0")


def _kill_stopped(members: Iterable[Member]) -> None:
    """Ranks of this host that cannot end by themselves; launchers would wait long for them."""
    for member in members:
        if member.process.life() is Life.STOPPED:
            with contextlib.suppress(OSError):
                os.kill(member.process.pid, signal.SIGKILL)


def _exit() -> NoReturn:
    """End the process, whatever its main thread is stuck in: it may be in a write of output that
    nobody reads, and hold the lock that flushing needs."""
    flushing = threading.Thread(target=_flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        flushing.start()
        flushing.join(1.0)
    os._exit(1)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _peer(member: Member, host: str) -> Peer:
    life = member.process.life if member.host == host and member.process.started else None
    return Peer(member.rank, member.host, life)
