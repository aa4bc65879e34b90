"""Lines the flight recorders of a run's ranks up: what each was doing at its end, and for whom it
waited."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from shardwise.core.flight import AGREEMENT, TURNS, Event, Flight, Mark

LANES = ("gather", "reduce", "outer")
"""The threads that do the same on all ranks, in the same order."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, at its end."""

    rank: int
    pid: int
    step: int
    doing: tuple[tuple[str, float], ...]
    """What was under way, and for how long."""
    last: str
    """The last thing that it began or completed, for one that had nothing under way."""
    waits_for: tuple[int, ...]
    """Ranks that had not come as far as an exchange that this one was in."""
    behind: int
    """How many operations of a lane it was behind the first rank."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "step": self.step,
            "doing": [{"title": title, "for_s": round(for_s, 3)} for title, for_s in self.doing],
            "last": self.last,
            "waits_for": list(self.waits_for),
            "behind": self.behind,
        }


def line_up(
    flights: Sequence[Flight], wall_s: float | None = None, failed: Set[int] = frozenset()
) -> list[Row]:
    """A row per rank; ``wall_s`` is when they ended, by default when one of them did the last.

    ``failed``: those that could not do their part of an exchange, whether they had begun it or not.
    """
    opened = {flight.rank: _open(flight) for flight in flights}
    begun = {flight.rank: _begun(flight) for flight in flights}
    last_s = max((f.wall_s + f.events[-1].at_s for f in flights if f.events), default=0.0)
    end_s = max(last_s, wall_s or 0.0)
    rows = []
    for flight in flights:
        own = opened[flight.rank]
        waits: set[int] = set()
        for other in flights:
            if other.rank == flight.rank or flight.rank in failed:
                continue
            if any(
                _is_exchange(event)
                if other.rank in failed
                else _waits(event, begun[other.rank], opened[other.rank])
                for event in own
            ):
                waits.add(other.rank)
        doing = tuple((event.title, end_s - flight.wall_s - event.at_s) for event in own)
        shown = [event for event in flight.events if event.what]
        rows.append(
            Row(
                rank=flight.rank,
                pid=flight.pid,
                step=flight.step,
                doing=doing,
                last=shown[-1].title if shown else "",
                waits_for=tuple(sorted(waits)),
                behind=_behind(begun[flight.rank], list(begun.values())),
            )
        )
    return rows


def conclusion(rows: Sequence[Row]) -> str:
    """Who was waited for without waiting itself, in a sentence.

    >>> idle = Row(1, 11, 4, (), "forward of blocks.0", (), 3)
    >>> waiting = Row(0, 10, 4, (("gather of unit 'blocks.1'", 9.0),), "", (1,), 0)
    >>> conclusion([waiting, idle])
    'Rank 0 waited for rank 1, which waited for nobody; it was at: forward of blocks.0.'
    """
    wanted = {rank for row in rows for rank in row.waits_for}
    idle = [row for row in rows if row.rank in wanted and not row.waits_for]
    if not idle:
        return "No rank waited for one that waited for nobody."
    found = []
    for row in idle:
        by = [other.rank for other in rows if row.rank in other.waits_for]
        names = f"Rank {by[0]}" if len(by) == 1 else f"Ranks {', '.join(map(str, by))}"
        at = row.doing[0][0] if row.doing else row.last or "nothing known"
        found.append(
            f"{names} waited for rank {row.rank}, which waited for nobody; it was at: {at}."
        )
    return " ".join(found)


def _open(flight: Flight) -> list[Event]:
    """What was under way: the innermost of each thread, exchanges first."""
    inner = [stack[-1] for stack in flight.open().values()]
    return sorted(inner, key=lambda event: (event.what.startswith("wait"), event.at_s))


def _begun(flight: Flight) -> dict[str, Event]:
    """The last operation that each thread began."""
    return {event.thread: event for event in flight.events if event.mark is Mark.BEGIN}


def _is_exchange(event: Event) -> bool:
    return event.thread in LANES or event.what.startswith(AGREEMENT)


def _waits(event: Event, begun: dict[str, Event], opened: list[Event]) -> bool:
    """Whether an open operation of one rank waits for another, which did not come as far."""
    if event.thread not in LANES:
        # There is one exchange between all ranks at a time, whatever each wants to agree on.
        return _is_exchange(event) and not any(map(_is_exchange, opened))
    theirs = begun.get(event.thread)
    return theirs is None or _ahead(event, theirs) > 0


def _behind(begun: dict[str, Event], everyone: list[dict[str, Event]]) -> int:
    found = [0]
    for lane in LANES:
        if lane in begun:
            found += [_ahead(other[lane], begun[lane]) for other in everyone if lane in other]
    return max(found)


def _ahead(one: Event, other: Event) -> int:
    """How many turns one is ahead of the other, which is never more than half of all."""
    difference = (one.turn - other.turn) % TURNS
    return difference if difference < TURNS // 2 else difference - TURNS
