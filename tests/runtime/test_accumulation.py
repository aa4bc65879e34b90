"""Several backward passes a step, some of them partial or failing, as in one plain process."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.core.errors import UsageError
from tests.models import Block
from tests.runtime.training import FEW, GRADS, Job, adamw, compare, each_plan, gpt

LOOPS: dict[str, dict[str, Any]] = {}


def loop(**options: Any):
    """Collects a loop; its test is ``test_loop_equals_one_process[name]``."""

    def add(function):
        LOOPS[function.__name__] = {"loop": function, **options}
        return function

    return add


def check(name: str) -> None:
    compare(**LOOPS[name])


class Branches(nn.Module):
    """A model that uses only the branch that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 12)
        self.left, self.right = Block(12), Block(12)
        self.scale = nn.Parameter(torch.full((), 0.5))
        self.head = nn.Linear(12, 19)

    def forward(self, tokens: torch.Tensor, branch: str = "left") -> torch.Tensor:
        x = self.embed(tokens)
        if "left" in branch:
            x = self.left(x)
        if "right" in branch:
            x = self.right(x) * self.scale
        return self.head(x)


# --- accumulation -----------------------------------------------------------------------------


@loop(plans=FEW)
def accumulates(job: Job):
    losses = []
    for step in range(2):
        losses += [job.backward(10 * step + micro) for micro in range(3)]
        job.update()
    return losses


@loop(plans=FEW)  # under all plans: adapters, below
def accumulates_under_no_sync(job: Job):
    losses = []
    for step in range(3):
        with job.no_sync():
            losses += [job.backward(10 * step + micro) for micro in range(2)]
        losses.append(job.backward(10 * step + 2))
        losses.append(job.clip(0.5))
        job.update()
    return losses


@loop()
def accumulates_unevenly(job: Job):
    """Any mixture: synchronised and not, another number each step."""
    losses = []
    for step, pattern in enumerate(["ns", "s", "snns", "nsns"]):
        for micro, letter in enumerate(pattern):
            with job.no_sync() if letter == "n" else nullcontext():
                losses.append(job.backward(10 * step + micro))
        job.update()
    return losses


@loop(plans=FEW)
def drops_between_micro_batches(job: Job):
    losses = []
    for step in range(2):
        losses.append(job.backward(10 * step))
        job.optimizer.zero_grad()
        with job.no_sync():
            losses.append(job.backward(10 * step + 1))
            job.optimizer.zero_grad()
            losses.append(job.backward(10 * step + 2))
        losses.append(job.backward(10 * step + 3))
        job.update()
    # Everything dropped: nothing to update, and no complaint about no_sync.
    with job.no_sync():
        job.backward(90)
    job.optimizer.zero_grad()
    job.update()
    return losses


@loop(plans=GRADS)
def drops_single_gradients(job: Job):
    named = dict(job.model.named_parameters())
    for step, sync in enumerate([True, False]):
        with nullcontext() if sync else job.no_sync():
            job.backward(10 * step)
        for name in ("embed.weight", "blocks.0.qkv.weight", "temperature"):
            named[name].grad = None
        job.backward(10 * step + 1)
        named["blocks.1.up.bias"].grad = None
        named["blocks.0.norm1.weight"].grad.zero_()
        job.update()
    return []


@loop(plans=FEW, kind=Branches)
def drops_what_only_an_earlier_micro_batch_used(job: Job):
    with job.no_sync():
        job.backward(0, lambda rank, step: job.loss(rank, step, branch="left right"))
    for parameter in job.model.right.parameters():
        parameter.grad = None
    job.backward(1, lambda rank, step: job.loss(rank, step, branch="left"))
    job.update()
    assert all(p.grad is None for p in job.model.right.parameters())
    return []


# --- unused parameters ------------------------------------------------------------------------


@loop(plans=GRADS, kind=Branches)
def leaves_unused_parameters_alone(job: Job):
    """No gradient: no update, no weight decay, no state (compare looks at all of them)."""
    losses = []
    for step, branch in enumerate(["left", "left", "left right", "right"]):
        losses.append(job.backward(step, lambda r, s, b=branch: job.loss(r, s, branch=b)))
        unused = {"left": job.model.right, "right": job.model.left}.get(branch)
        if unused is not None:
            assert all(p.grad is None for p in unused.parameters())
        job.update()
    return losses


@loop(kind=Branches)
def uses_a_parameter_on_one_rank_only(job: Job):
    losses = []
    for step in range(3):

        def loss(rank: int, step: int) -> torch.Tensor:
            return job.loss(rank, step, branch="left right" if rank == step else "left")

        losses.append(job.backward(step, loss))
        assert all(p.grad is not None for p in job.model.parameters())
        job.update()
    return losses


# --- token-weighted losses --------------------------------------------------------------------


