"""A flat at run time: which elements of it this rank owns, and the memory that holds them.

Parameter memory (``params.py``) and gradient memory (``gradients.py``) are all local: tensors,
shards that rest somewhere, and the hops of one flat. ``execute.py`` decides nothing either, it only
says when.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.core.layout import FlatSpec
from shardwise.core.topology import Interval
from shardwise.core.wire import Format
from shardwise.plans.ops import Hop
from shardwise.plans.placed import updates_in_windows
from shardwise.plans.plan import Plan, Rungs, has_master
from shardwise.tier.pool import Pool
from shardwise.tier.rest import Homes, Rest

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


class Flat:
    """A flat buffer of a unit: its places on this rank, and its two kinds of memory."""

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
        """Elements of a part of the bottom rung: blocks of a wire format never straddle these."""
        self.has_master = has_master(plan, rungs, spec.dtype)
        """Whether the optimizer updates a copy of its own instead of P's memory."""
        self.updates_in_windows = updates_in_windows(plan, rungs, spec.dtype)
        """Whether the optimizer borrows slices of what it updates, because some of it is away."""
        self.window_numel = plan.tiers.window_numel
        self._rank, self._homes, self.optim_tier = rank, homes, plan.optim.tier
        self.part_at = self.interval(rungs.params)
        """This rank's shard of P."""
        self.optim_at = self.interval(rungs.optim)
        """This rank's shard of OS, inside that of P."""
        self.own = self.optim_at.relative_to(self.part_at.start)
        """OS's shard inside P's."""
        self.slots: list[ParamSlot] = []
        self.params = ParamMemory(self, plan, pools.params)
        self.grads = GradMemory(self, plan, pools.grads)

    def format(self, hop: Hop) -> Format | None:
        """How this flat travels on a hop; None: as it is."""
        return hop.format if self.dtypes.compute.is_floating_point else None

    def interval(self, rung: int) -> Interval:
        return self.rungs.ladder.interval(self._rank, rung, self.spec.numel)

    def rows(self, rung: int, top: int) -> slice:
        """Which of the granules that this rank owns on rung ``top`` it owns on a lower rung too."""
        part = self.interval(rung).relative_to(self.interval(top).start)
        return slice(part.start // self.granule, part.stop // self.granule)

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.dtypes.reduce

    def residual(self, hop: Hop) -> torch.Tensor | None:
        """What error feedback keeps of a hop, for ``comm/carry.py``."""
        return self.grads.residual(hop)

    def make_rest(self, tier: str, what: str, numel: int, dtype: torch.dtype) -> Rest:
        """A shard of this flat on a tier."""
        return self._homes.rest(tier, numel, dtype, f"{what} of unit '{self.unit_name}'")

    def make_state(self, key: str, dtype: torch.dtype) -> Rest:
        """Room for what the optimizer keeps for every element, where its states rest."""
        return self.make_rest(
            self.optim_tier, f"optimizer state '{key}'", self.optim_at.numel, dtype
        )
