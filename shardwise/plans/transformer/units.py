"""The units of a model and the tiles of their parameters, cut as the runtime cuts real modules."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod

from shardwise.core.errors import PlanError
from shardwise.core.topology import Topology
from shardwise.plans.plan import Plan, tile_name
from shardwise.plans.tiles import cuts, may_cut, tile_rows
from shardwise.plans.transformer.calls import MicroBatch, Module, ParamShape, modules_of
from shardwise.plans.transformer.shape import Shape

ROOT = "root"
"""The unit of all parameters that are in no other unit, as in ``model/inspect.py``."""

UnitChoice = tuple[tuple[str, ...], int]
"""The settings of a plan for units: the patterns of their names, and their smallest size."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together: a block, a heavy layer, the rest, or a tile."""

    name: str
    params: dict[str, ParamShape]
    inside: bool = False
    """As in ``core.layout.UnitSpec``."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Units in order, and which of their parameters are cut into tiles."""

    units: list[Unit]
    wholes: list[str]
    """Units before tiles are cut."""
    tiles: dict[str, int]
    used_again: tuple[str, ...]


@lru_cache
def _structure(model: Shape) -> tuple[Module, ...]:
    return tuple(modules_of(model, MicroBatch(1, 1, 4)))


def shapes_of(model: Shape) -> dict[str, ParamShape]:
    return {name: shape for module in _structure(model) for name, shape in module.params}


def _users(model: Shape) -> dict[str, list[str]]:
    """The modules that use each parameter; a tied one has several."""
    found: dict[str, list[str]] = {}
    for module in _structure(model):
        for name, _ in module.params:
            found.setdefault(name, []).append(module.name)
    return found


@lru_cache
def _members(model: Shape, units: UnitChoice) -> tuple[Unit, ...]:
    """The units before tiles are cut, root first, then in the order of the tree."""
    names = _named_units(model, units[0]) if units[0] else _found_units(model, units[1])
    members: dict[str, dict[str, ParamShape]] = {ROOT: {}, **{name: {} for name in names}}
    shapes, chosen = shapes_of(model), set(names)
    for name, users in _users(model).items():
        owners = {innermost(user, chosen) for user in users}
        owner = owners.pop() if len(owners) == 1 else ROOT
        members[owner][name] = shapes[name]
    return tuple(Unit(n, params) for n, params in members.items() if params or n == ROOT)


def _named_units(model: Shape, patterns: tuple[str, ...]) -> list[str]:
    names = [module.name for module in _structure(model) if module.name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                f"The plan's unit pattern '{pattern}' matches no module of model '{model.name}'; "
                f"module names look like {', '.join(map(repr, names[:4]))}."
            )
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def _found_units(model: Shape, min_numel: int) -> list[str]:
    """Blocks, and layers outside of them that are as heavy as a good part of a block."""
    modules = _structure(model)
    blocks = {module.name for module in modules if module.is_block}
    sizes: Counter[str] = Counter()
    for module in modules:
        sizes[innermost(module.name, blocks)] += sum(prod(shape) for _, shape in module.params)
    heaviest = max(sizes[name] for name in blocks)
    if heaviest < min_numel:
        return []
    users = _users(model)

    def is_heavy(module: Module) -> bool:
        if innermost(module.name, blocks) != ROOT or not module.params:
            return False
        alone = all(len(users[name]) == 1 for name, _ in module.params)
        numel = sum(prod(shape) for _, shape in module.params)
        return alone and numel >= max(min_numel, heaviest // 4)

    return [module.name for module in modules if module.name in blocks or is_heavy(module)]


def _ancestors(name: str) -> Iterator[str]:
    """A module and those that enclose it, outwards.

    >>> list(_ancestors("blocks.0.mlp"))
    ['blocks.0.mlp', 'blocks.0', 'blocks']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]


def innermost(name: str, units: set[str]) -> str:
    return next((found for found in _ancestors(name) if found in units), ROOT)


def outermost(name: str, units: set[str]) -> str:
    return next((found for found in [*_ancestors(name)][::-1] if found in units), ROOT)


CutKey = tuple[UnitChoice, int, frozenset[str]]


def cut_key(model: Shape, plan: Plan, topology: Topology) -> CutKey:
    """All that units and tiles depend on: units, elements per tile, which units may be cut."""
    units = (plan.units, plan.min_unit_numel)
    if not may_cut(plan, topology):
        return units, 0, frozenset()
    names = [unit.name for unit in _members(model, units)]
    if not plan.overrides:
        cut = names if cuts(plan, topology, ROOT) else []
    else:
        cut = [name for name in names if cuts(plan, topology, name)]
    return units, plan.tiling.numel, frozenset(cut)


@lru_cache
def cut_into_units(model: Shape, units: UnitChoice, numel: int, cut: frozenset[str]) -> Cut:
    """As ``model.tiling.cut``: each tile comes after the unit that it was cut from."""
    members, users = _members(model, units), _users(model)
    root = Unit(ROOT, dict(members[0].params))
    found: list[Unit] = []
    tiles: dict[str, int] = {}
    again: list[tuple[int, str]] = []
    for member in members:
        unit = root if member.name == ROOT else Unit(member.name, dict(member.params))
        large = [
            (name, shape)
            for name, shape in unit.params.items()
            if unit.name in cut and len(shape) == 2 and prod(shape) > numel and shape[0] > 1
        ]
        for name, _ in large:
            del unit.params[name]
        alone = any(unit.name in users[name] for name, _ in large)
        if alone:
            root.params.update(unit.params)
            unit.params.clear()
        if unit.params or unit is root:
            found.append(unit)
        for name, (rows, width) in large:
            parts = tile_rows(rows, width, numel)
            tiles[name] = len(parts)
            for part in parts:
                tile = tile_name(unit.name, name, part.start, part.stop)
                shape: ParamShape = (len(part), width)
                param = {f"{name}[{part.start}:{part.stop}]": shape}
                found.append(Unit(tile, param, inside=unit is not root and not alone))
                again += [(layer, tile) for layer in range(1, len(users[name]))]
    used_again = tuple(name for _, name in sorted(again, key=lambda use: use[0]))
    return Cut(found, [unit.name for unit in members], tiles, used_again)
