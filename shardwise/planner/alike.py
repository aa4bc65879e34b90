"""Models of many alike blocks, made short: what a plan costs grows by the same for each of them.

Memory is a straight line in the number of blocks from a few on, and so is a step's time. So the
search prices every plan on two short models and draws the line; only the best are run in full.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from shardwise.core.cluster import Cluster
from shardwise.core.layout import ModelSpec, UnitSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.cost.simulate import Estimate, simulate
from shardwise.plan.memory import Memory, memory
from shardwise.plan.plan import Plan

SHORT = 4
"""Blocks of the shorter model: more than pools, prefetching and reductions in flight hold."""
LONGER = 2


@dataclass(frozen=True)
class Alike:
    """A model, and where in it alike units follow each other."""

    model: ModelSpec

    @cached_property
    def run(self) -> tuple[int, int]:
        """The longest run of units of one shape: its beginning and its length."""
        shapes = [_shape(unit) for unit in self.model.units]
        best = (0, 0)
        begin = 0
        for index in range(1, len(shapes) + 1):
            if index == len(shapes) or shapes[index] != shapes[begin]:
                best = max(best, (index - begin, -begin))
                begin = index
        return -best[1], best[0]

    @property
    def is_long(self) -> bool:
        return self.run[1] > SHORT + LONGER and not self.model.used_again

    def short(self, length: int) -> ModelSpec:
        """The model with so many units in its longest run."""
        begin, count = self.run
        units = self.model.units
        return replace(self.model, units=units[: begin + length] + units[begin + count :])

    @cached_property
    def shorts(self) -> tuple[ModelSpec, ModelSpec]:
        return self.short(SHORT), self.short(SHORT + LONGER)

    def line(self, first: float, second: float) -> float:
        """Through a figure of the short model and one of the longer, at the model's own length."""
        return first + (second - first) * (self.run[1] - SHORT) / LONGER

    def memory(
        self, plan: Plan, topology: Topology, *, accumulates: bool, activations: int
    ) -> Memory:
        """As ``plan.memory.memory``."""
        options: dict[str, Any] = {"accumulates": accumulates, "activations": activations}
        if not self.is_long:
            return memory(plan, self.model, topology, **options)
        first, second = (memory(plan, short, topology, **options) for short in self.shorts)
        terms = {
            field.name: int(self.line(getattr(first, field.name), getattr(second, field.name)))
            for field in fields(Memory)
            if field.name != "budget"
        }
        return Memory(**terms, budget=first.budget)

    def estimate(
        self, plan: Plan, work: Work, cluster: Cluster, *, accumulate: int, flat: bool = False
    ) -> Estimate:
        """As ``cost.simulate.simulate``, nearly."""
        if not self.is_long:
            return simulate(plan, self.model, work, cluster, accumulate=accumulate, flat=flat)
        first, second = (
            simulate(plan, short, work, cluster, accumulate=accumulate, flat=flat)
            for short in self.shorts
        )
        return replace(
            first,
            step_s=self.line(first.step_s, second.step_s),
            exposed={
                use: max(0.0, self.line(seconds, second.exposed[use]))
                for use, seconds in first.exposed.items()
            },
            memory=self.memory(
                plan,
                cluster.topology,
                accumulates=accumulate > 1,
                activations=work.saved.held(plan.activations),
            ),
        )


def _shape(unit: UnitSpec) -> tuple[Any, ...]:
    flats = tuple((flat.numel, flat.dtype, flat.requires_grad) for flat in unit.flats)
    return unit.inside, flats
