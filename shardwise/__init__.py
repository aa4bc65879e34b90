"""shardwise: train PyTorch models whose states do not fit where they are.

>>> import shardwise as sw
>>> sw.presets.zero3().params.spread
'world'
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardwise.api import (
        clip_grad_norm_,
        export,
        full_grads,
        full_params,
        load_pretrained,
        no_sync,
        optim_state_dict,
        set_grad_divisor,
        shard,
        state_dict,
        stats,
        unshard,
    )
    from shardwise.checkpoint.training.background import Pending
    from shardwise.checkpoint.training.load import Resumed
    from shardwise.core.errors import PlanError, ShardwiseError, SyncError, UsageError
    from shardwise.faults import find_nonfinite, preempted
    from shardwise.model.deferred import deferred_init
    from shardwise.planning import plan, simulate
    from shardwise.plans import presets
    from shardwise.plans.auto import Auto
    from shardwise.plans.plan import Override, Plan, Precision, StatePlan, Tiers, Tiling
    from shardwise.probing.probe import probe
    from shardwise.saving import load, save
    from shardwise.tier.budget import BudgetError
    from shardwise.tier.store import TierError
    from shardwise.tracing import trace

_HOMES = {
    "shardwise.api": (
        "clip_grad_norm_ export full_grads full_params load_pretrained no_sync optim_state_dict "
        "set_grad_divisor shard state_dict stats unshard"
    ),
    "shardwise.checkpoint.training.background": "Pending",
    "shardwise.checkpoint.training.load": "Resumed",
    "shardwise.core.errors": "PlanError ShardwiseError SyncError UsageError",
    "shardwise.faults": "find_nonfinite preempted",
    "shardwise.model.deferred": "deferred_init",
    "shardwise.planning": "plan simulate",
    "shardwise.plans.auto": "Auto",
    "shardwise.plans.plan": "Override Plan Precision StatePlan Tiers Tiling",
    "shardwise.probing.probe": "probe",
    "shardwise.saving": "load save",
    "shardwise.tier.budget": "BudgetError",
    "shardwise.tier.store": "TierError",
    "shardwise.tracing": "trace",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Auto",
    "BudgetError",
    "Override",
    "Pending",
    "Plan",
    "PlanError",
    "Precision",
    "Resumed",
    "ShardwiseError",
    "StatePlan",
    "SyncError",
    "TierError",
    "Tiers",
    "Tiling",
    "UsageError",
    "clip_grad_norm_",
    "deferred_init",
    "export",
    "find_nonfinite",
    "full_grads",
    "full_params",
    "load",
    "load_pretrained",
    "no_sync",
    "optim_state_dict",
    "plan",
    "preempted",
    "presets",
    "probe",
    "save",
    "set_grad_divisor",
    "shard",
    "simulate",
    "state_dict",
    "stats",
    "trace",
    "unshard",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that planning does not wait for torch."""
    if name == "presets":
        return importlib.import_module("shardwise.plans.presets")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
