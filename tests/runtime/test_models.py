"""Kinds of models and ways to call them, each against one plain process."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import Block, SharedLayers, TinyGPT
from tests.runtime.support import TWO_LEVELS, Case, check_case, collector

CASES: dict[str, Case] = {}
case = collector(CASES)


def check(name: str) -> None:
    check_case(CASES[name])


def check_on_two_levels(*names: str) -> None:
    kept, *others = TWO_LEVELS
    for name in names:  # each under what is kept of a node, and in turn one of the others
        other = others[list(CASES).index(name) % len(others)]
        check_case(replace(CASES[name], plans=(kept, other)))


def tokens(rank: int, step: int, length: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(37, (2, length), generator=generator)


def features(rank: int, step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*(shape or (2, 4, 24)), generator=generator, dtype=torch.float64)


def train(model: nn.Module, rank: int, step: int) -> float:
    """The plain use: one forward, one backward."""
    loss = model(tokens(rank, step)).square().mean()
    loss.backward()
    return loss.item()


class Stack(nn.Module):
    """Blocks on features, with something before and after them in the root."""

    def __init__(self, layers: int = 3, dim: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.last = nn.Linear(dim, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train_stack(model: nn.Module, rank: int, step: int) -> float:
    loss = model(features(rank, step)).square().mean()
    loss.backward()
    return loss.item()


# --- who owns a parameter -------------------------------------------------------------------------


class TiedAcrossUnits(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up
        self.blocks[1].down.weight = self.blocks[0].down.weight


@case(TiedAcrossUnits)
def tied_across_units_and_in_root(model, rank, step):
    return train(model, rank, step)


@case(SharedLayers)
def called_several_times(model, rank, step):
    return train(model, rank, step)


class SameObjectListed(Stack):
    def __init__(self) -> None:
        super().__init__(layers=2)
        one, two = self.blocks
        self.blocks = nn.ModuleList([one, two, one, one, two])
        self.alias = two


@case(SameObjectListed)
def same_module_listed_several_times(model, rank, step):
    return train_stack(model, rank, step)


class ReadElsewhere(TinyGPT):
    """The embedding's weight in a functional call, and block 0's bias in block 2's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()
        object.__setattr__(self.blocks[2], "other", self.blocks[0])
        self.blocks[2].register_forward_pre_hook(_add_bias)

    def forward(self, tokens):
        return F.linear(super().forward(tokens), self.embed.weight)


def _add_bias(block, args):
    return (args[0] * block.other.out.bias + block.other.out.weight.sum(),)


@case(ReadElsewhere, extra_gathers=True)
def parameters_read_outside_their_module(model, rank, step):
    return train(model, rank, step)


@case(
    ReadElsewhere,
    changes={"units": ("embed", "blocks.*")},
    extra_gathers=True,
)
def parameters_of_a_leaf_unit_read_elsewhere(model, rank, step):
    return train(model, rank, step)


class Unused(Stack):
    def __init__(self) -> None:
        super().__init__(layers=4)
        self.never = Block(24)
        self.nothing = nn.Parameter(torch.ones(3))
        self.skip = False

    def forward(self, x):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i == 2 or (self.skip and i == 1):
                continue
            x = block(x)
        return self.last(x)


@case(Unused, steps=5)
def unused_parameters_and_skipped_units(model, rank, step):
    model.skip = step in (1, 2)
    return train_stack(model, rank, step)


@case(Unused, steps=4, extra_gathers=True)
def a_unit_that_the_first_pass_did_not_use(model, rank, step):
    model.skip = step == 0
    return train_stack(model, rank, step)


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.modules_without = nn.ModuleList([nn.Identity(), nn.Sequential(), nn.ReLU()])

    def forward(self, x):
        for module in self.modules_without:
            x = module(x)
        return (x * self.scale + self.shift).mean() + self.empty.sum()


@case(Scalars)
def scalar_and_empty_parameters(model, rank, step):
    loss = model(features(rank, step))
    loss.backward()
    return loss.item()


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


@case(Frozen)
def no_trainable_parameter(model, rank, step):
    x = features(rank, step).requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    return loss.item(), x.grad


@case(lambda: nn.Sequential(nn.Identity(), nn.ReLU()))
def no_parameter_at_all(model, rank, step):
    return model(features(rank, step)).sum().item()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)) for _ in range(3))  # fmt: skip

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


@case(Normed)
def batch_norm(model, rank, step):
    loss = model(features(rank, step, 6, 24)).square().mean()
    loss.backward()
    return loss.item()


# --- inputs and outputs ---------------------------------------------------------------------------


@dataclass
class Outputs:
    hidden: torch.Tensor
    more: dict[str, Any]


