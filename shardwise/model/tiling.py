"""Layers that are computed in tiles, so that no rank ever gathers a whole layer.

[Note: Tiles]
A tile is some rows of a weight, with its own module and unit. The layer's forward calls the tiles
one after another, so hooks gather, free and reduce each in turn, ahead of its use, as with any
other unit. The user's parameter stays where it is, with its name and shape, and stands for the rows
of all tiles (``runtime/surface/face.py``).

Rows suit both kinds of layers: rows of a linear layer are outputs, which are concatenated; rows of
an embedding are entries, and each tile looks up its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from shardwise.core.errors import PlanError
from shardwise.core.topology import Topology
from shardwise.device.abilities import separate_memory
from shardwise.model.inspect import ROOT, Members
from shardwise.plans.plan import Plan, tile_name
from shardwise.plans.tiles import cuts, may_cut, tile_rows


class Tile(nn.Module):
    """Some rows of a weight. It is a module so that a unit can register its hooks."""

    def __init__(self, weight: nn.Parameter, start: int) -> None:
        super().__init__()
        self.weight, self.start = weight, start
        self.stop = start + weight.shape[0]
        self.deliver: Callable[[Tensor], None] = self._accumulate
        """Called in backward with the gradient of each use."""

    def run(self, compute: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """The result of ``compute`` on the rows and inputs.

        Each tile gets its own alias of the input: the gradient through it then shows that this
        tile's backward is done. The input that all tiles share would only show it for all at once.
        """
        return self(compute, *(x.view_as(x) if _has_grad(x) else x for x in inputs))

    def forward(self, compute: Callable[..., Any], *inputs: Tensor | None) -> Any:
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            return compute(self.weight, *inputs)
        # After the inputs, so that backward reaches it before it continues through them.
        anchor = torch.zeros((), device=self.weight.device, requires_grad=True)
        return compute(_use(anchor, self), *inputs)

    def _accumulate(self, grad: Tensor) -> None:
        before = self.weight.grad
        self.weight.grad = grad if before is None else before + grad


def _has_grad(x: Tensor | None) -> TypeGuard[Tensor]:
    return x is not None and x.requires_grad


class _Use(torch.autograd.Function):
    """One use of a tile, whose gradient is passed on immediately.

    Autograd would first add up the gradients of all uses. Those of tied weights come at both ends
    of backward, so the gradients of all tiles would be held until its end.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tile: Tile) -> Tensor:
        ctx.tile = tile
        return tile.weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.tile.deliver(grad)
        return None, None


_use: Callable[[Tensor, Tile], Tensor] = _Use.apply


@dataclass
class Whole:
    """A parameter of the model that is cut into tiles."""

    name: str
    parameter: nn.Parameter
    users: list[nn.Module]
    """The layers that compute with it; several if weights are tied."""
    tiles: list[Tile]
    wants_loss: list[nn.Module] = field(default_factory=list)
    """The users whose output may be the input of a cross entropy."""


def cut(model: nn.Module, members: list[Members], plan: Plan, topology: Topology) -> list[Members]:
    """The units of a model, and those of its tiles, each after the unit that it was cut from."""
    if not may_cut(plan, topology):
        return members
    users = _users(model)
    found: list[Members] = []
    root = members[0]
    for unit in members:
        if not cuts(plan, topology, unit.name):
            found.append(unit)
            continue
        wholes = []
        for name, parameter in list(unit.params.items()):
            if _is_cut(parameter, users.get(parameter, []), plan.tiling.numel):
                wholes.append(_cut_one(name, unit, users[parameter], plan))
                del unit.params[name]
        alone = unit.module in {user for whole in wholes for user in whole.users}
        if alone and unit is not root:
            # The layer is the whole unit: the rest (a bias) is used outside its forward as well.
            root.params |= unit.params
            unit.params = {}
        found += [unit] if unit.params or unit is root else []
        inside = unit is not root and not alone
        found += [tile for whole in wholes for tile in _units(unit.name, whole, inside)]
    return found


