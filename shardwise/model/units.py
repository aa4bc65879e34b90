"""The units of a model under a plan and their layout, for planner and runtime alike."""

from torch import nn

from shardwise.core.layout import ModelSpec, ParamSpec, UnitSpec, lay_out
from shardwise.core.topology import Topology
from shardwise.model.inspect import Members, find_members
from shardwise.model.tiling import cut
from shardwise.plans.plan import Plan


def find_units(model: nn.Module, plan: Plan, topology: Topology) -> list[Members]:
    """The units of a model, root first; tiles come after the unit that they were cut from."""
    return cut(model, find_members(model, plan), plan, topology)


def describe(model: nn.Module, plan: Plan, topology: Topology) -> ModelSpec:
    """The model as the planner and the schedule see it; works on the meta device."""
    return spec_of(find_units(model, plan, topology), topology.world)


def spec_of(units: list[Members], world: int) -> ModelSpec:
    """The layout of units."""
    tied = [
        (layer, unit.name)
        for unit in units
        if unit.whole is not None
        for layer in range(1, len(unit.whole.users))
    ]
    again = tuple(name for _, name in sorted(tied, key=lambda use: use[0]))
    return ModelSpec(tuple(unit_spec(unit, world) for unit in units), again)


def unit_spec(unit: Members, world: int) -> UnitSpec:
    """The layout of one unit."""
    params = [
        ParamSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for name, p in unit.params.items()
    ]
    return lay_out(unit.name, params, world, inside=unit.inside)
