"""Every element-wise optimizer class, groups, closures and schedulers, as in one plain process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

import shardwise as sw
from shardwise.core.errors import UsageError
from shardwise.plans.plan import Plan
from tests.models import on_rank_0
from tests.runtime.support import LIMIT_S, PLANS, levels_of, small
from tests.runtime.training import FEW, Job, Signs, compare, each_plan, gpt, sharded_job, train

CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "adamw amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adamw foreach": (optim.AdamW, {"lr": 0.01, "foreach": True, "maximize": True}),
    "adamw tensor lr": (optim.AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    "nadam": (optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "adagrad": (optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    "adamax": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    "asgd": (optim.ASGD, {"lr": 0.05, "t0": 1, "weight_decay": 0.1}),
}


def check_class(name: str) -> None:
    """Parameters and states under one plan; under all: test_every_class_under_every_plan."""
    kind, options = CLASSES[name]
    plan = ("zero3", "ddp", "amsp")[list(CLASSES).index(name) % 3]
    compare(train, (plan,), optimizer=lambda model: kind(model.parameters(), **options))


@pytest.mark.parametrize("name", CLASSES)
def test_every_elementwise_class(name, four):
    four.run(check_class, name)


class Towers(nn.Module):
    """One tower for each class of optimizer: to shard costs more than to train so little."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in CLASSES
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([tower(x) for tower in self.towers], -1)


RATES: list[Callable[[optim.Optimizer], Any]] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=6, cycle_momentum=False),
]