@loop(plans=FEW)
def weighs_tokens(job: Job):
    """Uneven batches: sums of losses, divided by the tokens of all ranks."""
    losses = []
    for step in range(2):
        total = sum(6 * (1 + rank) for rank in range(job.world))
        if not job.is_plain:
            sw.set_grad_divisor(job.model, total)
        for micro in range(2):
            for rank in job.ranks:
                tokens = job.tokens(rank, 10 * step + micro, size=1 + rank)
                logits = job.model(tokens[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
                (loss / total if job.is_plain else loss).backward()
        losses.append(job.clip(0.1))
        job.update()
    return losses


# --- exceptions -------------------------------------------------------------------------------


class Boom(Exception):
    """Raised on purpose."""


def fail_at(module: nn.Module, where: str):
    """Makes a module raise once, in its forward or when a gradient reaches its output."""

    def raise_it(*_: Any) -> None:
        handle.remove()
        raise Boom

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        handle.remove()
        output.register_hook(raise_it)

    if where == "forward":
        handle = module.register_forward_hook(raise_it)
    elif where == "before forward":
        handle = module.register_forward_pre_hook(raise_it, prepend=True)
    else:
        handle = module.register_forward_hook(watch)


def fail(job: Job, step: int, where: str, branch: str = "") -> None:
    """A backward of every rank, failing in the middle of the model."""
    for rank in job.ranks:
        options = {"branch": "left" if rank else branch} if branch else {}
        fail_at(job.model.left if branch else job.model.blocks[0], where)
        try:
            loss = job.loss(rank, step, **options)
            (loss / job.world if job.is_plain else loss).backward()
        except Boom:
            continue
        raise AssertionError("it did not fail")


@loop()
def goes_on_after_exceptions(job: Job):
    losses = []
    for step, where in enumerate(["", "forward", "backward", "before forward", "backward"]):
        if where:
            fail(job, 50 + step, where)
            job.optimizer.zero_grad()  # what had arrived before the exception is dropped
        losses.append(job.backward(step))
        losses.append(job.clip(1.0))
        job.update()
    return losses


@loop(plans=FEW)
def keeps_what_arrived_before_an_exception(job: Job):
    """Without zero_grad the gradients of the failed backward count, as far as it came."""
    losses = []
    for step, where in enumerate(["backward", "forward", "backward"]):
        losses.append(job.backward(step))
        fail(job, 50 + step, where)
        losses.append(job.backward(10 + step))
        job.update()
    return losses


@loop(plans=FEW)
def fails_under_no_sync(job: Job):
    job.backward(0)
    job.update()
    with job.no_sync():
        job.backward(1)
        fail(job, 50, "backward")
    job.backward(2)
    job.update()
    with job.no_sync():
        fail(job, 51, "backward")
    job.optimizer.zero_grad()
    job.backward(3)
    job.update()
    return []


@loop(plans=FEW)
def fails_in_the_very_first_pass(job: Job):
    fail(job, 50, "forward")
    fail(job, 51, "backward")
    job.optimizer.zero_grad()
    losses = [job.backward(0)]
    job.update()
    losses.append(job.backward(1))
    job.update()
    return losses


@loop(kind=Branches)
def fails_after_gradients_that_one_rank_had(job: Job):
    """They are dropped on the ranks that never saw them, too."""
    job.backward(0)
    job.update()
    fail(job, 50, "backward", branch="left right")
    job.optimizer.zero_grad()
    assert not job.grads()
    job.backward(1)
    job.update()
    return []


@pytest.mark.parametrize("name", LOOPS)
def test_loop_equals_one_process(name, four):
    four.run(check, name)


# --- refusals ---------------------------------------------------------------------------------


def refuse_unreduced() -> list[str]:
    messages = []
    for _, job in each_plan(*FEW):
        with sw.no_sync(job.model):
            job.backward(0)
        for call in (
            job.optimizer.step,
            lambda: sw.clip_grad_norm_(job.model, 1.0),  # noqa: B023
            lambda: sw.full_grads(job.model),  # noqa: B023
        ):
            with pytest.raises(UsageError, match="no_sync") as caught:
                call()
            messages.append(str(caught.value))
        job.backward(1)  # which reduces them
        job.update()
        with sw.no_sync(job.model):
            fail(job, 50, "backward")
        with pytest.raises(UsageError, match="no_sync"):  # the exception left no_sync, not they
            job.optimizer.step()
        job.optimizer.zero_grad()
        with pytest.raises(UsageError, match="positive"):
            sw.set_grad_divisor(job.model, 0)
    return messages


def test_step_without_a_synchronising_backward_is_refused(four):
    messages = four.run(refuse_unreduced)[0]
    assert "outside shardwise.no_sync" in messages[0]


# --- frozen parameters ------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted_gpt() -> nn.Module:
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
        for part in (block.qkv.down, block.qkv.up):
            part.requires_grad_(True)
    model.temperature.requires_grad_(True)
    return model


def train_adapters(job: Job):
    losses = []
    for step in range(3):
        with job.no_sync():
            losses.append(job.backward(10 * step))
        losses.append(job.backward(10 * step + 1))
        losses.append(job.clip(0.01))
        if not job.is_plain:
            runtime = sw.api.runtime_of(job.model)
            flats = [flat for unit in runtime.units for flat in unit.flats]
            assert {flat.spec.requires_grad for flat in flats} == {True, False}
            for flat in flats:
                memory = (
                    flat.params.master,
                    flat.grads.summed,
                    flat.grads.held,
                    flat.grads.local.full,
                )
                if not flat.spec.requires_grad:
                    assert memory == (None,) * 4
        job.update()
    return losses


def check_adapters() -> None:
    compare(train_adapters, kind=adapted_gpt, optimizer=adamw)


def test_frozen_parameters_have_no_gradient_or_optimizer_memory(four):
    four.run(check_adapters)
