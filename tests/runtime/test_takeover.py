"""The life of a taken-over optimizer: its states, late and several ones, exceptions, the way back."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

import shardwise as sw
from shardwise.core.errors import UsageError
from tests.models import largest_difference
from tests.runtime.support import LEVELS, LIMIT_S, levels_of, small
from tests.runtime.training import (
    FEW,
    PLANS,
    Job,
    Signs,
    compare,
    each_plan,
    gpt,
    plain_job,
    sharded_job,
    train,
)

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
    model, world, chosen = gpt().double(), dist.get_world_size(), small(PLANS[plan])
    sw.shard(model, plan=chosen, levels=levels_of(chosen), timeout_s=LIMIT_S, **options)
    return Job(model, make(model), range(dist.get_rank(), dist.get_rank() + 1), world)


def check_late() -> None:
    plain = plain_job()
    expected = train(plain)
    for plan in FEW:  # under all plans: test_every_class_under_every_plan
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


def fail(*_: Any) -> None:
    raise ArithmeticError


def break_first_step(job: Job, way: str) -> list[float]:
    """The first step raises inside the optimizer, or in a hook after it; gradients are dropped."""
    losses = [job.backward(10)]
    group = job.optimizer.param_groups[0]
    betas, handle = group["betas"], None
    if way == "inside":
        group["betas"] = 0.9
    else:
        handle = job.optimizer.register_step_post_hook(fail)
    with pytest.raises((ArithmeticError, TypeError)):
        job.optimizer.step()
    group["betas"] = betas
    if handle is not None:
        handle.remove()
    job.optimizer.zero_grad()
    listed = [p for group in job.optimizer.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(listed, job.model.parameters(), strict=True))
    return losses + train(job)


def check_broken_first_step() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)

    for way in ("inside", "after"):
        plain = plain_job()
        plain.optimizer = make(plain.model)
        expected = break_first_step(plain, way)
        for plan in ("zero3", "zero1", "ddp"):
            job = late(plan, make)
            losses = break_first_step(job, way)
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-9, plan
            assert largest_difference(job.parameters(), plain.parameters()) <= 1e-9, plan
            sw.unshard(job.model)


def test_the_first_step_of_a_late_optimizer_may_raise(four):
    four.run(check_broken_first_step)


def refuse_first_step(job: Job) -> list[float]:
    """The first step is refused before it begins; its gradients stay, or are dropped."""
    losses = []
    for keeps in (True, False):
        losses.append(job.backward(10 + keeps))
        handle = job.optimizer.register_step_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            job.optimizer.step()
        handle.remove()
        listed = [p for group in job.optimizer.param_groups for p in group["params"]]
        assert all(p is q for p, q in zip(listed, job.model.parameters(), strict=True))
        if not keeps:
            job.optimizer.zero_grad()
    return losses + train(job)


def check_refused_first_step() -> None:
    plain = plain_job()
    expected = refuse_first_step(plain)
    for plan in ("zero3", "zero1", "ddp", "mics world:2"):
        job = late(plan, lambda m: optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1))
        losses = refuse_first_step(job)
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-9, plan
        assert largest_difference(job.parameters(), plain.parameters()) <= 1e-9, plan
        assert largest_difference(job.states(), plain.states()) <= 1e-9, plan
        sw.unshard(job.model)


def test_the_first_step_of_a_late_optimizer_may_be_refused(four):
    four.run(check_refused_first_step)


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
    compare(survive, FEW, optimizer=fragile, elementwise=True)


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