class Custom:
    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.label = value, "custom"


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapping(nn.Module):
    """A block that takes keywords only and returns its result in a container."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = nn.Linear(24, 24), form

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> Any:
        y = self.inner(x) * scale
        match self.form:
            case "dataclass":
                return Outputs(y, {"twice": [y * 2, None, "text"]})
            case "custom":
                return Custom(y)
            case "slotted":
                return Slotted(y)
            case "nested":
                return {"a": (y, [Custom(y * 3)])}


class ManyForms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Wrapping(form) for form in ("dataclass", "custom", "slotted", "nested")
        )

    def forward(self, *, x: torch.Tensor) -> Outputs:
        out = self.blocks[0](x=x, scale=2.0)
        x = out.hidden + out.more["twice"][0]
        x = self.blocks[2](x=self.blocks[1](x=x).value).value
        nested = self.blocks[3](x=x)["a"]
        return Outputs(nested[0], {"also": Custom(nested[1][0].value)})


@case(ManyForms)
def outputs_of_every_form_and_keyword_inputs(model, rank, step):
    x = features(rank, step).requires_grad_(step != 1)
    out = model(x=x)
    loss = out.hidden.square().mean() + out.more["also"].value.mean()
    loss.backward()
    return loss.item(), x.grad


@case(ManyForms)
def only_one_of_several_outputs_is_used(model, rank, step):
    out = model(x=features(rank, step))
    loss = (out.hidden if step else out.more["also"].value).square().mean()
    loss.backward()
    return loss.item()


# --- passes ---------------------------------------------------------------------------------------


@case(TinyGPT)
def two_forwards_before_one_backward(model, rank, step):
    loss = model(tokens(rank, step)).square().mean() + model(tokens(rank, step + 7)).mean()
    loss.backward()
    return loss.item()


@case(TinyGPT, extra_gathers=True)
def two_forwards_then_two_backwards(model, rank, step):
    first = model(tokens(rank, step)).square().mean()
    second = model(tokens(rank, step + 7)).square().mean()
    first.backward()
    second.backward()
    return first.item(), second.item()


@case(Stack, extra_gathers=True)
def two_backwards_through_one_graph(model, rank, step):
    out = model(features(rank, step))
    out.square().mean().backward(retain_graph=True)
    out.mean().backward()
    return out.detach()


@case(TinyGPT, steps=4)
def forwards_without_backward(model, rank, step):
    model.eval()
    with torch.no_grad():
        scored = model(tokens(rank, 50)).sum().item()
    with_graph = model(tokens(rank, 51)).sum().item()  # eval mode, its graph is dropped
    model.train()
    with torch.no_grad():
        scored += model(tokens(rank, 52)).sum().item()
    with torch.inference_mode():
        scored += model(tokens(rank, 53)).sum().item()
    return scored, with_graph, train(model, rank, step)


@case(TinyGPT)
def generation_with_growing_length(model, rank, step):
    text = tokens(rank, step, 2)
    with torch.no_grad():
        for _ in range(5):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text, train(model, rank, step)


@case(TinyGPT, extra_gathers=True)
def modules_called_without_the_model(model, rank, step):
    with torch.no_grad():
        seen = model.blocks[1](model.embed(tokens(rank, 3))).sum().item()
    x = model.embed(tokens(rank, step))
    loss = model.norm(model.blocks[2](model.blocks[0](x))).square().mean()
    loss.backward()
    return seen, loss.item(), train(model, rank, step)


class Halves(Stack):
    def forward(self, x: torch.Tensor, cut: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        x = middle = self.blocks[1](self.blocks[0](self.first(x)))
        x = self.blocks[2](x.detach() if cut else x)
        return middle, self.last(x)


@case(Halves, steps=5)
def backward_through_a_part_of_the_model(model, rank, step):
    middle, out = model(features(rank, step), cut=step in (1, 4))
    loss = middle.square().mean() if step in (2, 4) else out.square().mean()
    loss.backward()
    return loss.item()


@case(Stack)
def gradients_by_autograd_grad_of_the_input(model, rank, step):
    x = features(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    return slope, train_stack(model, rank, step)


@case(Stack)
def double_backward(model, rank, step):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        x = features(rank, step).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.square().mean() + (slope.norm() - 1).square()
        loss.backward()
    return loss.item()


# --- activation checkpointing ---------------------------------------------------------------------


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Recomputed(nn.Module):
    """Checkpoints one block, a group of blocks, or a part inside a block."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 5)
        self.blocks = nn.ModuleList(Dropping(24) for _ in range(5))
        self.reentrant = reentrant
        self.blocks[4].up = Remember(24, 96, reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = checkpoint(self._group, x, use_reentrant=self.reentrant)
        for block in self.blocks[3:]:
            x = block(x)
        return self.last(x)

    def _group(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](x))


class Remember(nn.Linear):
    """A part of a block that is recomputed."""

    def __init__(self, dim: int, out: int, reentrant: bool) -> None:
        super().__init__(dim, out)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@case(lambda: Recomputed(reentrant=False))
def checkpointing(model, rank, step):
    torch.manual_seed(1000 + 10 * step + rank)
    return train_stack(model, rank, step)


@case(lambda: Recomputed(reentrant=True))
def reentrant_checkpointing(model, rank, step):
    torch.manual_seed(1000 + 10 * step + rank)
    return train_stack(model, rank, step)


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_one_process(name, two):
    two.run(check, name)


@pytest.mark.parametrize(
    "names",
    [
        ("tied_across_units_and_in_root", "called_several_times", "reentrant_checkpointing"),
        ("unused_parameters_and_skipped_units", "parameters_of_a_leaf_unit_read_elsewhere"),
        ("modules_called_without_the_model", "two_forwards_then_two_backwards", "double_backward"),
        ("a_unit_that_the_first_pass_did_not_use", "two_backwards_through_one_graph"),
    ],
    ids=("ties and calls", "outside", "passes", "beyond the order"),
)
def test_same_numbers_on_two_levels(names, four):
    four.run(check_on_two_levels, *names)
