"""From an ``nn.Module`` to units: which parameters are gathered, reduced and updated together."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from shardwise.core.errors import PlanError
from shardwise.plans.plan import Plan

if TYPE_CHECKING:
    from shardwise.model.tiling import Whole

ROOT = "root"
"""Name of the unit of all parameters that are in no other unit."""

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class Members:
    """A unit before it is laid out: its module and its parameters by name."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    whole: "Whole | None" = None
    """For a tile: the parameter that it was cut from."""
    inside: bool = False
    """For a tile: whether its layer is in a unit other than the root."""


def find_members(model: nn.Module, plan: Plan) -> list[Members]:
    """The units of a model, root first, then in the order of the module tree.

    A parameter that modules of several units use belongs to the root, whose parameters stay
    gathered for a whole forward and backward.
    """
    chosen = _named_units(model, plan.units) if plan.units else _found_units(model, plan)
    members = {id(model): Members(ROOT, model)}
    members |= {id(module): Members(name, module) for name, module in chosen}
    users: dict[nn.Parameter, dict[int, None]] = {}
    names: dict[nn.Parameter, str] = {}
    for name, parameter, owner in _walk(model, members):
        names.setdefault(parameter, name)
        users.setdefault(parameter, {})[owner] = None
    for parameter, owners in users.items():
        owner = next(iter(owners)) if len(owners) == 1 else id(model)
        members[owner].params[names[parameter]] = parameter
    root, *others = members.values()
    return [root, *(unit for unit in others if unit.params)]


def _walk(model: nn.Module, members: dict[int, Members]) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Every (name, parameter, id of the innermost unit's module), with repetitions."""
    stack: list[tuple[str, nn.Module, int]] = [("", model, id(model))]
    seen: set[tuple[int, int]] = set()
    while stack:
        prefix, module, owner = stack.pop()
        owner = id(module) if id(module) in members else owner
        if (id(module), owner) in seen:
            continue
        seen.add((id(module), owner))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter, owner
        children = [
            (f"{prefix}{n}.", c, owner) for n, c in module._modules.items() if c is not None
        ]
        stack += reversed(children)


def _named_units(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    modules = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            raise PlanError(
                f"The plan's unit pattern '{pattern}' matches no module of "
                f"{type(model).__name__}; module names look like "
                f"{', '.join(repr(name) for name, _ in modules[:4])}."
            )
    return [(n, m) for n, m in modules if any(fnmatchcase(n, p) for p in patterns)]


def _found_units(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """Repeated blocks, outermost first, and leaf modules as heavy as a good part of a block."""
    blocks: dict[int, tuple[str, nn.Module]] = {}
    _find_blocks(model, "", plan.min_unit_numel, blocks)
    heaviest = max((_numel(module) for _, module in blocks.values()), default=0)
    inside = {id(sub) for _, module in blocks.values() for sub in module.modules()}
    uses = Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)
    units = []
    for name, module in model.named_modules():
        if id(module) in blocks or (
            blocks
            and name
            and id(module) not in inside
            and _is_heavy_leaf(module, heaviest, plan, uses)
        ):
            units.append((name, module))
    return units


def _find_blocks(
    module: nn.Module, prefix: str, min_numel: int, found: dict[int, tuple[str, nn.Module]]
) -> None:
    children = [(n, c) for n, c in module._modules.items() if c is not None]
    kinds = Counter(type(child) for _, child in children)
    for name, child in children:
        path = f"{prefix}{name}"
        is_block = isinstance(module, _CONTAINERS) and _is_block(
            child, kinds[type(child)], min_numel
        )
        if is_block and not _is_stage(child, min_numel):
            found.setdefault(id(child), (path, child))
        else:
            _find_blocks(child, f"{path}.", min_numel, found)


def _is_block(module: nn.Module, siblings: int, min_numel: int) -> bool:
    """A block is one of several of its kind, or has modules inside, and is large enough."""
    repeated = siblings > 1 or _has_children(module)
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return repeated and not is_list and _numel(module) >= min_numel


def _is_stage(module: nn.Module, min_numel: int) -> bool:
    """Whether a module is mostly a list of alike blocks (Swin, ConvNeXt, U-Nets), which are units.

    A block with a list of experts is not a stage: each rank uses experts in a different order.
    """
    lists = [module] + [c for n, c in module.named_children() if "expert" not in n]
    for blocks in (found for found in lists if isinstance(found, _CONTAINERS)):
        large = [b for b in blocks.children() if _has_children(b) and _numel(b) >= min_numel]
        repeated = max(Counter(map(type, large)).values(), default=0) > 1
        if repeated and 3 * sum(map(_numel, large)) >= 2 * _numel(module):
            return True
    return False


def _is_heavy_leaf(
    module: nn.Module, heaviest: int, plan: Plan, uses: Counter[nn.Parameter]
) -> bool:
    own = [p for p in module._parameters.values() if p is not None]
    is_leaf = not _has_children(module)
    alone = all(uses[p] == 1 for p in own)
    return (
        is_leaf and alone and sum(p.numel() for p in own) >= max(plan.min_unit_numel, heaviest // 4)
    )


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
