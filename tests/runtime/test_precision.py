"""Mixed precision: the plan's dtypes, autocast and GradScaler, against the same recipe by hand.

Tolerances: sums in float32 come in another order (1e-6), and a master that differs in its last bit
may round to another compute value; where gradients travel in bfloat16 every hop rounds to 8 bits.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.plans.plan import Precision
from tests.models import largest_difference, on_rank_0
from tests.runtime.support import assert_at_rest, assert_close
from tests.runtime.training import FEW, PLANS, Job, compare, each_plan, gpt, plain_job, sharded_job

TRAVEL = ("zero3", "ddp", "zero2", "amsp", "hsdp")


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Emulated(Job):
    """The recipe by hand: a master that the optimizer updates, and a copy that computes."""

    def __init__(self, plain: Job, precision: Precision, dtype: str) -> None:
        compute, self.reduce, master = (
            getattr(torch, name)
            for name in (
                precision.compute_dtype(dtype),
                precision.reduce_dtype(dtype),
                precision.master_dtype(dtype),
            )
        )
        self.masters = {n: nn.Parameter(p.to(master)) for n, p in plain.parameters().items()}
        model = plain.model.to(compute)
        optimizer = optim.SGD(self.masters.values(), lr=0.1, momentum=0.9)
        super().__init__(model, optimizer, plain.ranks, plain.world)
        self.copy_down()

    def copy_down(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])

    def backward(self, step: int, loss: Callable[[int, int], torch.Tensor] | None = None) -> float:
        total = 0.0
        for rank in self.ranks:
            value = (loss or self.loss)(rank, step)
            value.backward()
            total += value.item()
            for name, parameter in self.model.named_parameters():
                master = self.masters[name]
                grad = parameter.grad.to(self.reduce).to(master.dtype) / self.world
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None
        return total / self.world

    def clip(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> float:
        return nn.utils.clip_grad_norm_(self.masters.values(), max_norm, norm_type).item()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.masters.items()}


RECIPES: dict[str, tuple[torch.dtype, Precision, float]] = {
    "bf16 compute": (
        torch.float32,
        Precision(compute="bfloat16", reduce="float32", master="float32"),
        1e-4,
    ),
    "bf16 compute and reduce": (torch.float32, Precision(compute="bfloat16"), 3e-3),
    "bf16 model": (torch.bfloat16, Precision(), 3e-3),
    "bf16 everything": (torch.float32, Precision(compute="bfloat16", master="bfloat16"), 3e-2),
    "fp16 compute": (torch.float32, Precision(compute="float16", reduce="float32"), 1e-4),
    "fp64 master": (torch.float32, Precision(master="float64"), 1e-5),
}
UNDER_ALL = ("bf16 compute", "bf16 model")
"""With a master apart from what computes, and without; what travels differs under few plans."""


def train(job: Job) -> list[float]:
    losses = []
    for step in range(3):
        with job.no_sync():
            losses.append(job.backward(10 * step))
        losses.append(job.backward(10 * step + 1))
        losses.append(job.clip(0.5))
        job.update()
        if isinstance(job, Emulated):
            job.copy_down()
    return losses


def check_recipe(name: str) -> None:
    dtype, precision, tolerance = RECIPES[name]

    def reference() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.dtype]]:
        emulated = Emulated(plain_job(dtype=dtype), precision, str(dtype).removeprefix("torch."))
        losses = train(emulated)
        return (
            losses,
            emulated.parameters(),
            {n: p.dtype for n, p in emulated.model.named_parameters()},
        )

    expected, parameters, compute = on_rank_0(reference)
    for plan in PLANS if name in UNDER_ALL else TRAVEL:
        job = sharded_job(replace(PLANS[plan], precision=precision), optimizer=sgd, dtype=dtype)
        assert_close(train(job), expected, plan, tolerance)
        masters = sw.state_dict(job.model, rank0_only=False, master=True)
        masters = {n: masters[n] for n in parameters}
        assert {m.dtype for m in masters.values()} == {m.dtype for m in parameters.values()}, plan
        difference = largest_difference(masters, parameters)
        assert difference <= tolerance, (plan, difference)
        for key, value in job.parameters().items():
            assert value.dtype == compute[key], (plan, key)
            assert torch.equal(value, masters[key].to(value.dtype)), (plan, key)
        assert_at_rest(job.model)
        sw.unshard(job.model)


@pytest.mark.parametrize("name", RECIPES)
def test_dtypes_for_compute_reduction_and_master(name, four):
    four.run(check_recipe, name)


def write_in_full() -> None:
    """Writing rounds a wider master only where the written value is another one."""
    for plan in FEW:
        precision = Precision(compute="bfloat16")
        job = sharded_job(
            replace(PLANS[plan], precision=precision), optimizer=sgd, dtype=torch.float32
        )
        train(job)
        before = sw.state_dict(job.model, rank0_only=False, master=True)
        with sw.full_params(job.model, write=True), torch.no_grad():
            job.model.blocks[0].up.bias[3] += 1.0
            job.model.temperature.fill_(0.75)
        after = sw.state_dict(job.model, rank0_only=False, master=True)
        assert after["temperature"] == 0.75
        changed = (after["blocks.0.up.bias"] != before["blocks.0.up.bias"]).nonzero()
        assert changed.tolist() == [[3]], plan
        for name in before.keys() - {"temperature", "blocks.0.up.bias"}:
            assert torch.equal(before[name], after[name]), (plan, name)
        sw.unshard(job.model)


def test_full_params_does_not_round_what_was_not_written(four):
    four.run(write_in_full)


# --- GradScaler -------------------------------------------------------------------------------


def _overflow_once(parameter: nn.Parameter) -> None:
    def overflow(grad: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return grad * float("inf")

    handle = parameter.register_hook(overflow)


def scaled(job: Job, *, fused: bool = False, autocast: bool = False) -> list[float]:
    """Loss scaling with an overflow on one rank in the second step: all ranks skip that one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    seen = []
    for step in range(5):

        def loss(rank: int, step: int) -> torch.Tensor:
            if (rank, step) == (1, 1):  # in one parameter, which most ranks have no part of
                _overflow_once(job.model.temperature)
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                return scaler.scale(job.loss(rank, step))

        job.backward(step, loss)
        if not fused:
            scaler.unscale_(job.optimizer)
            seen.append(job.clip(0.5) if step != 1 else 0.0)
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        if isinstance(job, Emulated):
            job.copy_down()
        seen.append(scaler.get_scale())
    return seen


