"""What a rank saves: pieces of the model's and the optimizer's tensors, straight from its shards.

Every rank owns one interval of each flat on the bottom rung of the ladder. These intervals cover
the flat, and no two overlap, whatever the plan replicates. So each rank writes its own, from the
master weights where there are any. P is written as well only where it cannot be computed from them:
after lossy refreshes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.checkpoint.training.index import ITEM_BYTES
from shardwise.checkpoint.values import Named, named_tensors
from shardwise.core.errors import UsageError
from shardwise.core.topology import Interval
from shardwise.device.abilities import separate_memory
from shardwise.plans.plan import format_of
from shardwise.runtime.flat import Flat
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.unit import Unit
from shardwise.tier.rest import Loan, Resident, Rest
from shardwise.tier.staging import Staging

MODEL, OPTIM, COMPUTE, OWN = "model", "optim.state", "compute", "shardwise"
WINDOW_BYTES = 1 << 22
"""Shards are read from the device and from disks in windows of this size."""


@dataclass(frozen=True)
class Piece:
    """An interval of a tensor, and the memory or tier that has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    rest: Rest
    at: int = 0
    """Where the interval begins in ``rest``."""

    def data(self, staging: Staging) -> Iterator[memoryview]:
        """Its bytes, window by window; each is valid until the next is asked for, and the next one
        is on its way meanwhile."""
        loans: deque[Loan] = deque()
        step = max(1, WINDOW_BYTES // self.rest.dtype.itemsize)
        end = self.at + self.stop - self.start
        try:
            for begin in range(self.at, end, step):
                loan = self.rest.lend(begin, min(begin + step, end))
                on_device = separate_memory(loan.tensor.device)
                loans.append(staging.fetch(loan) if on_device else loan)
                if len(loans) > 1:
                    yield bytes_of(loans[0].arrived())
                    loans.popleft().give_back(changed=False)
            if loans:
                yield bytes_of(loans[0].arrived())
        finally:
            for loan in loans:
                loan.give_back(changed=False)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous flat CPU tensor."""
    data: memoryview = tensor.detach().view(torch.uint8).numpy().data
    return data


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Contents:
    """The pieces that this rank writes."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer | None, *, trained: bool) -> None:
        self._runtime, self._optimizer, self._trained = runtime, optimizer, trained
        self.tensors = named_tensors(runtime)
        self.names = {id(tensor.tensor): tensor.name for tensor in self.tensors}
        self._takeover = runtime.steps.takeover_of(optimizer) if optimizer is not None else None

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied tensors."""
        return {
            f"{MODEL}.{alias}": f"{MODEL}.{tensor.name}"
            for tensor in self._kept
            for alias in tensor.names[1:]
        }

    @property
    def buffers(self) -> list[Named]:
        return [tensor for tensor in self._kept if not tensor.slots]

    @property
    def empty(self) -> list[Named]:
        """Parameters without elements, which are in nobody's shard."""
        return [tensor for tensor in self._kept if tensor.slots and not tensor.tensor.numel()]

    @property
    def _kept(self) -> list[Named]:
        if not self._trained:
            return self.tensors
        return [t for t in self.tensors if t.slots and t.slots[0].is_trained]

    def name_of(self, slot: ParamSlot) -> str:
        return self.names[id(slot.face.parameter)]

    def of_unit(self, unit: Unit) -> Iterator[Piece]:
        """The pieces of a unit's parameters and states, in the order in which they rest."""
        for flat in unit.flats:
            own = flat.interval(flat.rungs.bottom)
            slots = [slot for slot in flat.slots if slot.is_trained or not self._trained]
            rest, origin = weights_of(flat)
            yield from self._weights(slots, own, rest, origin, MODEL)
            if keeps_compute(self._runtime, unit, flat):
                place = flat.part_at.start
                yield from self._weights(slots, own, flat.params.shard, place, COMPUTE)
            if self._takeover is not None and flat.spec.requires_grad:
                yield from self._states(slots, own)

    def _weights(
        self, slots: list[ParamSlot], own: Interval, rest: Rest, origin: int, prefix: str
    ) -> Iterator[Piece]:
        for slot in slots:
            common = slot.spec.interval.intersect(own)
            if common.numel:
                name = f"{prefix}.{self.name_of(slot)}"
                yield _piece(slot, common, name, rest, common.start - origin)

    def _states(self, slots: list[ParamSlot], own: Interval) -> Iterator[Piece]:
        assert self._takeover is not None
        by_key: dict[str, list[Piece]] = {}
        for slot in slots:
            common = slot.spec.interval.intersect(own)
            if not common.numel:
                continue
            prefix = f"{OPTIM}.{self.name_of(slot)}"
            numbers, tensors = self._takeover.states.at_rest(slot)
            for key, rest in tensors.items():
                at = common.start - slot.segment.start
                piece = _piece(slot, common, f"{prefix}.{key}", rest, at)
                by_key.setdefault(key, []).append(piece)
            if common.start == slot.spec.interval.start and slot.start == 0:
                for key, value in numbers.items():
                    if isinstance(value, torch.Tensor):
                        yield small(f"{prefix}.{key}", value)
        for pieces in by_key.values():
            yield from pieces

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Numbers of the parameters that begin in this rank's shards, by parameter and key."""
        found: dict[str, dict[str, Any]] = {}
        for slot in self._runtime.trained_slots if self._takeover is not None else ():
            own = slot.flat.interval(slot.flat.rungs.bottom)
            start = slot.spec.interval.start
            if slot.start or not own.start <= start < own.stop:
                continue
            numbers, tensors = self._takeover.states.at_rest(slot)  # type: ignore[union-attr]
            if numbers or tensors:
                found[self.name_of(slot)] = {
                    key: value
                    for key, value in numbers.items()
                    if not isinstance(value, torch.Tensor)
                }
        return found

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters."""
        found = []
        for number, group in enumerate(self._optimizer.param_groups if self._optimizer else ()):
            names = []
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    raise UsageError(
                        f"Group {number} of the optimizer has a parameter that is not in the model "
                        "being saved; save it with the model that it belongs to."
                    )
                names.append(self.names[id(parameter)])
            found.append({**group, "params": names})
        return found


def weights_of(flat: Flat) -> tuple[Rest, int]:
    """The most exact values of a flat's parameters, and the element where they begin."""
    if flat.params.master is not None:
        return flat.params.master, flat.optim_at.start
    return flat.params.shard, flat.part_at.start


def keeps_compute(runtime: Runtime, unit: Unit, flat: Flat) -> bool:
    """Whether P cannot be computed from the master weights."""
    if flat.params.master is None or not flat.has_master or flat.rests_in_master:
        return False
    if flat.dtypes.master.itemsize < flat.dtypes.compute.itemsize:
        return True  # until the first step P has more digits
    plan, rungs = runtime.plan.for_unit(unit.name), flat.rungs
    climb = rungs.ladder.steps[rungs.params : rungs.optim]
    return any(format_of(plan.optim.wire, step, flat.spec.dtype) for step in climb if step.size > 1)


def small(name: str, value: torch.Tensor) -> Piece:
    """A whole tensor in memory."""
    dtype = dtype_name(value.dtype)
    if dtype not in ITEM_BYTES or value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise UsageError(
            f"'{name}' is a tensor of {dtype} in layout {layout}, which a checkpoint cannot keep; "
            "convert it, or register it with persistent=False."
        )
    flat = value.detach().cpu().contiguous().reshape(-1).clone()
    return Piece(name, dtype, tuple(value.shape), 0, flat.numel(), Resident(flat))


def _piece(slot: ParamSlot, common: Interval, name: str, rest: Rest, at: int) -> Piece:
    start = common.start - slot.spec.interval.start + slot.start
    shape = tuple(slot.face.parameter.shape)
    return Piece(name, dtype_name(rest.dtype), shape, start, start + common.numel, rest, at)
