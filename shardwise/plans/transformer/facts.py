"""What the planner knows of a transformer: see ``plans/facts.py``."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwise.core.calls import Call, Forward, Input
from shardwise.core.errors import PlanError
from shardwise.core.layout import DTYPE_BYTES, ModelSpec, ParamSpec, lay_out
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.plans.plan import Plan
from shardwise.plans.tiles import TWO_RANKS, on_two_ranks
from shardwise.plans.transformer.calls import MicroBatch, Module, modules_of
from shardwise.plans.transformer.shape import Shape
from shardwise.plans.transformer.units import (
    ROOT,
    UnitChoice,
    cut_into_units,
    cut_key,
    innermost,
    outermost,
    shapes_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(Shape):
    """A shape, with its ``Facts`` from formulas."""

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in shapes_of(self).values())

    def spec(self, plan: Plan, topology: Topology) -> ModelSpec:
        return _spec(self, *cut_key(self, plan, topology), topology.world)

    def work(
        self, micro_batch: int, seq: int, plan: Plan, topology: Topology | None = None
    ) -> Work:
        if self.family == "gpt" and seq > self.context:
            raise PlanError(
                f"Sequences of {seq} tokens exceed the {self.context} positions of model "
                f"'{self.name}'; use shorter sequences, or a model with a longer context."
            )
        if topology is None:
            plan, topology = on_two_ranks(plan), TWO_RANKS
        dtype = plan.precision.compute_dtype(self.dtype)
        key = cut_key(self, plan, topology)
        return _work(self, micro_batch, seq, dtype, plan.tiling.loss, *key)


@lru_cache
def _spec(
    model: Shape, units: UnitChoice, numel: int, cut: frozenset[str], world: int
) -> ModelSpec:
    found = cut_into_units(model, units, numel, cut)
    return ModelSpec(
        tuple(
            lay_out(
                unit.name,
                [ParamSpec(name, shape, model.dtype) for name, shape in unit.params.items()],
                world,
                inside=unit.inside,
            )
            for unit in found.units
        ),
        found.used_again,
    )


@lru_cache
def _work(
    model: Shape,
    micro_batch: int,
    seq: int,
    dtype: str,
    tiled_loss: bool,
    units: UnitChoice,
    numel: int,
    cut: frozenset[str],
) -> Work:
    found = cut_into_units(model, units, numel, cut)
    batch = MicroBatch(micro_batch, seq, DTYPE_BYTES[dtype], found.tiles, tiled_loss)
    modules = [module for module in modules_of(model, batch) if module.is_called]
    names = {module.name for module in modules}
    computing, called = names & set(found.wholes), names & {unit.name for unit in found.units}
    flops: dict[str, float] = dict.fromkeys(found.wholes, 0.0)
    for module in modules:
        flops[innermost(module.name, computing)] += module.flops
    return Work(
        tokens=batch.tokens,
        dtype=dtype,
        forward_flops=flops,
        saved=_forward(modules, called).saved,
    )


def _forward(modules: Iterable[Module], units: set[str]) -> Forward:
    root: dict[Hashable, int] = {}
    inner: dict[str, dict[Hashable, int]] = {}
    calls = []
    for module in modules:
        unit = outermost(module.name, units)
        if unit == module.name:
            given: dict[Hashable, Input] = {
                t.key: Input(t.num_bytes, t.num_bytes) for t in module.given
            }
            calls.append(Call(given, inner.setdefault(unit, {})))
        saved = root if unit == ROOT else inner.setdefault(unit, {})
        saved.update((t.key, t.num_bytes) for t in module.saves)
    return Forward(root, tuple(calls))
