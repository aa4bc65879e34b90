"""What the planner knows of a model: its units, and what a micro-batch computes and saves."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from shardwise.core.layout import ModelSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.plans.plan import Plan

Run = Callable[[Any, int, int], Any]
"""Runs a module's forward with its loss: (module, sequences, tokens per sequence)."""


@runtime_checkable
class Facts(Protocol):
    """A model as the planner sees it: from a real module, or from formulas."""

    @property
    def name(self) -> str: ...

    @property
    def numel(self) -> int:
        """Number of parameters; tied ones count once."""
        ...

    def spec(self, plan: Plan, topology: Topology) -> ModelSpec:
        """The units that the runtime would make, including tiles."""
        ...

    def work(
        self, micro_batch: int, seq: int, plan: Plan, topology: Topology | None = None
    ) -> Work:
        """The work of one micro-batch on a rank, in the plan's compute dtype.

        Without a topology, every spread of the plan is assumed to cut, as on two ranks or more.
        """
        ...
