"""The schedule of a pass for people: one unit of each group, with what is done for it and when."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.layout import ModelSpec
from shardwise.core.sizes import format_bytes
from shardwise.plans.expected import Event
from shardwise.plans.ops import Move, Op, Trigger


@dataclass(frozen=True)
class Row:
    """An operation, and what sets it off."""

    trigger: Trigger
    op: Op
    title: str
    """Of the units that the operation's unit stands for."""
    count: int
    ahead: int
    """How many units before this one in the pass the trigger comes; below 0: after it."""

    @property
    def when(self) -> str:
        if not self.ahead:
            return self.trigger.value
        units = "1 unit" if abs(self.ahead) == 1 else f"{abs(self.ahead)} units"
        return f"{self.trigger}, {units} {'earlier' if self.ahead > 0 else 'later'}"

    @property
    def hops(self) -> str:
        return ", ".join(
            f"{hop.level} {format_bytes(hop.sent_bytes)}"
            + (f" as {hop.format}" if hop.format else "")
            for hop in self.op.hops
        )

    @property
    def tier(self) -> str:
        """What is read from tiers, and what is written there."""

        def text(move: Move) -> str:
            both = (("reads", move.reads), ("writes", move.writes))
            texts = [f"{what} {format_bytes(nbytes)}" for what, nbytes in both if nbytes]
            return f"{move.tier}: {', '.join(texts)}"

        return "; ".join(text(move) for move in self.op.moves)

    def to_dict(self) -> dict[str, Any]:
        op = self.op
        return {
            "trigger": self.trigger.value,
            "ahead": self.ahead,
            "unit": self.title,
            "count": self.count,
            "op": op.kind.value,
            "lane": op.lane.value,
            "source": op.source.value if op.source else None,
            "target": op.target.value if op.target else None,
            "after": [kind.value for kind in op.after],
            "moves": [
                {"tier": move.tier, "reads": move.reads, "writes": move.writes} for move in op.moves
            ],
            "copies": op.copies,
            "overlaps": op.overlaps,
            "hops": [
                {
                    "level": hop.level,
                    "size": hop.size,
                    "sent_bytes": hop.sent_bytes,
                    "wire": str(hop.format) if hop.format else "raw",
                }
                for hop in op.hops
            ],
        }


def rows(
    events: Iterable[Event], model: ModelSpec, shown: Mapping[str, tuple[str, int]]
) -> Iterator[Row]:
    """``shown`` has the units that stand for others, each with a title and how many they are."""
    position = {unit.name: index for index, unit in enumerate(model.units)}
    root = model.units[0].name
    for event in events:
        for op in event.ops:
            if op.unit not in shown:
                continue
            ahead = 0
            if root not in (event.unit, op.unit) and event.unit in position:
                ahead = position[op.unit] - position[event.unit]
                ahead = ahead if event.trigger.in_forward else -ahead
            yield Row(event.trigger, op, *shown[op.unit], ahead)
