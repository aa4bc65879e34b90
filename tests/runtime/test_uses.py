"""What users build around models: other models, hooks, compilation, plans by unit, failures."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.plans.plan import Override, Plan
from tests.models import TinyGPT, batch, largest_difference, lm_loss, mine
from tests.runtime.support import (
    LEVELS,
    LIMIT_S,
    ONE_LEVEL,
    PLANS,
    TWO_LEVELS,
    Case,
    assert_at_rest,
    build,
    check_case,
    collector,
    peer_links,
    sgd,
    small,
    spreads,
)
from tests.runtime.test_models import Stack, features, tokens, train, train_stack

CASES: dict[str, Case] = {}
case = collector(CASES)


def check(name: str) -> None:
    check_case(CASES[name])


# --- hooks ----------------------------------------------------------------------------------------


def add_hooks(model: nn.Module) -> None:
    """Hooks of every kind that change numbers, so that a lost or doubled one shows."""
    model.seen = []
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
    block.register_forward_hook(lambda m, args, out: out * 0.9)
    block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 1.5,))
    block.up.weight.register_hook(lambda g: g * 2)
    block.up.weight.register_post_accumulate_grad_hook(_seen(model))
    model.last.weight.register_post_accumulate_grad_hook(_seen(model))


def _seen(model: nn.Module) -> Any:
    return lambda p: model.seen.append(float(p.grad.abs().sum()))


class HookedBefore(Stack):
    def __init__(self) -> None:
        super().__init__()
        add_hooks(self)


def _train_and_look(model: nn.Module, rank: int, step: int) -> Any:
    """The hooks see this rank's gradient, the same whenever they were registered."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    before = {n: g.clone() for n, g in grads.items()} if not rank else {}
    del model.seen[:]
    loss = train_stack(model, rank, step)
    # The plain process accumulates over ranks in p.grad, so only rank 0's first is comparable.
    return loss, list(model.seen) if not rank and not before else 2 * [0.0]


@case(HookedBefore)
def hooks_from_before(model, rank, step):
    return _train_and_look(model, rank, step)


@case(Stack, sharded=add_hooks)
def hooks_from_after(model, rank, step):
    return _train_and_look(model, rank, step)


# --- compilation ----------------------------------------------------------------------------------


class Compiled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = torch.compile(self.blocks[0], backend="aot_eager")
        self.blocks[1].compile(backend="aot_eager")


def compile_blocks(model: nn.Module) -> None:
    model.blocks[0].compile(backend="aot_eager")
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="aot_eager")


def compile_all(model: nn.Module) -> None:
    model.compile(backend="aot_eager")


@case(Compiled)
def blocks_compiled_before(model, rank, step):
    return train_stack(model, rank, step)


@case(Stack, sharded=compile_blocks)
def blocks_compiled_after(model, rank, step):
    return train_stack(model, rank, step)


@case(Stack, sharded=compile_all)
def the_whole_model_compiled(model, rank, step):
    return train_stack(model, rank, step)


# --- plans by unit --------------------------------------------------------------------------------

FIRST_REPLICATED = {"overrides": (Override(unit="blocks.0", **spreads("none", "none", "world")),)}


@case(TinyGPT, plans=("zero3", "fsdp keep=full"), changes=FIRST_REPLICATED)
def the_first_block_replicated(model, rank, step):
    return train(model, rank, step)


@case(TinyGPT, plans=("zero3",), changes={"prefetch": 0})
def no_prefetch(model, rank, step):
    return train(model, rank, step)


@case(TinyGPT, plans=("zero3", "fsdp keep=full"), changes={"prefetch": 3})
def prefetch_of_three(model, rank, step):
    return train(model, rank, step)


@case(TinyGPT, plans=("fsdp keep=full",), changes={"keep_until": "step"})
def accumulation_keeping_until_the_step(model, rank, step):
    return _accumulate(model, rank, step)


@case(TinyGPT)
def accumulation(model, rank, step):
    return _accumulate(model, rank, step)


def _accumulate(model: nn.Module, rank: int, step: int) -> list[float]:
    plain = not model._forward_pre_hooks
    losses = []
    for micro in range(3):
        with nullcontext() if plain or micro == 2 else sw.no_sync(model):
            loss = model(tokens(rank, 10 * step + micro)).square().mean() / 3
            loss.backward()
            losses.append(loss.item())
    return losses