def train_towers(plan: Plan | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Every class on its own tower, each with a scheduler; one plain process without a plan."""
    torch.manual_seed(0)
    rank, world, model = dist.get_rank(), dist.get_world_size(), Towers().double()
    made = [
        kind(tower.parameters(), **copy.deepcopy(options))
        for tower, (kind, options) in zip(model.towers, CLASSES.values(), strict=True)
    ]
    schedulers = [RATES[i % 3](optimizer) for i, optimizer in enumerate(made[::2])]
    if plan is not None:  # the first is passed, the others are found when they step
        plan = small(plan, units=("towers.*",), min_unit_numel=1)
        sw.shard(model, made[0], plan, levels=levels_of(plan), timeout_s=LIMIT_S)
    schedulers += [RATES[i % 3](optimizer) for i, optimizer in enumerate(made[1::2])]
    rates = []
    for step in range(3):
        for each in range(world) if plan is None else [rank]:
            generator = torch.Generator().manual_seed(100 * step + each)
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
            (loss / world if plan is None else loss).backward()
        for any_of_them in (*made, *schedulers):
            any_of_them.step()
        model.zero_grad() if step % 2 else [optimizer.zero_grad() for optimizer in made]
        rates += [float(optimizer.param_groups[0]["lr"]) for optimizer in made]
    if plan is None:
        return rates, model.state_dict()
    values = sw.state_dict(model, rank0_only=False)
    sw.unshard(model)
    return rates, values


def check_towers() -> None:
    rates, expected = on_rank_0(lambda: train_towers(None))
    for name, plan in PLANS.items():
        found, values = train_towers(plan)
        assert found == rates, name
        for key, value in expected.items():
            kind = list(CLASSES)[int(key.split(".")[1])]
            assert (values[key] - value).abs().max() <= 1e-9, (name, kind, key)


def test_every_class_under_every_plan(four):
    four.run(check_towers)


# --- refusals ---------------------------------------------------------------------------------


class Plain(optim.AdamW):
    """A subclass that changes nothing."""


class Layerwise(optim.AdamW):
    """A subclass whose step is another one, here with the norm of whole layers."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def check_refusals() -> None:
    refused = {
        "Adafactor": lambda m: optim.Adafactor(m.parameters()),
        "Muon": lambda m: optim.Muon([p for p in m.parameters() if p.dim() == 2]),
        "LBFGS": lambda m: optim.LBFGS(m.parameters()),
        "SparseAdam": lambda m: optim.SparseAdam(list(m.parameters())),
        "Signs": lambda m: Signs(m.parameters()),
        "Layerwise": lambda m: Layerwise(m.parameters()),
        "differentiable": lambda m: optim.AdamW(m.parameters(), differentiable=True),
    }
    reasons = {"Signs": "elementwise=True", "Layerwise": "elementwise=True"}
    for name, make in refused.items():
        with pytest.raises(UsageError, match=name) as caught:
            sharded_job("zero3", optimizer=make)
        assert reasons.get(name, "") in str(caught.value)
        if name in ("Adafactor", "Muon", "LBFGS", "SparseAdam"):
            assert "use an element-wise optimizer" in str(caught.value)
            with pytest.raises(UsageError, match=name):  # no vouching for these
                sharded_job("zero3", optimizer=make, elementwise=True)
    compare(train, ("zero3", "zero1"), optimizer=lambda m: Signs(m.parameters()), elementwise=True)
    compare(train, ("zero3",), optimizer=lambda m: Plain(m.parameters()))


def test_optimizers_that_need_whole_matrices_are_refused(four):
    four.run(check_refusals)


# --- groups -----------------------------------------------------------------------------------


def grouped(model: nn.Module) -> optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.3, "label": "decayed"},
            {"params": others, "lr": 0.05, "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def change_groups(job: Job) -> list[Any]:
    losses = train(job, 2)
    first, second = job.optimizer.param_groups
    assert first["label"] == "decayed"
    assert first["fused"] is None
    first["lr"], second["betas"] = 0.002, (0.5, 0.9)
    losses += train(job, 2)
    second["weight_decay"] = 0.5
    # A parameter changes groups; what it has of states goes with it.
    second["params"].append(first["params"].pop(0))
    return losses + train(job, 2)


def check_groups() -> None:
    compare(change_groups, FEW, optimizer=grouped)


def test_groups_and_their_changes(four):
    four.run(check_groups)


def add_groups(job: Job) -> list[float]:
    losses = train(job, 2)
    model = job.model
    job.optimizer.add_param_group({"params": model.blocks[1].parameters(), "lr": 0.05})
    job.optimizer.add_param_group({"params": model.temperature, "weight_decay": 0.0})
    torch.manual_seed(1)
    extra = nn.Linear(3, 3).double()
    job.optimizer.add_param_group({"params": extra.parameters()})
    for step in range(2):
        extra(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        losses.append(job.backward(10 + step))
        job.update()
    return [*losses, extra.weight.detach().clone(), extra.bias.detach().clone()]


def some(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.blocks[0].parameters(), lr=1e-2)


def check_added_groups() -> None:
    compare(add_groups, FEW, optimizer=some)

    def kind() -> nn.Module:
        model = gpt()
        model.position.requires_grad_(False)
        return model

    for _, job in each_plan("zero3", "ddp", kind=kind, optimizer=some):
        with pytest.raises(UsageError, match=r"position\.weight.*frozen"):
            job.optimizer.add_param_group({"params": [job.model.position.weight]})
        assert len(job.optimizer.param_groups) == 1

    def named(model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.blocks[0].named_parameters(), lr=1e-2)

    for _, job in each_plan("zero3", kind=kind, optimizer=named):
        job.optimizer.add_param_group({"params": job.model.blocks[1].named_parameters()})
        assert "up.bias" in job.optimizer.param_groups[1]["param_names"]
        with pytest.raises(UsageError, match="frozen"):
            job.optimizer.add_param_group({"params": job.model.position.named_parameters()})
        train(job, 2)


def test_groups_can_be_added(four):
    four.run(check_added_groups)


def train_with_closure(job: Job) -> list[float]:
    losses = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            job.optimizer.zero_grad()
            return torch.tensor(job.backward(step))

        by_name = {"closure": closure} if step else {}
        losses.append(job.optimizer.step(*([] if step else [closure]), **by_name))
    return losses


def check_closure() -> None:
    compare(train_with_closure, FEW)


def test_closures(four):
    four.run(check_closure)


# --- schedulers -------------------------------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=6, cycle_momentum=True),
    "one cycle sgd": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=6),
}


ORDERS = ("before", "after"), ("after", "before")


def check_schedulers() -> None:
    """Built before or after shard: the same numbers, and no warning."""
    for number, (name, make) in enumerate(SCHEDULERS.items()):
        for plan, when in zip(("zero3", "zero1"), ORDERS[number % 2], strict=True):

            def optimizer(model: nn.Module, make=make, when=when, name=name) -> optim.Optimizer:
                made = (
                    optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                    if name.endswith("sgd")
                    else optim.AdamW(model.parameters(), lr=1e-2)
                )
                if when == "before":
                    made.scheduler = make(made)
                return made

            def loop(job: Job, make=make, when=when) -> list[float]:
                if when == "after":
                    job.optimizer.scheduler = make(job.optimizer)
                seen = []
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    for step in range(4):
                        seen.append(job.backward(step))
                        job.update()
                        job.optimizer.scheduler.step()
                        group = job.optimizer.param_groups[0]
                        seen += [group["lr"], *group.get("betas", [group.get("momentum")])]
                return seen

            compare(loop, (plan,), optimizer=optimizer)


def test_schedulers_built_before_and_after(four):
    four.run(check_schedulers)
