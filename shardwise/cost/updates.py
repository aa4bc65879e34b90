"""Updates in a simulated step: in memory all at once, or streamed to and from a tier.

[Note: Streams]
Of an update whose states rest on a disk windows are read ahead and written behind, so that reading,
updating and writing go on at once. In host memory the host works where they are: gradients come,
the host works, the new parameters leave.
"""

from collections.abc import Iterator, Mapping, Sequence

from shardwise.cost.engine import Compute, Instruction, Job, Stage, Submit, Wait
from shardwise.cost.price import Prices, Stages
from shardwise.plans.ops import Kind, Lane, Op
from shardwise.plans.schedule import UnitOps


class Updates:
    """The updates of a model's units."""

    def __init__(self, prices: Prices, units: Mapping[str, UnitOps]) -> None:
        self._prices, self._units = prices, units
        self._beside: list[Job] = []
        """Those beside backward that nobody has waited for."""
        self._last: Job | None = None

    def of_all_in_memory(self, ops: Sequence[Op]) -> Iterator[Instruction]:
        """One call of the user's optimizer for all units whose update moves nothing."""
        numel = sum(
            self._numel(op) for op in ops if op.kind is Kind.UPDATE and not self._streams(op)
        )
        yield Compute("update", self._prices.update(numel, "device"))

    def of_one(self, op: Op, before: Sequence[Job]) -> Iterator[Instruction]:
        """An update that streams, in the step or beside backward; see [Note: Streams]."""
        if not self._streams(op):
            return  # it is one of all that are in memory
        if op.lane is Lane.UPDATE:
            yield from self._update_beside(op, before)
            return
        reads, writes = self._moves(op)
        if self._optim_tier(op) == "cpu":
            for stage in (writes, *self._work(op), reads):
                yield Compute(f"update {op.unit}", stage)
            return
        jobs = [
            Job("fetch", f"read states of {op.unit}", [reads]),
            Job("store", f"write states of {op.unit}", [writes]),
            *self._exchange(op),
        ]
        for job in jobs:
            yield Submit(job)
        for stage in self._work(op):
            yield Compute(f"update {op.unit}", stage)
        for job in jobs:
            yield Wait(job)

    def finish(self) -> Iterator[Instruction]:
        """Waits for all beside backward."""
        for job in self._beside:
            yield Wait(job)
        self._beside.clear()

    def _update_beside(self, op: Op, before: Sequence[Job]) -> Iterator[Instruction]:
        """States are read before gradients are there. One thread does it all, so that the next
        unit's states come when this one is updated."""
        reads, writes = self._moves(op)
        read = Job(
            "read states", f"read states of {op.unit}", [reads], (self._last,) if self._last else ()
        )
        exchange = self._exchange(op, before)
        update = Job(Lane.UPDATE.value, f"update {op.unit}", self._work(op), (read, *before))
        write = Job("write states", f"write states of {op.unit}", [writes], (update,))
        for job in (read, *exchange, update, write):
            yield Submit(job)
        self._last = update
        self._beside += [*exchange, update, write]

    def _exchange(self, op: Op, before: Sequence[Job] = ()) -> list[Job]:
        """Gradients to a host that updates states of a disk, and new parameters back."""
        out, back = op.crossing
        stages = {
            "gradients": self._prices.move("cpu", out, writes=True),
            "parameters": self._prices.move("cpu", back, writes=False),
        }
        return [
            Job(f"exchange {what}", f"exchange {what} of {op.unit}", [stage], before)
            for what, stage in stages.items()
            if stage.seconds
        ]

    def _moves(self, op: Op) -> tuple[Stage, Stage]:
        """What an update reads from its tier, and what it writes there."""
        to_host = self._optim_tier(op) != "device"
        return (
            self._prices.move(op.tier, op.reads, writes=False, to_host=to_host),
            self._prices.move(op.tier, op.writes, writes=True, to_host=to_host),
        )

    def _work(self, op: Op) -> Stages:
        """The optimizer's own work, and the copy of what is new."""
        update = self._prices.update(self._numel(op), self._optim_tier(op))
        return [update, self._prices.copy(op.copies, "update")] if op.copies else [update]

    def _streams(self, op: Op) -> bool:
        return self._optim_tier(op) != "device" or op.moved_bytes > 0

    def _optim_tier(self, op: Op) -> str:
        return self._units[op.unit].plan.optim.tier

    def _numel(self, op: Op) -> int:
        unit = self._units[op.unit]
        parts = unit.rungs.ladder.parts[unit.rungs.optim]
        return sum(flat.numel for flat in unit.trained) // parts