def check_scaler() -> None:
    precision = Precision(compute="float16")
    emulated = Emulated(plain_job(dtype=torch.float32), precision, "float32")
    expected = scaled(emulated)
    scales = expected[1::2]
    assert scales == [256.0, 128.0, 128.0, 256.0, 256.0]
    for plan in PLANS:
        job = sharded_job(
            replace(PLANS[plan], precision=precision), optimizer=sgd, dtype=torch.float32
        )
        assert_close(scaled(job), expected, plan, 2e-3)
        masters = sw.state_dict(job.model, rank0_only=False, master=True)
        masters = {n: masters[n] for n in emulated.masters}
        assert largest_difference(masters, emulated.parameters()) <= 2e-3, plan
        sw.unshard(job.model)


def test_grad_scaler_skips_on_all_ranks_after_an_overflow_on_one(four):
    four.run(check_scaler)


def scaled_under_autocast(job: Job) -> list[float]:
    return scaled(job, autocast=True)


def scaled_in_the_kernel(job: Job) -> list[float]:
    return scaled(job, fused=True)


def check_scaled_fp32() -> None:
    compare(scaled_under_autocast, TRAVEL, optimizer=sgd, dtype=torch.float32, tolerance=1e-4)

    def fused(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    compare(scaled_in_the_kernel, TRAVEL, optimizer=fused, dtype=torch.float32, tolerance=1e-5)


def test_grad_scaler_on_full_precision_parameters(four):
    four.run(check_scaled_fp32)


# --- autocast ---------------------------------------------------------------------------------


def autocast_training(job: Job) -> list[float]:
    def loss(rank: int, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return job.loss(rank, step)

    losses = []
    for step in range(3):
        losses.append(job.backward(step, loss))
        job.update()
    return losses


def check_autocast() -> None:
    compare(autocast_training, optimizer=sgd, dtype=torch.float32, tolerance=1e-4)


def test_autocast_trains_like_plain_autocast(four):
    four.run(check_autocast)


class CountCasts(TorchDispatchMode):
    """How often float32 became bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += func is torch.ops.aten._to_copy.default and (
            kwargs.get("dtype") is torch.bfloat16
        )
        return func(*args, **kwargs)


class SelfCasting(nn.Module):
    """Enters autocast itself, with a context from its construction."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()
        self.context = torch.autocast("cpu", torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.context:
            return self.inner(tokens)


def casts_of_two_forwards(job: Job, inputs: torch.Tensor) -> tuple[int, int]:
    with torch.autocast("cpu", torch.bfloat16), CountCasts() as casts:
        job.model(inputs)
        first = casts.count
        job.model(inputs)
        return first, casts.count - first


def check_cache() -> None:
    """What a cache held would not have to be cast again; afterwards the cache is as it was."""
    for kind in (gpt, SelfCasting):
        plain = plain_job(kind=kind, dtype=torch.float32)
        inputs = plain.tokens(0, 0)[:, :-1]
        first, second = casts_of_two_forwards(plain, inputs)
        assert second < first
        for name, job in each_plan("zero3", "hsdp", kind=kind, dtype=torch.float32):
            first, second = casts_of_two_forwards(job, inputs)
            assert first == second, (name, kind)
            assert torch.is_autocast_cache_enabled()
            blocks = getattr(job.model, "inner", job.model).blocks
            handle = blocks[1].register_forward_pre_hook(_fail)
            with pytest.raises(ArithmeticError), torch.autocast("cpu", torch.bfloat16):
                job.model(inputs)
            assert torch.is_autocast_cache_enabled(), name
            handle.remove()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                job.model(inputs)
                assert not torch.is_autocast_cache_enabled()
    gc.collect()


def _fail(*_: Any) -> None:
    raise ArithmeticError


def test_autocast_caches_no_weights(four):
    four.run(check_cache)
