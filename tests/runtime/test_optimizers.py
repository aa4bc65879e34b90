"""The user's optimizer goes on working: every class, groups, schedulers, states, mistakes."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

import shardwise as sw
from shardwise.core.errors import UsageError
from tests.models import largest_difference
from tests.runtime.support import LEVELS, small
from tests.runtime.training import FEW, PLANS, Job, compare, each_plan, gpt, plain_job, sharded_job

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


def train(job: Job, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(job.backward(step))
        job.update()
    return losses


def check_class(name: str) -> None:
    kind, options = CLASSES[name]
    compare(
        train, ("zero3", "ddp", "amsp"), optimizer=lambda model: kind(model.parameters(), **options)
    )


@pytest.mark.parametrize("name", CLASSES)
def test_every_elementwise_class(name, four):
    four.run(check_class, name)


# --- refusals ---------------------------------------------------------------------------------


class Signs(optim.Optimizer):
    """An element-wise optimizer that shardwise cannot know."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


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
    compare(change_groups, optimizer=grouped)


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
    compare(add_groups, optimizer=some)

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


def check_schedulers() -> None:
    """Built before or after shard, alone or both: the same numbers, and no warning."""
    for name, make in SCHEDULERS.items():
        for when in ("before", "after"):

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

            compare(loop, ("zero3", "zero1"), optimizer=optimizer)


def test_schedulers_built_before_and_after(four):
    four.run(check_schedulers)


# --- states -----------------------------------------------------------------------------------


def resume(job: Job) -> list[float]:
    """Back to an earlier state: the same training once more, to the bit."""
    train(job, 2)
    saved = copy.deepcopy(job.optimizer.state_dict())
    parameters = {n: p.clone() for n, p in job.parameters().items()}
    once = train(job, 3)
    job.model.load_state_dict(parameters, strict=False)
    job.optimizer.load_state_dict(saved)
    again = train(job, 3)
    assert once == again
    return again


def load_plain_states() -> None:
    """A state dict of one plain process, loaded under any plan: training goes on as there."""

    def spelled_out(model: nn.Module) -> optim.Optimizer:
        """Not the fused kernel, which is lenient about the shapes of states."""
        return optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    plain = plain_job(optimizer=spelled_out)
    train(plain, 2)
    saved, parameters = copy.deepcopy(plain.optimizer.state_dict()), plain.parameters()
    expected = train(plain)
    for name, job in each_plan(optimizer=spelled_out):
        job.model.load_state_dict(parameters, strict=False)
        job.optimizer.load_state_dict(saved)
        losses = train(job)
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-9, name
        assert largest_difference(job.states(), plain.states()) <= 1e-9, name


def refuse_states() -> None:
    """A refused state leaves the optimizer as it was."""
    job = sharded_job("zero3")
    train(job, 1)
    kept = copy.deepcopy(job.optimizer.state_dict())
    other = sharded_job("hsdp")
    train(other, 1)
    foreign = other.optimizer.state_dict()
    with pytest.raises(UsageError, match="another layout"):
        job.optimizer.load_state_dict(foreign)
    del foreign["shardwise"]
    with pytest.raises(UsageError, match="neither"):
        job.optimizer.load_state_dict(foreign)
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, kept)
    with pytest.raises(UsageError, match="another layout"):
        job.optimizer.load_state_dict(states[dist.get_rank() - 1])
    now = job.optimizer.state_dict()["state"]
    for index, state in kept["state"].items():
        for key, value in state.items():
            assert torch.equal(now[index][key], value)
    train(job, 1)


def check_states() -> None:
    compare(resume)
    load_plain_states()
    refuse_states()


def test_states_round_trip_and_load_from_one_process(four):
    four.run(check_states)


# --- optimizers built after shard, and several of them ----------------------------------------


def late(plan: str, make: Any, **options: Any) -> Job:
    """A job whose optimizer was built after shard and never passed to it."""
    torch.manual_seed(0)
    model, world = gpt().double(), dist.get_world_size()
    sw.shard(model, plan=small(PLANS[plan]), levels=LEVELS[world], **options)
    return Job(model, make(model), range(dist.get_rank(), dist.get_rank() + 1), world)