# --- failures -------------------------------------------------------------------------------------


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@case(Stack, steps=4)
def exceptions_on_all_ranks(model, rank, step):
    """In forward, in backward, in a hook; after each one training goes on."""
    if step == 1:
        handle = model.blocks[1].register_forward_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(features(rank, step))
        handle.remove()
    if step == 2:
        out = model(features(rank, step))
        out.register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
    if step == 3:
        handle = model.register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(features(rank, step))
        handle.remove()
    return train_stack(model, rank, step)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@case(Stack, steps=4, extra_gathers=True)  # the first backward is not recorded in full
def interrupted_in_backward(model, rank, step):
    """By the user, who goes on: what had arrived counts, as without us."""
    if step in (0, 2):
        out = model(features(rank, step))
        out.register_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            out.sum().backward()
    return train_stack(model, rank, step)


@case(Stack, steps=5)
def interrupted_in_forward(model, rank, step):
    """By the user, who goes on: with another forward, or with a step of what there was before."""
    places = {1: model.blocks[1], 2: model.blocks[1].up, 3: model.last}
    if step in places:
        handle = places[step].register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt), torch.autocast("cpu", enabled=False):
            model(features(rank, step))
        handle.remove()
    return train_stack(model, rank, step)


def step_after_an_interrupted_forward() -> None:
    """An interrupt between backward and step leaves nothing that counts as a running forward."""
    model = build(Stack)
    optimizer = sgd(model)
    sw.shard(model, optimizer, small(PLANS["zero3"]), levels=LEVELS[2], timeout_s=LIMIT_S)
    for step in range(2):
        model(features(dist.get_rank(), step)).mean().backward()
        handle = model.blocks[0].register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(features(dist.get_rank(), step))
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.is_autocast_cache_enabled()
    assert_at_rest(model)
    sw.unshard(model)


def test_a_step_after_an_interrupted_forward(two):
    two.run(step_after_an_interrupted_forward)


def read_after_forward() -> None:
    """A parameter read in a loss outside of forward: refused, and training goes on."""
    model = build(Stack)
    optimizer = sgd(model)
    sw.shard(model, optimizer, small(PLANS["zero3"]), levels=LEVELS[2], timeout_s=LIMIT_S)
    for step in range(2):
        out = model(features(dist.get_rank(), step))
        with pytest.raises(sw.UsageError, match=r"blocks\.0\.up\.weight.*full_params"):
            out.mean() + model.blocks[0].up.weight.square().sum()
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_at_rest(model)
    sw.unshard(model)


def test_reading_a_parameter_in_the_loss_is_refused(two):
    two.run(read_after_forward)


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_one_process(name, two):
    two.run(check, name)


# --- several models -------------------------------------------------------------------------------


class Frame(nn.Module):
    """An unsharded model around a sharded one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(24, 24).double(), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.before(x)) + self.inner(x)


def several_models() -> None:
    """A frozen teacher under zero3, a student under zero1 inside a plain frame, one loss."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def make() -> tuple[nn.Module, nn.Module]:
        teacher = build(Stack, seed=1).requires_grad_(False)
        return teacher, Frame(build(Stack, seed=2))

    def step_of(teacher: nn.Module, frame: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = features(rank, step)
        with torch.no_grad():
            wanted = teacher(x)
        soft = teacher(frame.before(x))  # gradients through the frozen teacher, too
        return F.mse_loss(frame(x), wanted) + 0.1 * soft.square().mean()

    for names in (("zero3", "zero1"), ("zero3", "fsdp keep=full")):
        plain_teacher, plain = make()
        teacher, frame = make()
        plain_optimizer, optimizer = sgd(plain), sgd(frame.inner)
        outer = sgd(frame.before)
        sw.shard(teacher, None, small(PLANS[names[0]]), levels=LEVELS[world], timeout_s=LIMIT_S)
        sw.shard(
            frame.inner, optimizer, small(PLANS[names[1]]), levels=LEVELS[world], timeout_s=LIMIT_S
        )
        for step in range(3):
            for r in range(world):
                (step_of(plain_teacher, plain, r, step) / world).backward()
            step_of(teacher, frame, rank, step).backward()
            for parameter in frame.before.parameters():  # not ours: the user's to average
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            for any_optimizer in (plain_optimizer, optimizer, outer):
                any_optimizer.step()
                any_optimizer.zero_grad()
        expected = plain.inner.state_dict()
        assert largest_difference(sw.state_dict(frame.inner, rank0_only=False), expected) <= 1e-9
        assert largest_difference(frame.before.state_dict(), plain.before.state_dict()) <= 1e-9
        assert_at_rest(teacher)
        assert_at_rest(frame.inner)
        sw.unshard(teacher)
        sw.unshard(frame.inner)


def test_several_models_in_one_process(two):
    two.run(several_models)


# --- randomness, links, memory --------------------------------------------------------------------


class Dropping(TinyGPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(tokens), 0.2, self.training)


def bitwise_alone() -> None:
    """One rank: the same bits as a plain process, random numbers included, under every plan."""
    for name in (*ONE_LEVEL, "zero2", *TWO_LEVELS):
        plain, model = build(Dropping), build(Dropping)
        # Not the fused kernel, which rounds otherwise than the one that plain torch would take.
        reference, optimizer = (
            torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=False)
            for m in (plain, model)
        )
        before = torch.get_rng_state()
        sw.shard(model, optimizer, small(PLANS[name]), levels=LEVELS[1])
        assert torch.equal(torch.get_rng_state(), before)
        for step in range(3):
            for any_model, any_optimizer in ((plain, reference), (model, optimizer)):
                torch.manual_seed(step)
                lm_loss(any_model, *batch(step)).backward()
                any_optimizer.step()
                any_optimizer.zero_grad()
        assert largest_difference(sw.state_dict(model), plain.state_dict()) == 0, name
        sw.unshard(model)