def _users(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that use each parameter; a tied one has several."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(parameter, []).append(module)
    return found


def _is_cut(parameter: nn.Parameter, users: list[nn.Module], numel: int) -> bool:
    large = parameter.dim() == 2 and parameter.numel() > numel and parameter.shape[0] > 1
    return large and bool(users) and all(_knows(user, parameter) for user in users)


def _knows(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a layer computes with its weight in a supported way."""
    if module._parameters.get("weight") is not parameter or "forward" in module.__dict__:
        return False
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return plain and type(module).forward is nn.Embedding.forward
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _cut_one(name: str, unit: Members, users: list[nn.Module], plan: Plan) -> Whole:
    parameter = unit.params[name]
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise PlanError(
            f"Parameter '{name}' has hooks, but tiling.numel = {plan.tiling.numel} would cut it "
            "into tiles, so its whole gradient never exists; remove the hooks, or raise "
            "tiling.numel."
        )
    tiles = []
    height, width = parameter.shape
    for rows in tile_rows(height, width, plan.tiling.numel):
        part = parameter.detach()[rows.start : rows.stop]
        if part.is_meta:
            part = torch.empty_like(part)  # a new tensor without a history
        tiles.append(Tile(nn.Parameter(part, requires_grad=parameter.requires_grad), rows.start))
    outside = unit.name == ROOT or unit.module in users
    wants_loss: list[nn.Module] = [
        user for user in users if plan.tiling.loss and outside and isinstance(user, nn.Linear)
    ]
    return Whole(name, parameter, users, tiles, wants_loss)


def _units(unit: str, whole: Whole, inside: bool) -> Iterator[Members]:
    for tile in whole.tiles:
        name = tile_name(unit, whole.name, tile.start, tile.stop)
        param = f"{whole.name}[{tile.start}:{tile.stop}]"
        yield Members(name, tile, {param: tile.weight}, whole, inside)


# --- the layers -----------------------------------------------------------------------------------


def linear(tiles: list[Tile], x: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` with a weight that is cut into tiles."""
    outputs = [tile.run(_linear, x, rows_of(bias, tile)) for tile in tiles]
    return torch.cat(outputs, dim=-1)


def _linear(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def rows_of(bias: Tensor | None, tile: Tile) -> Tensor | None:
    return None if bias is None else bias[tile.start : tile.stop]


def embedding(tiles: list[Tile], ids: Tensor, padding_idx: int | None) -> Tensor:
    """``F.embedding`` with a table that is cut into tiles."""
    check_range(ids, tiles[-1].stop, "index out of range in self")
    trains = None if padding_idx is None else (ids != padding_idx).unsqueeze(-1)
    found: Tensor | None = None
    for tile in tiles:
        inside, own = own_entries(tile, ids)
        found = tile.run(_look_up, found, own, inside.unsqueeze(-1), trains)
    assert found is not None
    return found


def _look_up(
    table: Tensor, found: Tensor | None, own: Tensor, inside: Tensor, trains: Tensor | None
) -> Tensor:
    rows = F.embedding(own, table)
    if trains is not None:
        rows = torch.where(trains, rows, rows.detach())
    return rows if found is None else torch.where(inside, rows, found)


def own_entries(tile: Tile, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Which indices are in a tile, and their rows there; for the others the first row."""
    inside = (ids >= tile.start) & (ids < tile.stop)
    return inside, torch.where(inside, ids - tile.start, 0)


def check_range(ids: Tensor, count: int, message: str) -> None:
    """Raise on an index that is in no tile; a single tile cannot notice it."""
    if not ids.numel():
        return
    fits = (ids >= 0).all() & (ids < count).all()
    if isinstance(fits, FakeTensor):
        return
    if not separate_memory(ids.device) and not fits:
        raise IndexError(message)
    torch._assert_async(fits)  # on an accelerator like its kernels, without waiting
