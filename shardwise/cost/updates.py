"""Updates in a simulated step: in memory all at once, or streamed to and from a tier.

[Note: Streams]
Of an update whose states rest on a disk windows are read ahead and written behind, so that reading,
updating and writing go on at once. In host memory the host works where they are: gradients come,
the host works, the new parameters leave.
"""

from collections.abc import Iterator, Mapping, Sequence

from shardwise.cost.engine import Compute, Instruction, Job, Submit, Wait
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
        if self._optim_tier(op) == "cpu":
            # Gradients come, the host works, new parameters leave.
            for stage in (
                *self._stages(op, "cpu", writes=True),
                *self._stages(op, "nvme", writes=False),
                *self._work(op),
                *self._stages(op, "cpu", writes=False),
                *self._stages(op, "nvme", writes=True),
            ):
                yield Compute(f"update {op.unit}", stage)
            return
        jobs = [
            Job("fetch", f"read states of {op.unit}", self._streamed(op, writes=False)),
            Job("store", f"write states of {op.unit}", self._streamed(op, writes=True)),
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
        reads, writes = (self._streamed(op, writes=writes) for writes in (False, True))
        read = Job(
            "read states", f"read states of {op.unit}", reads, (self._last,) if self._last else ()
        )
        exchange = self._exchange(op, before)
        update = Job(Lane.UPDATE.value, f"update {op.unit}", self._work(op), (read, *before))
        write = Job("write states", f"write states of {op.unit}", writes, (update,))
        for job in (read, *exchange, update, write):
            yield Submit(job)
        self._last = update
        self._beside += [*exchange, update, write]

    def _exchange(self, op: Op, before: Sequence[Job] = ()) -> list[Job]:
        """Gradients to a host that updates states of a disk, and new parameters back."""
        if self._optim_tier(op) != "nvme":
            return []
        stages = {
            "gradients": self._stages(op, "cpu", writes=True),
            "parameters": self._stages(op, "cpu", writes=False),
        }
        return [
            Job(f"exchange {what}", f"exchange {what} of {op.unit}", found, before)
            for what, found in stages.items()
            if any(stage.seconds for stage in found)
        ]

    def _streamed(self, op: Op, *, writes: bool) -> Stages:
        """What an update reads ahead, or writes behind: from a disk to the host, or else from any
        tier to the device."""
        tiers = ("nvme",) if self._optim_tier(op) == "nvme" else ("cpu", "nvme")
        return [stage for tier in tiers for stage in self._stages(op, tier, writes=writes)]

    def _stages(self, op: Op, tier: str, *, writes: bool) -> Stages:
        """What an update reads from a tier, or writes there."""
        move = op.on(tier)
        nbytes, to_host = move.writes if writes else move.reads, self._optim_tier(op) != "device"
        found = self._prices.move(tier, nbytes, writes=writes, to_host=to_host) if nbytes else None
        return [found] if found is not None else []

    def _work(self, op: Op) -> Stages:
        """The optimizer's own work, and the copy of what is new."""
        update = self._prices.update(self._numel(op), self._optim_tier(op))
        return [update, self._prices.copy(op.copies, "update")] if op.copies else [update]

    def _streams(self, op: Op) -> bool:
        return self._optim_tier(op) != "device" or bool(op.moves)

    def _optim_tier(self, op: Op) -> str:
        return self._units[op.unit].plan.optim.tier

    def _numel(self, op: Op) -> int:
        unit = self._units[op.unit]
        parts = unit.rungs.ladder.parts[unit.rungs.optim]
        return sum(flat.numel for flat in unit.trained) // parts
