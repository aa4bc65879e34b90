"""Plans, presets, validation, plan files, layout rungs and the schedule: pure data, no torch.

``shardwise.plan(...)`` is the planner's function of that name (``planner/api.py``): as a package of
that name is here, the package itself can be called.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.plan.file import dump_plan, load_plan
from shardwise.plan.plan import Override, Plan, Precision, StatePlan

if TYPE_CHECKING:
    from shardwise.planner.search import Candidate

__all__ = ["Override", "Plan", "Precision", "StatePlan", "dump_plan", "load_plan"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> "Candidate":
        """See ``shardwise.planner.api.plan``."""
        from shardwise.planner.api import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
