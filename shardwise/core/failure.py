"""What failed, what each rank was doing then, and the one report of it: pure data and text."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How a rank failed."""

    ENDED = "ended"
    STOPPED = "stopped"
    CUT_OFF = "cut off"
    RAISED = "raised"
    STUCK = "stuck"
    """It gave up on others, but none of them has failed."""


_SENTENCES = {
    Kind.ENDED: "{ranks} ended without a word (killed, or out of memory)",
    Kind.STOPPED: "{ranks} {is_} stopped (SIGSTOP, or a debugger)",
    Kind.CUT_OFF: "{ranks} cannot be reached (a link is down, or the machine has stopped)",
    Kind.RAISED: "{ranks} raised {what}",
    Kind.STUCK: "{ranks} gave up: {what}",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank that failed."""

    rank: int
    kind: Kind
    since_s: float
    """On this host's monotonic clock; messages carry ages, because clocks of hosts differ."""
    what: str = ""
    """The error, for those that have one."""


@dataclass(frozen=True, slots=True)
class Doing:
    """Something that was going on."""

    thread: str
    title: str
    for_s: float

    @property
    def text(self) -> str:
        return f"{self.title} for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank was doing when a failure was noticed, by itself or as others read it."""

    rank: int
    host: str
    pid: int
    doing: tuple[Doing, ...] = ()
    last: str = ""
    """The last operation that it completed or began."""
    line: str = ""
    """The place in the user's program."""
    step: str = ""

    @property
    def text(self) -> str:
        parts = [doing.text for doing in self.doing]
        if not parts and self.last:
            parts = [f"last: {self.last}"]
        if self.step:
            parts.insert(0, self.step)
        if self.line:
            parts.append(f"at {self.line}")
        return "; ".join(parts) or "nothing known"

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Statement":
        doing = tuple(Doing(**one) for one in table["doing"])
        return cls(**{**table, "doing": doing})


@dataclass(frozen=True, slots=True)
class Report:
    """One report of a failure."""

    faults: tuple[Fault, ...]
    """The cause first; then what was noticed besides."""
    statements: Mapping[int, Statement]
    world: int
    now_s: float
    time: str
    """The wall clock's, as text."""
    wall_s: float
    """And as a number."""
    left: tuple[int, ...] = field(default=())

    @property
    def cause(self) -> list[Fault]:
        """The faults that began it: the first one, and those of its kind."""
        first = self.faults[0]
        if first.kind in (Kind.RAISED, Kind.STUCK):
            return [first]
        return [fault for fault in self.faults if fault.kind is first.kind]

    @property
    def is_shared(self) -> bool:
        """Whether all ranks raised the same, as about a mistake in the job: no rank has failed."""
        told = {(fault.kind, fault.what) for fault in self.faults}
        alike = len(self.faults) == self.world and len(told) == 1
        return alike and self.faults[0].kind is Kind.RAISED

    @property
    def sentence(self) -> str:
        """What failed, in a sentence."""
        cause = self.cause
        ranks = [fault.rank for fault in cause]
        named = _SENTENCES[cause[0].kind].format(
            ranks=name_ranks(ranks), is_="is" if len(ranks) == 1 else "are", what=cause[0].what
        )
        age = self.now_s - min(fault.since_s for fault in cause)
        last = self.statements.get(ranks[0])
        where = f", in {_first(last)}" if last is not None and _first(last) else ""
        return f"{named}{where}; {age:.1f} s ago"

    def lines(self, folder: str = "") -> list[str]:
        """The report for people."""
        found = [f"shardwise: {self.sentence}."]
        failed = {fault.rank for fault in self.cause}
        for rank in range(self.world):
            statement = self.statements.get(rank)
            if statement is not None:
                text = statement.text
            else:
                text = "had left" if rank in self.left else "nothing known"
            found.append(f"  rank {rank}{' (failed)' if rank in failed else ''}: {text}")
        if folder:
            found.append(f"  more: shardwise doctor {folder}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "sentence": self.sentence,
            "time": self.time,
            "wall_s": self.wall_s,
            "world": self.world,
            "cause": [
                {
                    "rank": fault.rank,
                    "kind": fault.kind.value,
                    "what": fault.what,
                    "age_s": round(self.now_s - fault.since_s, 3),
                }
                for fault in self.cause
            ],
            "ranks": {
                str(rank): asdict(statement) for rank, statement in sorted(self.statements.items())
            },
        }


def order_faults(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The cause first: what others did in consequence, giving up on a rank, comes last."""
    latest: dict[int, Fault] = {}
    for fault in faults:
        known = latest.get(fault.rank)
        if known is None or _weight(fault) < _weight(known):
            latest[fault.rank] = fault
    return tuple(sorted(latest.values(), key=lambda f: (f.kind is Kind.STUCK, f.since_s, f.rank)))


def _weight(fault: Fault) -> tuple[int, float]:
    """Of what is said of one rank: that it raised an error says more than that it has ended."""
    order = (Kind.RAISED, Kind.STOPPED, Kind.ENDED, Kind.CUT_OFF, Kind.STUCK)
    return order.index(fault.kind), fault.since_s


def name_ranks(ranks: Iterable[int]) -> str:
    """
    >>> name_ranks([3]), name_ranks([0, 2])
    ('rank 3', 'ranks 0 and 2')
    """
    names = [str(rank) for rank in sorted(set(ranks))]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def dump_report(report: Report) -> str:
    return json.dumps(report.to_dict(), indent=2) + "\n"


def _first(statement: Statement) -> str:
    """The operation that a failed rank was in, or was at last."""
    if statement.doing:
        return statement.doing[0].title
    return statement.last.partition(",")[0]