def check_late() -> None:
    plain = plain_job()
    expected = train(plain)
    for plan in PLANS:
        job = late(plan, lambda m: optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1))
        losses = train(job)
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-9, plan
        assert largest_difference(job.parameters(), plain.parameters()) <= 1e-9, plan
        assert largest_difference(job.states(), plain.states()) <= 1e-9, plan
        sw.unshard(job.model)
    job = late("zero3", lambda m: Signs(m.parameters()))
    job.backward(0)
    with pytest.raises(UsageError, match="elementwise=True"):
        job.optimizer.step()
    sw.unshard(job.model)
    job = late("zero3", lambda m: Signs(m.parameters()), elementwise=True)
    train(job)
    with sw.full_params(job.model):  # its state at construction is full, and cut at the first step
        adagrad = optim.Adagrad(job.model.parameters())
    job.optimizer = adagrad
    train(job, 2)
    # Plain optimizers are left alone, while sharded models exist.
    other = nn.Linear(2, 2)
    own = optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(1, 2)).sum().backward()
    own.step()
    assert list(own.param_groups[0]["params"]) == list(other.parameters())


def test_an_optimizer_built_after_shard_is_taken_over(four):
    four.run(check_late)


def two_models_one_optimizer() -> None:
    """And two optimizers on one model: each of its own parameters."""

    def run(first: Job, second: Job, optimizers: list[optim.Optimizer]) -> None:
        for step in range(3):
            for job in (first, second):
                job.backward(step)
            for each in optimizers:
                each.step()
                each.zero_grad()

    plain = plain_job(), plain_job()
    models = [job.model for job in plain]
    both = [*models[0].parameters(), *models[1].blocks.parameters()]
    rest = list(models[1].embed.parameters())
    run(*plain, [optim.AdamW(both, lr=0.01), optim.SGD(rest, lr=0.1)])
    jobs = late("zero3", lambda m: None), late("amsp", lambda m: None)
    models = [job.model for job in jobs]
    both = [*models[0].parameters(), *models[1].blocks.parameters()]
    rest = list(models[1].embed.parameters())
    made = [optim.AdamW(both, lr=0.01), optim.SGD(rest, lr=0.1)]
    run(*jobs, made)
    assert made[0].param_groups[0]["params"] == both
    for job, reference in zip(jobs, plain, strict=True):
        assert largest_difference(job.parameters(), reference.parameters()) <= 1e-9


def test_models_and_optimizers_mix(four):
    four.run(two_models_one_optimizer)


# --- exceptions and unshard -------------------------------------------------------------------


class Fragile(optim.AdamW):
    """Shrinks what AdamW (whose step is hooked, too) left, and may fail in the middle of that."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
            if self.fails:
                self.fails = False
                raise ArithmeticError
        return loss


def fragile(model: nn.Module) -> optim.Optimizer:
    groups = [{"params": model.blocks.parameters()}, {"params": model.embed.parameters()}]
    return Fragile(groups, lr=0.01)


def survive(job: Job) -> list[float]:
    losses = train(job, 1)
    for step in range(2):
        losses.append(job.backward(10 + step))
        job.optimizer.fails = True
        with pytest.raises(ArithmeticError):
            job.optimizer.step()
        listed = [p for group in job.optimizer.param_groups for p in group["params"]]
        assert listed == [*job.model.blocks.parameters(), *job.model.embed.parameters()]
        assert job.optimizer.state.keys() <= set(listed)
        if step:
            job.optimizer.zero_grad()
        losses.append(job.backward(20 + step))  # on what the failed step left
        job.update()
    return losses


def check_survival() -> None:
    compare(survive, optimizer=fragile, elementwise=True)


def test_an_exception_in_step_leaves_everything_usable(four):
    four.run(check_survival)


def leave() -> None:
    """After unshard the same optimizer trains plain parameters, with states from scratch."""
    for name, job in each_plan(*FEW):
        scheduler = lr_scheduler.LambdaLR(job.optimizer, lambda epoch: 1.0)
        train(job, 2)
        parameters = job.parameters()
        sw.unshard(job.model)
        plain = plain_job()
        plain.model.load_state_dict(parameters, strict=False)
        for trainee in (job.model, plain.model):
            optimizer = job.optimizer if trainee is job.model else plain.optimizer
            trainee(job.tokens(0, 0)[:, :-1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        now = {n: p.detach() for n, p in job.model.named_parameters()}
        assert largest_difference(now, plain.parameters()) == 0.0, name
        assert "add_param_group" not in vars(job.optimizer)
        sw.shard(job.model, job.optimizer, levels=LEVELS[job.world])  # and back


def test_unshard_gives_the_optimizer_back(four):
    four.run(leave)
