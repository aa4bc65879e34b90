"""The control group: small exchanges between all ranks, always on gloo, with a time limit."""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.errors import SyncError
from shardwise.core.flight import AGREEMENT, RECORDER
from shardwise.device.choice import host_backend

_GRACE_S = 3.0


class Control:
    """Exchanges a few integers between all ranks, and reports which ranks are missing."""

    def __init__(self, world: int, rank: int, limit_s: float) -> None:
        self.world, self.rank, self._limit_s = world, rank, limit_s
        self._group: dist.ProcessGroup | None = None
        self._broken: SyncError | None = None
        if world > 1:
            limit = timedelta(seconds=limit_s)
            self._group = dist.new_group(backend=host_backend(), timeout=limit)
            self._name = f"shardwise/{self._group.group_name}"

    def exchange(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Every rank's ``values``, one row per rank; all must have the same number of them."""
        if self._group is None:
            return values.unsqueeze(0)
        if self._broken is not None:
            raise self._broken
        rows = torch.empty(self.world, values.numel(), dtype=values.dtype)
        RECORDER.begin(*_named(what))
        work = dist.all_gather(
            list(rows.unbind(0)), values.contiguous(), group=self._group, async_op=True
        )
        assert work is not None
        try:
            work.wait()
        except RuntimeError as error:
            self._broken = self._diagnose(what, error)
            raise self._broken from error
        RECORDER.end(*_named(what))
        return rows

    def exchange_objects(self, value: object) -> list[Any]:
        """Every rank's value, in order of the ranks."""
        found: list[Any] = [value] * self.world
        if self._group is not None:
            dist.all_gather_object(found, value, group=self._group)
        return found

    def highest(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The element-wise maximum over all ranks."""
        return self.exchange(values, what).amax(0)

    def broadcast_object(self, value: object, what: str) -> object:
        """Rank 0's value."""
        if self._group is None:
            return value
        box = [value]
        RECORDER.begin(*_named(what))
        try:
            dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as error:
            raise self._diagnose(what, error) from error
        RECORDER.end(*_named(what))
        return box[0]

    def gather_objects(self, value: object, what: str) -> list[object]:
        """Every rank's value, on rank 0; an empty list on other ranks."""
        if self._group is None:
            return [value]
        found: list[object] = [None] * self.world if self.rank == 0 else []
        try:
            dist.gather_object(value, found or None, dst=0, group=self._group)
        except RuntimeError as error:
            raise self._diagnose(what, error) from error
        return found

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a CPU tensor with that of rank 0."""
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def report(self, what: str) -> None:
        """Publish what this rank was doing, for error messages of other ranks."""
        if self._group is not None:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{self._name}/{self.rank}", what)

    def _diagnose(self, what: str, error: RuntimeError) -> SyncError:
        """An error with the place of every rank that gave up; the others did not arrive."""
        store = dist.distributed_c10d._get_default_store()
        places: dict[int, str] = {}
        try:
            self.report(what)
            deadline = time.monotonic() + _GRACE_S
            while len(places) < self.world and time.monotonic() < deadline:
                for rank in set(range(self.world)) - places.keys():
                    if store.check([f"{self._name}/{rank}"]):
                        places[rank] = store.get(f"{self._name}/{rank}").decode()
                time.sleep(0.05)
        except RuntimeError:  # the store's host has ended: report what is known
            places.setdefault(self.rank, what)
        missing = sorted(set(range(self.world)) - places.keys())
        lines = [f"Rank {self.rank} gave up on the {what} after at most {self._limit_s:.0f} s"]
        lines += [f"rank {r} was at the {w}" for r, w in sorted(places.items()) if r != self.rank]
        if missing:
            lines.append(f"rank(s) {', '.join(map(str, missing))} did not arrive")
        return SyncError("; ".join(lines) + f" ({str(error).splitlines()[0][:100]}).")


def _named(what: str) -> tuple[str, str]:
    """As the flight recorder has it: what it is about, and the unit if it is about one."""
    about, _, unit = what.partition(" of unit ")
    return AGREEMENT + about, unit.strip("'")