def test_one_rank_has_the_same_bits(one):
    one.run(bitwise_alone)


def parity_of_plans(names: tuple[str, ...]) -> None:
    """Over messages between ranks the numbers are the same bits as over shared memory."""
    results = []
    for peer in (False, True):
        for name in names:
            model = build(TinyGPT)
            optimizer = sgd(model)
            levels = LEVELS[dist.get_world_size()]
            if peer:
                with peer_links():
                    sw.shard(model, optimizer, small(PLANS[name]), levels=levels, timeout_s=LIMIT_S)
            else:
                sw.shard(model, optimizer, small(PLANS[name]), levels=levels, timeout_s=LIMIT_S)
            for step in range(3):
                with sw.no_sync(model):
                    lm_loss(model, *mine(*batch(step + 5))).backward()
                lm_loss(model, *mine(*batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            kinds = {type(link).__name__ for link in runtime_of(model).grid._links.values()}
            assert ("PeerLink" in kinds) == peer
            results.append(sw.state_dict(model, rank0_only=False))
            sw.unshard(model)
    for local, peer in zip(results, results[len(names) :], strict=False):
        assert largest_difference(local, peer) == 0


def keep_until_step_on_two_levels() -> None:
    kept = CASES["accumulation_keeping_until_the_step"]
    check_case(replace(kept, plans=("zero3 keep=node",)))


def test_accumulation_keeping_the_node_rung_until_the_step(four):
    four.run(keep_until_step_on_two_levels)


def test_both_links_give_the_same_bits(four):
    four.run(parity_of_plans, ("zero3 keep=node", "amsp", "ddp"))


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Heavy(nn.Module):
    def __init__(self, dim: int = 512, layers: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)) for _ in range(layers)
        )
        self.last = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def memory_of(plan: Plan) -> dict[str, int]:
    """Resident memory in units: at rest, with everything gathered, and after that."""
    model = Heavy()
    unit_bytes = sum(p.nbytes for p in model.blocks[0].parameters())
    sw.shard(model, None, plan, levels=LEVELS[2], timeout_s=LIMIT_S)
    model(torch.randn(2, 512)).sum().backward()
    gc.collect()
    pool = runtime_of(model).pools.params
    pool.trim()
    found = {"resting": rss_bytes() // unit_bytes}
    with sw.full_params(model):
        found["gathered"] = rss_bytes() // unit_bytes
    pool.trim()
    found["left"] = rss_bytes() // unit_bytes
    sw.unshard(model)
    return found


def peak_units(plan: Plan) -> float:
    """The peak of gathered buffers over several steps, in units."""
    model = Heavy()
    unit_bytes = sum(p.nbytes for p in model.blocks[0].parameters())
    sw.shard(model, None, plan, levels=LEVELS[2], timeout_s=LIMIT_S)
    for _ in range(3):
        model(torch.randn(2, 512)).sum().backward()
    peak = sw.stats(model)["param_buffers_peak_bytes"]
    sw.unshard(model)
    return peak / unit_bytes


def test_gathered_memory_is_bounded_by_prefetch(two):
    for prefetch in (0, 1, 3):
        plan = replace(PLANS["zero3"], prefetch=prefetch)
        # The units in flight, the one in use, and the small root.
        assert max(two.run(peak_units, plan)) <= prefetch + 1 + 0.1, prefetch


def test_freed_memory_goes_back_to_the_system(two):
    for found in two.run(memory_of, PLANS["zero3"]):
        assert found["gathered"] - found["resting"] >= 8, found  # ten units came
        assert found["gathered"] - found["left"] >= 8, found  # and went
