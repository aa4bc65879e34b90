"""What ``p.grad`` shows, what a user may do to it, and clipping, as in one plain process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.core.errors import UsageError
from shardwise.plans.plan import Override, Plan
from shardwise.runtime.surface import norms
from tests.models import largest_difference
from tests.runtime.support import spreads
from tests.runtime.training import FEW, PLANS, Job, compare, each_plan, plain_job

MIXED: dict[str, Plan] = {
    "root replicated": replace(
        PLANS["zero3"], overrides=(Override(unit="root", **spreads("none", "none", "none")),)
    ),
    "blocks replicated": replace(
        PLANS["zero3"], overrides=(Override(unit="blocks.0", **spreads("none", "none", "none")),)
    ),
    "one block in the node": replace(
        PLANS["zero1"], overrides=(Override(unit="blocks.1", **spreads("node", "node", "node")),)
    ),
}
"""Other spreads of OS in one model: each unit has replicas of its own."""


# --- clipping ---------------------------------------------------------------------------------


def clip_norms(job: Job):
    norms = []
    for step, norm_type in enumerate([2.0, 1.0, 3.0, float("inf")]):
        job.backward(step)
        norms.append(job.clip(1e9, norm_type, error_if_nonfinite=True))  # changes nothing
        for max_norm, foreach in ((0.05, None), (0.04, True), (0.03, False)):
            norms.append(
                job.clip(max_norm, norm_type, foreach=foreach)
            )  # of what the last one left
        job.update()
    return norms


def check_clipping() -> None:
    compare(clip_norms)
    compare(clip_norms, MIXED)


def test_clipping_by_several_norms(four):
    four.run(check_clipping)


FOREACH = ("_foreach_norm", "_foreach_mul_")


def check_foreach() -> None:
    """The kernels run as asked for, and where the device lacks them, True is refused on all ranks.

    Also on ranks that have no part of any gradient.
    """
    for name, job in each_plan("zero3", "ddp", "hsdp"):
        job.backward(0)
        expected = job.clip(1e9)
        clips = partial(sw.clip_grad_norm_, job.model, 1e9)
        with pytest.MonkeyPatch.context() as patch:
            called: list[str] = []
            for kernel in FOREACH:
                patch.setattr(torch, kernel, _noting(getattr(torch, kernel), kernel, called))
            for foreach, kernels in ((None, FOREACH), (True, FOREACH), (False, ())):
                called.clear()
                norm = job.clip(0.9 * expected, foreach=foreach)
                assert norm == pytest.approx(expected, rel=1e-5), (name, foreach)
                # Of replicas only the first one counts its part.
                assert set(called) in [{*kernels}, {*kernels} - {"_foreach_norm"}], name
                expected *= 0.9
            patch.setattr(norms, "_device_has_foreach_support", lambda device: False)
            with pytest.raises(UsageError, match=r"foreach=True.*cpu.*foreach=False"):
                clips(foreach=True)
            called.clear()
            for foreach in (None, False):
                assert clips(foreach=foreach).item() == pytest.approx(expected, rel=1e-5)
            assert not called, name
        job.update()


def _noting(function: Callable[..., Any], name: str, called: list[str]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    return noting


def test_clipping_takes_foreach_kernels_as_asked(four):
    four.run(check_foreach)


def check_nonfinite() -> None:
    plain = plain_job()
    for name, job in each_plan(*FEW):
        for poison in (float("inf"), float("nan")):
            plain.backward(0)
            job.backward(0, lambda r, s, x=poison: job.loss(r, s) * (x if r == 1 else 1.0))  # noqa: B023
            with pytest.raises(UsageError, match="error_if_nonfinite"):
                job.clip(1.0, error_if_nonfinite=True)
            norm = torch.tensor(job.clip(1.0))
            assert not norm.isfinite(), (name, norm)
            job.optimizer.zero_grad()
        with pytest.raises(UsageError, match="positive order"):
            job.clip(1.0, 0.0)
        assert job.clip(1.0) == 0.0  # no gradients


def test_norms_that_are_not_finite(four):
    four.run(check_nonfinite)


# --- what p.grad shows ------------------------------------------------------------------------

VISIBLE = ("ddp",)
"""Plans under which every rank has the whole reduced gradient."""


def look_at_grads() -> None:
    plain = plain_job()
    plain.backward(0)
    expected = plain.grads()
    for name, job in each_plan():
        assert all(p.grad is None for p in job.model.parameters())
        job.backward(0)
        difference = largest_difference(sw.full_grads(job.model), expected)
        assert difference <= 1e-12, (name, difference)
        for key, parameter in job.model.named_parameters():
            grad = parameter.grad
            assert grad.shape == parameter.shape, (name, key)
            assert grad.dtype == parameter.dtype, (name, key)
            assert grad.device == parameter.device, (name, key)
            assert not grad.requires_grad, (name, key)
            if name in VISIBLE:
                assert (grad - expected[key]).abs().max() <= 1e-12, (name, key)
                continue
            for read in (torch.Tensor.sum, torch.Tensor.clone, torch.Tensor.tolist, torch.isnan):
                with pytest.raises(UsageError, match=key):
                    read(grad)
        job.optimizer.zero_grad()
        assert all(p.grad is None for p in job.model.parameters())
        assert sw.full_grads(job.model) == {}


def test_grads_have_true_metadata_and_never_wrong_values(four):
    four.run(look_at_grads)


def use_torch_utilities(job: Job):
    numbers = []
    for step in range(3):
        job.backward(step)
        nn.utils.clip_grad_value_(job.model.parameters(), 0.01)
        for parameter in job.model.blocks[0].parameters():
            parameter.grad *= 0.5
            parameter.grad /= 0.25
        job.model.head.weight.grad.neg_()
        job.model.temperature.grad.clamp_(-0.001, 0.001)
        numbers.append(job.clip(1e9))
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None for p in job.model.parameters())
    job.optimizer.step()  # zeros, unlike None, still decay and move
    return numbers


def check_torch_utilities() -> None:
    compare(use_torch_utilities, FEW)
    compare(use_torch_utilities, MIXED)


def test_elementwise_utilities_work_on_parts(four):
    four.run(check_torch_utilities)


def clip_with_torch() -> None:
    plain = plain_job()
    plain.backward(0)
    expected = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
    for name, job in each_plan():
        job.backward(0)
        if name in VISIBLE:
            norm = nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
            assert abs(norm - expected) <= 1e-12
            assert largest_difference(sw.full_grads(job.model), plain.grads()) <= 1e-12
        else:
            for foreach in (None, False):
                with pytest.raises(UsageError, match=r"shardwise\.clip_grad_norm_"):
                    nn.utils.clip_grad_norm_(job.model.parameters(), 0.1, foreach=foreach)


def test_torch_clip_grad_norm_works_or_says_what_to_call(four):
    four.run(clip_with_torch)


# --- assigned gradients -----------------------------------------------------------------------


def assign_grads(job: Job):
    """A tensor put into ``p.grad`` is the gradient, before, between and after backward passes."""
    named = dict(job.model.named_parameters())
    numbers = []
    for step in range(2):
        weight, scalar = named["blocks.0.up.weight"], named["temperature"]
        weight.grad = torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).view(weight.shape)
        job.backward(10 * step)  # adds to it
        scalar.grad = torch.tensor(0.25, dtype=scalar.dtype)
        numbers.append(job.clip(1e9))
        scalar.grad *= 2.0  # clip_grad_norm_ has looked at it: still counts
        job.backward(10 * step + 1)
        named["embed.weight"].grad = torch.ones(19, 12, dtype=weight.dtype)
        job.update()
    for parameter in job.model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
    numbers.append(job.clip(0.5))
    job.update()  # without any backward
    return numbers


def check_assigned() -> None:
    compare(assign_grads)


def test_assigned_gradients_are_adopted(four):
    four.run(check_assigned)


def refuse_foreign_handles() -> None:
    for _, job in each_plan("zero3"):
        job.backward(0)
        first, second = job.model.blocks[0].up.weight, job.model.blocks[1].up.weight
        first.grad = second.grad
        with pytest.raises(UsageError, match="another parameter"):
            job.optimizer.step()
        first.grad = None
        with pytest.raises(UsageError, match=r"blocks\.1\.up\.weight"):
            second.grad.mul_(torch.ones(second.shape, dtype=second.dtype))
        with pytest.raises((RuntimeError, TypeError), match=r"size|shape"):
            first.grad = torch.ones(3, dtype=torch.float64)
        job.update()


def test_the_gradient_of_another_parameter_is_refused(four):
    four.run(refuse_foreign_handles)


def grads_of_inputs() -> None:
    """autograd.grad and a loss penalty touch no accumulated gradient."""
    for name, job in each_plan(*FEW):
        plain = plain_job()
        for trainee in (plain, job):
            trainee.backward(0)
            for rank in trainee.ranks:
                wanted = [trainee.model.blocks[1].up.bias, trainee.model.temperature]
                torch.autograd.grad(trainee.loss(rank, 1), wanted)
            assert all(p.grad is not None for p in trainee.model.parameters())
            trainee.update()
        assert largest_difference(job.parameters(), plain.parameters()) <= 1e-9, name
    dist.barrier()


def test_autograd_grad_leaves_accumulated_gradients(four):
    four.run(grads_of_inputs)
