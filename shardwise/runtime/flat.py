"""One flat of a unit at run time: its part, full buffer, gradients and master, and its hops.

Everything here is local memory and blocking hops; ``unit.py`` decides when, lanes run it. Where
parts are between their uses is ``rest.py``'s.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm.carry import Carrier, Leg, Outer, finish
from shardwise.comm.link import accumulate
from shardwise.core.errors import UsageError
from shardwise.core.layout import FlatSpec, Slot
from shardwise.core.ticket import DONE, Ticket
from shardwise.core.topology import Interval
from shardwise.core.wire import Format
from shardwise.plans.plan import Plan, Rungs, has_master
from shardwise.plans.schedule import Hop
from shardwise.runtime.surface.face import Face
from shardwise.tier.memory import SwappedBuffer, tensor_on
from shardwise.tier.pool import Pool, zeros
from shardwise.tier.rest import Homes, Loan, PartOf, Resident, Rest, Stored

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
        homes: Homes,
        pools: Pools,
        name: str = "",
    ) -> None:
        dtypes, device = Dtypes.of(plan, spec.dtype), homes.device
        self.spec, self.rungs, self.dtypes = spec, rungs, dtypes
        self._homes, self.unit_name = homes, name
        self._window_numel = plan.tiers.window_numel
        self._tiers = {"grads": plan.grads.tier, "optim": plan.optim.tier}
        self.granule = spec.numel // rungs.granules
        """Elements of a part of the bottom rung: blocks of a wire format never straddle these."""
        self.has_master = has_master(plan, rungs, spec.dtype)
        """Whether the optimizer updates a copy of its own instead of P's memory."""
        self._rank, self._device, self._pools = rank, device, pools
        self.part_at = self.interval(rungs.params)
        self.full = SwappedBuffer(spec.numel, dtypes.compute, device, pools.params)
        self.part: Rest
        if rungs.params == 0 and plan.params.tier == "device":
            # P rests in full: the full buffer is the part, and never dropped.
            self.full.fill()
            self.part = Resident(self.full.tensor)
        else:
            self.part = self.make_rest(
                plan.params.tier, "parameters", self.part_at.numel, dtypes.compute
            )
        self._fetching: Ticket | None = None
        self.kept: SwappedBuffer | None = None
        if rungs.keep not in (0, rungs.params):
            numel = self.interval(rungs.keep).numel
            self.kept = SwappedBuffer(numel, dtypes.compute, device, pools.params)

        # Trainable flats only:
        self.optim_at = self.interval(rungs.optim)
        self.master: Rest | None = None
        """OS's part in the master's dtype: elements of ``part`` unless ``has_master``."""
        self.grad: torch.Tensor | None = None
        """The full, local gradient of the current backward in the reduce dtype."""
        self._grad_storage: torch.UntypedStorage | None = None
        self.reduced: Rest | None = None
        """The reduced gradient on OS's rung, in the master's dtype; made when first needed."""
        self.held: Rest | None = None
        """Gradients accumulated under no_sync on G's rung, in the master's dtype."""
        self.grad_factor = 1.0
        """What a stored reduced gradient still has to be multiplied by; see ``scale_grads``."""
        self.grad_norms: dict[ParamSlot, torch.Tensor] = {}
        """Of a stored reduced gradient: norms of its parameters, taken when it was in memory."""
        self.closing: Ticket = DONE
        """Of the last reduction's sums that are still to go to their tier."""
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

    def make_rest(self, tier: str, what: str, numel: int, dtype: torch.dtype) -> Rest:
        """A part of this flat on a tier."""
        return self._homes.rest(tier, numel, dtype, f"{what} of unit '{self.unit_name}'")

    def make_state(self, key: str, dtype: torch.dtype) -> Rest:
        """Room for what the optimizer keeps for every element."""
        return self.make_rest(
            self._tiers["optim"], f"optimizer state '{key}'", self.optim_at.numel, dtype
        )

    @property
    def updates_in_windows(self) -> bool:
        """Whether the optimizer borrows slices of what it updates, because some of it is away."""
        tiers = set(self._tiers.values())
        return tiers != {"device"} or self.master is None or not self.master.is_resident

    # --- parameters ---------------------------------------------------------------------------

    def view(self, slot: Slot) -> torch.Tensor:
        """A parameter's place in the full buffer."""
        return self.full.tensor[slot.interval.relative_to(0)].view(slot.param.shape)

    @property
    def own(self) -> slice:
        """OS's part inside P's."""
        return self.optim_at.relative_to(self.part_at.start)

    def make_master(self, *, empty: bool = False) -> None:
        """``empty``: before P has any values."""
        if not self.has_master:
            self.master = PartOf(self.part, self.own)
            return
        numel, dtype = self.optim_at.numel, self.dtypes.master
        self.master = self.make_rest(self._tiers["optim"], "master weights", numel, dtype)
        if not empty:
            with self.part.use() as part, self.master.use(reads=False, writes=True) as master:
                master.copy_(part[self.own])

    @contextmanager
    def writing(self) -> Iterator[Callable[[Slot, torch.Tensor], None]]:
        """Gives a function that takes this rank's elements of a value, into part and master."""
        with ExitStack() as stack:
            targets = [(stack.enter_context(self.part.use(writes=True)), self.part_at)]
            if self.master is not None and self.has_master:
                master = stack.enter_context(self.master.use(writes=True))
                targets.append((master, self.optim_at))

            def write(slot: Slot, value: torch.Tensor) -> None:
                flat_value = value.reshape(-1)
                for buffer, place in targets:
                    common = slot.interval.intersect(place)
                    if common.numel:
                        source = flat_value[common.relative_to(slot.interval.start)]
                        buffer[common.relative_to(place.start)].copy_(source)

            yield write

    def write(self, slot: Slot, value: torch.Tensor) -> None:
        """Takes this rank's elements of one parameter's full value; nothing else is read."""
        targets = [(self.part, self.part_at)]
        if self.master is not None and self.has_master:
            targets.append((self.master, self.optim_at))
        for rest, place in targets:
            common = slot.interval.intersect(place)
            if common.numel:
                at = common.relative_to(place.start)
                loan = rest.lend(at.start, at.stop, reads=False)
                loan.wait().copy_(value.reshape(-1)[common.relative_to(slot.interval.start)])
                loan.give_back(changed=True)

    def prefetch(self) -> None:
        """Begins to bring the part from its tier: into the full buffer where that is all of it.

        That needs the buffer's memory, so without it nothing begins.
        """
        if self.rungs.params > 0:
            self.part.prefetch()
        elif self.full.filled and isinstance(self.part, Stored) and self._fetching is None:
            self._fetching = self.part.read_into(self.full.tensor)

    def gather(self, legs: Sequence[Leg], carrier: Carrier, *, from_part: bool) -> None:
        """Fills the full buffer from the part (or the kept rung), top rung last."""
        if not from_part:
            kept = self.interval(self.rungs.keep)
            self.full.tensor[kept.relative_to(0)].copy_(self.kept_tensor())
        elif self.rungs.params == 0 and isinstance(self.part, Stored):
            fetching = self._fetching or self.part.read_into(self.full.tensor)
            self._fetching = None
            fetching.wait()
        else:
            with self.part.use() as part:
                self.full.tensor[self.part_at.relative_to(0)].copy_(part, non_blocking=True)
        carrier.climb(self, self.full.tensor, 0, legs)

    def kept_tensor(self) -> torch.Tensor:
        assert self.kept is not None
        return self.kept.tensor

    def keep(self) -> None:
        """Copies the kept rung out of the full buffer."""
        if self.kept is not None:
            self.kept.fill()
            self.kept.tensor.copy_(self.full.tensor[self.interval(self.rungs.keep).relative_to(0)])

    def sends_differences(self, legs: Sequence[Leg]) -> bool:
        """Whether a refresh tells others how the new values differ from the old."""
        return bool(legs and (format := self.format(legs[0].hop)) and format.delta)

    def refresh(self, legs: Sequence[Leg], carrier: Carrier, *, own_is_new: bool) -> None:
        """Brings the updated master to P's rung.

        ``own_is_new``: the update has written this rank's own elements of P already.
        """
        assert self.master is not None
        origin, differs = self.part_at.start, self.sends_differences(legs)
        if not legs and (own_is_new or not self.has_master):
            return
        reads = differs or own_is_new or not self.has_master
        with self.part.use(reads=reads, writes=True) as part, self._on_device(part) as work:
            if differs:
                with self.master.use() as master:
                    new = master.to(self._device)
                    carrier.climb_by_difference(self, new, work, origin, legs)
            else:
                if self.has_master and not own_is_new:
                    with self.master.use() as master:
                        work[self.own].copy_(master)
                carrier.climb(self, work, origin, legs)
            if not self.part.is_resident:
                finish(legs)  # others read this memory, which goes now

    @contextmanager
    def _on_device(self, part: torch.Tensor) -> Iterator[torch.Tensor]:
        """A part where hops can take it: itself, or a copy that comes back at the end."""
        if part.device.type == self._device.type:
            yield part
            return
        copy = part.to(self._device)
        yield copy
        part.copy_(copy)

    # --- gradients ----------------------------------------------------------------------------

    def open_grad(self) -> torch.Tensor:
        """The buffer that the gradients of this backward are written to."""
        if self.grad is None:
            self._grad_storage = self._pools.grads.take(
                self.spec.numel * self.dtypes.reduce.itemsize
            )
            self.grad = tensor_on(self._grad_storage, self.spec.numel, self.dtypes.reduce)
        return self.grad

    def take_grad(self) -> "FullGrad":
        """Hands the gradient buffer over to a reduction."""
        grad = self.open_grad()
        assert self._grad_storage is not None
        taken = FullGrad(grad, self._grad_storage, self._pools.grads)
        self.grad = self._grad_storage = None
        return taken

    def make_reduced(self) -> Rest:
        if self.reduced is None:
            self.reduced = self._make_grads("gradients", self.optim_at.numel)
        return self.reduced

    def _make_grads(self, what: str, numel: int) -> Rest:
        return self.make_rest(self._tiers["grads"], what, numel, self.dtypes.master)

    def hold(self, grad: torch.Tensor, legs: Sequence[Leg], carrier: Carrier) -> None:
        """Under no_sync: reduces to G's rung and adds to what is held there."""
        add = self.holds
        if self.held is None:
            numel = self.interval(self.rungs.grads).numel
            self.held = self._make_grads("accumulated gradients", numel)
        with self.held.use(reads=add, writes=True) as rested, self._on_device(rested) as held:
            if legs:
                carrier.descend(self, grad, 0, legs, held, scale=1.0, add=add)
            else:
                own = grad[self.interval(self.rungs.grads).relative_to(0)]
                accumulate(own, held, scale=1.0, add=add)
        self.holds = True

    def open_sums(self, *, add: bool) -> "Sums":
        """The reduced gradient for a reduction; ``add``: with what it holds."""
        self.closing.wait()
        if not add:
            self.grad_factor = 1.0
        self.grad_norms = {}
        return Sums(self, add)

    @property
    def _sums_in_windows(self) -> bool:
        """Whether gradients go to their tier piece by piece: nobody else has any, so no hop needs
        them as a whole."""
        return self.rungs.bottom == 0 and not self.grads_are_resident

    def reduce(
        self,
        grad: torch.Tensor,
        legs: Sequence[Leg],
        carrier: Carrier,
        sums: "Sums",
        *,
        scale: float,
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
            assert self.held is not None
            with self.held.use() as held:
                grad = grad[self.interval(top).relative_to(0)].copy_(held)
        if self._sums_in_windows:
            self._sum_in_windows(grad, scale=scale, add=sums.add)
            return
        bottom = self.interval(self.rungs.bottom)
        out = sums.tensor[bottom.relative_to(self.optim_at.start)]
        if not legs:
            grad = grad[bottom.relative_to(self.interval(top).start)]
        carrier.descend(self, grad, top, legs, out, scale=scale, add=sums.add, outer=outer)

    def _sum_in_windows(self, grad: torch.Tensor, *, scale: float, add: bool) -> None:
        reduced = self.make_reduced()
        for start in range(0, self.spec.numel, self._window_numel):
            place = Interval(start, min(start + self._window_numel, self.spec.numel))
            loan = reduced.lend(place.start, place.stop, reads=add)
            sums = loan.wait()
            if add and self.grad_factor != 1.0:
                sums.mul_(self.grad_factor)
            accumulate(grad[place.relative_to(0)].to(sums.device), sums, scale=scale, add=add)
            self.note_norms(sums, place)
            loan.give_back(changed=True)
        self.grad_factor = 1.0

    def note_norms(self, sums: torch.Tensor, place: Interval) -> None:
        """Norms while gradients are in memory, so that clipping need not read them again."""
        parts = {slot: slot.of(sums, place) for slot in self.slots}
        found = {slot: part for slot, part in parts.items() if part is not None}
        norms = torch._foreach_norm(list(found.values())) if found else ()
        for slot, norm in zip(found, norms, strict=True):
            before = self.grad_norms.get(slot)
            self.grad_norms[slot] = norm if before is None else torch.hypot(before, norm)

    def spread(self, legs: Sequence[Leg], carrier: Carrier, sums: "Sums") -> None:
        """Replicas of OS's part collect the sums that others made."""
        if legs:
            carrier.climb(self, sums.tensor, self.optim_at.start, legs, self.dtypes.reduce)

    @contextmanager
    def open_grads(self, *, writes: bool = False) -> Iterator["OpenGrads"]:
        """What this rank has of the gradients, in memory."""
        with ExitStack() as stack:
            reduced = held = None
            if self.reduced is not None and self.reduced_valid:
                scales = self.grad_factor != 1.0
                reduced = stack.enter_context(self.reduced.use(writes=writes or scales))
                if scales:
                    reduced.mul_(self.grad_factor)
                    self.grad_factor = 1.0
                if writes or scales:
                    self.grad_norms = {}
            if self.held is not None and self.holds:
                held = stack.enter_context(self.held.use(writes=writes))
            yield OpenGrads(self, reduced, held)

    @property
    def grads_are_resident(self) -> bool:
        return self._tiers["grads"] != "nvme"

    def scale_grads(self, factor: float) -> None:
        """Multiplies a stored reduced gradient when it is next in memory."""
        self.grad_factor *= factor

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


class Sums:
    """A flat's reduced gradient in memory, on the device, while a reduction adds to it."""

    def __init__(self, flat: Flat, add: bool) -> None:
        self.flat, self.add = flat, add
        self._loan: Loan | None = None
        if flat._sums_in_windows:
            return  # each window is opened for itself
        self._loan = flat.make_reduced().lend(0, flat.optim_at.numel, reads=add)
        rested = self._loan.wait()
        if flat.grad_factor != 1.0:
            rested.mul_(flat.grad_factor)
            flat.grad_factor = 1.0
        self.tensor = rested.to(flat._device, non_blocking=True)

    def close(self) -> None:
        """They begin to go to their tier."""
        flat, loan = self.flat, self._loan
        if loan is None:
            return
        if not flat.grads_are_resident:
            flat.note_norms(self.tensor, flat.optim_at)
        if self.tensor is not loan.tensor:
            loan.tensor.copy_(self.tensor)
        loan.give_back(changed=True)


@dataclass(frozen=True)
class OpenGrads:
    """A flat's gradients on this rank while they are in memory."""

    flat: Flat
    reduced: torch.Tensor | None
    held: torch.Tensor | None

    def reduced_of(self, slot: "ParamSlot") -> torch.Tensor | None:
        """A parameter's reduced gradient, flat; None if this rank has nothing of it."""
        return slot.of(self.reduced, self.flat.optim_at)

    def of(self, slot: "ParamSlot") -> list[torch.Tensor]:
        """All that this rank has of a parameter's gradient: reduced, and held under no_sync."""
        held = slot.of(self.held, self.flat.interval(self.flat.rungs.grads))
        return [part for part in (self.reduced_of(slot), held) if part is not None]


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
    """A parameter's place in the sharded world, or that of one of its tiles.

    It answers for the values while they are guarded.
    """

    unit: "Unit"
    runtime: "Runtime"

    def __init__(
        self, parameter: nn.Parameter, spec: Slot, flat: Flat, face: Face, start: int = 0
    ) -> None:
        self.name, self.spec, self.flat = spec.param.name, spec, flat
        self.parameter = parameter
        """What is computed with: the user's own, or a tile's."""
        self.face, self.start = face, start
        """The parameter as the user sees it, and where in it (in elements) this slot begins."""
        face.slots.append(self)
        self.segment = spec.interval.intersect(flat.optim_at)
        """The elements of this parameter that OS's part on this rank covers; may be empty."""
        self.has_grad = False
        """Whether a gradient was accumulated and not dropped; alike on all ranks once reduced."""
        self.accumulate: torch.autograd.graph.Node | None = None
        """Autograd's node that puts gradients into ``parameter.grad``; see ``hooks.py``."""
        self.arrivals = 0
        """Local gradients that arrived in the current backward."""
        self.pending = False
        """Whether the flat's open gradient buffer has one from this parameter."""
        self.used = False
        """Whether any local gradient arrived since the last synchronisation."""
        self.spent = 0
        """How many optimizers backward has stepped with the gradient."""

    def require_unspent(self) -> None:
        if self.spent:
            raise UsageError(
                f"The gradient of '{self.name}' cannot be changed any more: backward has updated "
                "the parameter with it; set tiers.update = 'step' in the plan."
            )

    def access(self, what: str) -> None:
        """A guarded parameter's values are asked for."""
        self.runtime.access(self, what)

    def write(self, value: torch.Tensor) -> None:
        """Overwrites the parameter by a full value that all ranks pass alike."""
        self.runtime.write(self, value)

    def of(self, buffer: torch.Tensor | None, place: Interval) -> torch.Tensor | None:
        """This parameter's elements of a buffer that covers ``place``; None if there are none."""
        common = self.spec.interval.intersect(place)
        if buffer is None or not common.numel:
            return None
        return buffer[common.relative_to(place.start)]

    @property
    def part_shape(self) -> torch.Size:
        """The shape of this rank's part of it and of its states: flat, but a scalar stays one."""
        scalar = self.spec.param.shape == () and self.segment.numel
        return torch.Size(() if scalar else (self.segment.numel,))

    @property
    def own(self) -> slice:
        """The elements of the user's parameter that OS's part on this rank covers here."""
        return self.segment.relative_to(self.spec.interval.start - self.start)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This slot's elements of a value of the user's parameter; flat."""
        return whole.reshape(-1)[self.start : self.start + self.spec.param.numel]
