"""Probing: what this cluster's links, devices, memory and disks really do, as the planner needs it.

``shardwise.probe(...)`` is the function of the same name in ``probe.py``: as a package of that name
is here, the package itself can be called. Importing it imports no torch.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.core.cluster import Cluster


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> "Cluster":
        """See ``shardwise.probe.probe.probe``."""
        from shardwise.probe.probe import probe

        return probe(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
