"""What a planner knows of a model: its units, and what a micro-batch computes and saves."""

from typing import Protocol

from shardwise.core.layout import ModelSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.plan.plan import Plan


class Facts(Protocol):
    """A model as the planner sees it: told of a real module, or by formulas."""

    @property
    def name(self) -> str: ...

    @property
    def numel(self) -> int:
        """Parameters; tied ones count once."""
        ...

    def spec(self, plan: Plan, topology: Topology) -> ModelSpec:
        """The units as the runtime would make them, tiles included."""
        ...

    def work(
        self, micro_batch: int, seq: int, plan: Plan, topology: Topology | None = None
    ) -> Work:
        """One micro-batch of a rank in the plan's compute dtype.

        Without a topology, every spread of the plan is taken to cut, as on two ranks or more.
        """
        ...
