"""What the ranks tell each other when one has failed, until each knows enough for a report."""

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.comm.testimony import own_statement, statement_of
from shardwise.core.failure import Fault, Kind, Report, Statement, order_faults
from shardwise.core.flight import attach, read
from shardwise.core.processes import ProcessId

_MOST_FAULTS, _LONGEST = 64, 400
"""A message fits into a datagram."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank as all others know it."""

    rank: int
    host: str
    process: ProcessId
    ring: str
    """The file of its flight recorder."""


class Alarm:
    """What is known of a failure: which ranks failed, and what each was doing."""

    def __init__(self, me: Member, members: Mapping[int, Member]) -> None:
        self._me, self._members = me, members
        self.rings = {
            member.rank: attach(member.ring)
            for member in members.values()
            if member.host == me.host
        }
        """The flight recorders of this host's ranks, whatever becomes of these."""
        self.statements: dict[int, Statement] = {}
        self.positions: dict[int, str] = {}
        """What others were doing when they were last heard of."""
        self._told: dict[int, Fault] = {}

    def state(self) -> None:
        """Say what this rank is doing; only once, because that is when it had to stop."""
        if self._me.rank not in self.statements:
            about = self._me.rank, self._me.host, self._me.process.pid
            self.statements[self._me.rank] = own_statement(*about)

    def hear(self, rank: int, body: Mapping[str, Any], now_s: float) -> None:
        """Another rank's alarm."""
        for told in body["faults"]:
            since = now_s - float(told["age_s"])
            fault = Fault(int(told["rank"]), Kind(told["kind"]), since, str(told["what"]))
            known = self._told.get(fault.rank)
            self._told[fault.rank] = order_faults([fault, *([known] if known else [])])[0]
        self.statements[rank] = Statement.from_dict(body["says"])

    def faults(self, own: Iterable[Fault], seen: Iterable[Fault]) -> tuple[Fault, ...]:
        """What is known by itself and from others, the cause first."""
        news = [  # those that have said why they end are ending now
            fault
            for fault in seen
            if fault.kind is not Kind.ENDED or fault.rank not in self.statements
        ]
        return order_faults([*own, *self._told.values(), *news])

    def message(self, faults: Iterable[Fault], now_s: float) -> dict[str, Any]:
        """This rank's alarm. Ages travel, because clocks of hosts differ."""
        told = [
            {
                "rank": fault.rank,
                "kind": fault.kind.value,
                "age_s": now_s - fault.since_s,
                "what": fault.what[:_LONGEST],
            }
            for fault in list(faults)[:_MOST_FAULTS]
        ]
        return {"faults": told, "says": asdict(self.statements[self._me.rank])}

    def report(self, faults: tuple[Fault, ...], left: Set[int], now_s: float) -> Report:
        """The report, with what is known of ranks that say nothing any more."""
        known = {
            member.rank: self.statements.get(member.rank) or self._about(member)
            for member in self._members.values()
        }
        when, wall_s = time.strftime("%Y-%m-%d %H:%M:%S"), time.time()
        return Report(faults, known, len(self._members), now_s, when, wall_s, tuple(sorted(left)))

    def _about(self, member: Member) -> Statement:
        about = member.rank, member.host, member.process.pid
        if member.rank in self.rings:
            return statement_of(read(self.rings[member.rank]), *about)
        position = self.positions.get(member.rank)
        return Statement(*about, last=f"{position}, when last heard of" if position else "")


def gone(faults: Iterable[Fault]) -> set[int]:
    """The ranks that cannot say anything any more."""
    return {fault.rank for fault in faults if fault.kind not in (Kind.RAISED, Kind.STUCK)}
