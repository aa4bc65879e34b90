"""A flat at run time: which of its elements this rank owns, and the memory that holds them.

Parameter memory (``params.py``) and gradient memory (``gradients.py``) know only this rank and one
flat: its tensors, its shards and its hops. They decide nothing: ``execute.py`` calls their verbs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.core.layout import FlatSpec
from shardwise.core.topology import Interval
from shardwise.core.wire import Format
from shardwise.device.abilities import separate_memory
from shardwise.plans.ops import Hop
from shardwise.plans.placed import updates_in_windows
from shardwise.plans.plan import Plan, Rungs, has_master, rests_in_master
from shardwise.tier.pool import Pool
from shardwise.tier.rest import Homes, Rest
from shardwise.tier.staging import Staging

if TYPE_CHECKING:
    from shardwise.runtime.slot import ParamSlot


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
    staging: Staging
    """For shards that rest on another tier than the device."""

    def trim(self) -> None:
        """Between passes: other allocations on a device may use the memory of idle buffers. On CPU
        it stays, because fresh pages cost more than a device's cached ones."""
        if separate_memory(self.staging.device):
            for pool in (self.params, self.grads, self.staging.on_device):
                pool.trim()


class Flat:
    """A flat buffer of a unit: its intervals on this rank, its parameters and its gradients."""

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
        from shardwise.runtime.gradients import GradMemory
        from shardwise.runtime.params import ParamMemory

        self.spec, self.rungs, self.unit_name = spec, rungs, name
        self.dtypes, self.device = Dtypes.of(plan, spec.dtype), homes.device
        self.granule = spec.numel // rungs.granules
        """Elements of a shard of the bottom rung. A wire format's blocks never cross its ends."""
        self.has_master = has_master(plan, rungs, spec.dtype)
        """Whether the optimizer updates a separate master copy instead of P's memory."""
        self.rests_in_master = spec.requires_grad and rests_in_master(plan, rungs, spec.dtype)
        """Whether that copy is P's shard as well: gathers cast it."""
        self.updates_in_windows = updates_in_windows(plan, rungs, spec.dtype)
        """Whether the optimizer works on borrowed slices, because some state rests on a tier."""
        self.window_numel = plan.tiers.window_numel
        self.staging = pools.staging
        self._rank, self._homes, self.optim_tier = rank, homes, plan.optim.tier
        self.part_at = self.interval(rungs.params)
        """This rank's shard of P."""
        self.optim_at = self.interval(rungs.optim)
        """This rank's shard of OS; it lies inside the shard of P."""
        self.own = self.optim_at.relative_to(self.part_at.start)
        """The same, relative to the start of P's shard."""
        self.slots: list[ParamSlot] = []
        self.params = ParamMemory(self, plan, pools.params)
        self.grads = GradMemory(self, plan, pools.grads)

    def format(self, hop: Hop) -> Format | None:
        """This flat's wire format on a hop; None: raw."""
        return hop.format if self.dtypes.compute.is_floating_point else None

    def interval(self, rung: int) -> Interval:
        return self.rungs.ladder.interval(self._rank, rung, self.spec.numel)

    def rows(self, rung: int, top: int) -> slice:
        """The granules of this rank's shard on rung ``top`` that its shard on ``rung`` has too."""
        part = self.interval(rung).relative_to(self.interval(top).start)
        return slice(part.start // self.granule, part.stop // self.granule)

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.dtypes.reduce

    def residual(self, hop: Hop) -> torch.Tensor | None:
        """What error feedback keeps for a hop; used by ``comm/carry.py``."""
        return self.grads.residual(hop)

    def make_rest(self, tier: str, what: str, numel: int, dtype: torch.dtype) -> Rest:
        """Allocates a shard of this flat on a tier."""
        return self._homes.rest(tier, numel, dtype, f"{what} of unit '{self.unit_name}'")

    def make_unfilled(self, what: str, numel: int, dtype: torch.dtype) -> Rest:
        """A shard on the device with arbitrary contents, in memory that is of use to compute as
        soon as it is freed."""
        with self.staging.on_device.at_home():
            return self._homes.unfilled(numel, dtype, f"{what} of unit '{self.unit_name}'")

    def make_state(self, key: str, dtype: torch.dtype) -> Rest:
        """Allocates a per-element optimizer state on the tier of OS."""
        return self.make_rest(
            self.optim_tier, f"optimizer state '{key}'", self.optim_at.numel, dtype
        )
