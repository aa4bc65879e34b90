"""One flat of a unit at run time: its part, full buffer, gradients and master, and its hops.

Everything here is local memory and blocking hops; ``unit.py`` decides when, lanes run it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm.link import accumulate
from shardwise.core.layout import FlatSpec, Slot
from shardwise.core.topology import Interval
from shardwise.core.wire import Format
from shardwise.plan.plan import Plan, Rungs, has_master
from shardwise.plan.schedule import Hop
from shardwise.runtime.carry import Carrier, Leg, Outer
from shardwise.runtime.memory import SwappedBuffer
from shardwise.tier.pool import Pool, zeros

if TYPE_CHECKING:
    from shardwise.runtime.runtime import Runtime
    from shardwise.runtime.unit import Unit


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one flat; see ``plan.Precision``."""

    compute: torch.dtype
    reduce: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, plan: Plan, dtype: str) -> "Dtypes":
        precision = plan.precision
        return cls(
            torch_dtype(precision.compute_dtype(dtype)),
            torch_dtype(precision.reduce_dtype(dtype)),
            torch_dtype(precision.master_dtype(dtype)),
        )


@dataclass(frozen=True)
class Pools:
    """Working memory shared by all units of a model."""

    params: Pool
    grads: Pool


class Flat:
    """A flat buffer and everything that belongs to it on this rank."""

    def __init__(
        self,
        spec: FlatSpec,
        rungs: Rungs,
        rank: int,
        plan: Plan,
        device: torch.device,
        pools: Pools,
    ) -> None:
        dtypes = Dtypes.of(plan, spec.dtype)
        self.spec, self.rungs, self.dtypes = spec, rungs, dtypes
        self.granule = spec.numel // rungs.granules
        """Elements of a part of the bottom rung: blocks of a wire format never straddle these."""
        self.has_master = has_master(plan, rungs, spec.dtype)
        """Whether the optimizer updates a copy of its own instead of P's memory."""
        self._rank, self._device, self._pools = rank, device, pools
        self.part_at = self.interval(rungs.params)
        self.full = SwappedBuffer(spec.numel, dtypes.compute, device, pools.params)
        if rungs.params == 0:
            # P rests in full: the full buffer is the part, and never dropped.
            self.full.fill()
            self.part = self.full.tensor
        else:
            self.part = zeros(self.part_at.numel, dtypes.compute, device)
        self.kept: SwappedBuffer | None = None
        if rungs.keep not in (0, rungs.params):
            numel = self.interval(rungs.keep).numel
            self.kept = SwappedBuffer(numel, dtypes.compute, device, pools.params)

        # Trainable flats only:
        self.optim_at = self.interval(rungs.optim)
        self.master: torch.Tensor | None = None
        """OS's part in the master's dtype: a view of ``part`` unless ``has_master``."""
        self.grad: torch.Tensor | None = None
        """The full, local gradient of the current backward in the reduce dtype."""
        self._grad_storage: torch.UntypedStorage | None = None
        self.reduced: torch.Tensor | None = None
        """The reduced gradient on OS's rung, in the master's dtype; made when first needed."""
        self.held: torch.Tensor | None = None
        """Gradients accumulated under no_sync on G's rung, in the master's dtype."""
        self.holds = False
        """Whether ``held`` has anything since it was last dropped or reduced on."""
        self.reduced_valid = False
        """Whether ``reduced`` has anything since it was last dropped."""
        self.lost: torch.Tensor | None = None
        """What error feedback will add to the next gradients; see ``residual``."""
        self.slots: list[ParamSlot] = []

    def format(self, hop: Hop) -> Format | None:
        """How this flat travels on a hop; None: as it is."""
        return hop.format if self.dtypes.compute.is_floating_point else None

    def interval(self, rung: int) -> Interval:
        return self.rungs.ladder.interval(self._rank, rung, self.spec.numel)

    def rows(self, rung: int, top: int) -> slice:
        """Which of the granules that this rank owns on rung ``top`` it owns on a lower rung too."""
        part = self.interval(rung).relative_to(self.interval(top).start)
        return slice(part.start // self.granule, part.stop // self.granule)

    # --- parameters ---------------------------------------------------------------------------

    def view(self, slot: Slot) -> torch.Tensor:
        """A parameter's place in the full buffer."""
        return self.full.tensor[slot.interval.relative_to(0)].view(slot.param.shape)

    def make_master(self) -> None:
        own = self.part[self.optim_at.relative_to(self.part_at.start)]
        if self.has_master:
            self.master = zeros(own.numel(), self.dtypes.master, self._device)
            self.master.copy_(own)
        else:
            self.master = own

    def write(self, slot: Slot, value: torch.Tensor) -> None:
        """Takes this rank's elements of a parameter's full value, into part and master."""
        flat_value = value.reshape(-1)
        targets = [(self.part, self.part_at)]
        if self.master is not None and self.has_master:
            targets.append((self.master, self.optim_at))
        for buffer, place in targets:
            common = slot.interval.intersect(place)
            if common.numel:
                source = flat_value[common.relative_to(slot.interval.start)]
                buffer[common.relative_to(place.start)].copy_(source)

    def gather(self, legs: Sequence[Leg], carrier: Carrier) -> None:
        """Fills the full buffer from the part (or the kept rung), top rung last."""
        lowest = legs[0].low if legs else self.rungs.params
        source = self.part if lowest == self.rungs.params else self.kept_tensor()
        self.full.tensor[self.interval(lowest).relative_to(0)].copy_(source)
        carrier.climb(self, self.full.tensor, 0, legs)

    def kept_tensor(self) -> torch.Tensor:
        assert self.kept is not None
        return self.kept.tensor

    def keep(self) -> None:
        """Copies the kept rung out of the full buffer."""
        if self.kept is not None:
            self.kept.fill()
            self.kept.tensor.copy_(self.full.tensor[self.interval(self.rungs.keep).relative_to(0)])

    def refresh(self, legs: Sequence[Leg], carrier: Carrier) -> None:
        """Brings the updated master to P's rung."""
        assert self.master is not None
        origin = self.part_at.start
        if legs and (format := self.format(legs[0].hop)) and format.delta:
            carrier.climb_by_difference(self, self.master, self.part, origin, legs)
            return
        if self.has_master:
            self.part[self.optim_at.relative_to(origin)].copy_(self.master)
        carrier.climb(self, self.part, origin, legs)

    # --- gradients ----------------------------------------------------------------------------

    def open_grad(self) -> torch.Tensor:
        """The buffer that the gradients of this backward are written to."""
        if self.grad is None:
            self._grad_storage = self._pools.grads.take(
                self.spec.numel * self.dtypes.reduce.itemsize
            )
            self.grad = torch.empty(0, dtype=self.dtypes.reduce, device=self._device).set_(
                self._grad_storage, 0, (self.spec.numel,)
            )
        return self.grad

    def take_grad(self) -> "FullGrad":
        """Hands the gradient buffer over to a reduction."""
        grad = self.open_grad()
        assert self._grad_storage is not None
        taken = FullGrad(grad, self._grad_storage, self._pools.grads)
        self.grad = self._grad_storage = None
        return taken

    def open_reduced(self) -> torch.Tensor:
        if self.reduced is None:
            self.reduced = zeros(self.optim_at.numel, self.dtypes.master, self._device)
        return self.reduced

    def open_held(self) -> torch.Tensor:
        if self.held is None:
            numel = self.interval(self.rungs.grads).numel
            self.held = zeros(numel, self.dtypes.master, self._device)
        return self.held

    def hold(self, grad: torch.Tensor, legs: Sequence[Leg], carrier: Carrier) -> None:
        """Under no_sync: reduces to G's rung and adds to what is held there."""
        held, add = self.open_held(), self.holds
        if legs:
            carrier.descend(self, grad, 0, legs, held, scale=1.0, add=add)
        else:
            own = grad[self.interval(self.rungs.grads).relative_to(0)]
            accumulate(own, held, scale=1.0, add=add)
        self.holds = True

    def reduce(
        self,
        grad: torch.Tensor,
        legs: Sequence[Leg],
        carrier: Carrier,
        *,
        scale: float,
        add: bool,
        outer: Outer | None = None,
    ) -> None:
        """Reduces to the bottom, into this rank's bottom part of ``reduced``.

        With ``outer`` the last leg goes on there.
        """
        top = 0
        if self.holds:
            top = self.rungs.grads
            self.hold(grad, [leg for leg in legs if leg.high < top], carrier)
            legs = [leg for leg in legs if leg.high >= top]
            self.holds = False
            # As it was computed, so that what is raw travels in the reduce dtype here as well.
            grad = grad[self.interval(top).relative_to(0)].copy_(self.open_held())
        bottom = self.interval(self.rungs.bottom)
        out = self.open_reduced()[bottom.relative_to(self.optim_at.start)]
        if not legs:
            grad = grad[bottom.relative_to(self.interval(top).start)]
        carrier.descend(self, grad, top, legs, out, scale=scale, add=add, outer=outer)

    def spread(self, legs: Sequence[Leg], carrier: Carrier) -> None:
        """Replicas of OS's part collect the sums that others made."""
        if legs:
            carrier.climb(self, self.open_reduced(), self.optim_at.start, legs, self.dtypes.reduce)

    def residual(self, hop: Hop) -> torch.Tensor | None:
        """What earlier reductions lost on a hop with error feedback: a row for each other member.

        Only on the hop to the bottom, where it is smallest. Made when first needed; see
        ``carry._add_residual``.
        """
        format = self.format(hop)
        is_last = self.rungs.ladder.parts[hop.step + 1] == self.rungs.granules
        if format is None or not format.feedback or not is_last:
            return None
        if self.lost is None:
            numel = (hop.size - 1) * self.granule
            self.lost = zeros(numel, torch.float32, self._device).view(-1, self.granule)
        return self.lost


@dataclass
class FullGrad:
    """A full gradient buffer on its way through a reduction."""

    tensor: torch.Tensor
    _storage: torch.UntypedStorage
    _pool: Pool

    def release(self) -> None:
        """Back to the pool, once no rank reads it any more."""
        self._pool.give(self._storage)


class ParamSlot:
    """One parameter of the user's model and its place in the sharded world.

    It answers for the parameter and its gradient while they are guarded.
    """

    unit: "Unit"
    runtime: "Runtime"

    def __init__(self, name: str, parameter: nn.Parameter, spec: Slot, flat: Flat) -> None:
        self.name, self.parameter, self.spec, self.flat = name, parameter, spec, flat
        self.segment = spec.interval.intersect(flat.optim_at)
        """The elements of this parameter that OS's part on this rank covers; may be empty."""
        self.has_grad = False
        """Whether a gradient was accumulated and not dropped; alike on all ranks once reduced."""
        self.handle: torch.Tensor | None = None
        """What was put into ``parameter.grad``; see ``grads.py``."""
        self.emptied = False
        """Whether ``parameter.grad`` was emptied for autograd, and not by the user."""
        self.guarded: torch.Tensor | None = None
        self.accumulate: torch.autograd.graph.Node | None = None
        """Autograd's node that puts gradients into ``parameter.grad``; see ``hooks.py``."""
        self.arrivals = 0
        """Local gradients that arrived in the current backward."""
        self.pending = False
        """Whether the flat's open gradient buffer has one from this parameter."""
        self.used = False
        """Whether any local gradient arrived since the last synchronisation."""

    def access(self, what: str) -> None:
        """A guarded parameter's values are asked for."""
        self.runtime.access(self, what)

    def write(self, value: torch.Tensor) -> None:
        """Overwrites the parameter by a full value that all ranks pass alike."""
        self.runtime.write(self, value)

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.flat.dtypes.master

    def highest(self, flag: torch.Tensor) -> torch.Tensor:
        return self.runtime.grid.control.highest(flag.reshape(-1).cpu(), "check for overflow")

    def of(self, buffer: torch.Tensor | None, place: Interval) -> torch.Tensor | None:
        """This parameter's elements of a buffer that covers ``place``; None if there are none."""
        common = self.spec.interval.intersect(place)
        if buffer is None or not common.numel:
            return None
        return buffer[common.relative_to(place.start)]

    def master_part(self) -> torch.Tensor | None:
        return self.of(self.flat.master, self.flat.optim_at)

    def grad_part(self) -> torch.Tensor | None:
        """This parameter's reduced gradient on this rank, flat."""
        flat = self.flat
        return self.of(flat.reduced if flat.reduced_valid else None, flat.optim_at)

    def grad_parts(self) -> list[torch.Tensor]:
        """All that this rank has of the gradient: reduced, and held under no_sync."""
        flat = self.flat
        held = self.of(flat.held if flat.holds else None, flat.interval(flat.rungs.grads))
        return [part for part in (self.grad_part(), held) if part is not None]
