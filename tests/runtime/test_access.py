"""Whole values for people: full_params, state_dict, unshard, deferred initialisation."""

import gc
import io
import logging
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.plans.plan import Precision
from tests.harness import peak_rss_bytes
from tests.models import TinyGPT, adamw, batch, largest_difference, lm_loss, make, mine, train_plain
from tests.runtime.support import (
    LEVELS,
    LIMIT_S,
    ONE_LEVEL,
    PLANS,
    TWO_LEVELS,
    assert_at_rest,
    build,
    levels_of,
    peer_links,
    sgd,
    small,
)


class WithBuffers(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def shard(model: nn.Module, plan: str = "zero3", **changes) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    plan_here = small(PLANS[plan], **changes)
    sw.shard(model, optimizer, plan_here, levels=levels_of(plan_here), timeout_s=LIMIT_S)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        lm_loss(model, *mine(*batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(model: nn.Module, **options) -> dict[str, torch.Tensor]:
    return sw.state_dict(model, rank0_only=False, **options)


# --- full_params ----------------------------------------------------------------------------------


def read_full(plan: str) -> None:
    reference, model = build(TinyGPT), build(TinyGPT)
    train_plain(reference, 2)
    optimizer = shard(model, plan)
    train(model, optimizer, 0, 1)
    expected = dict(reference.named_parameters())
    with sw.full_params(model):
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-9)
        with sw.full_params(model, model.blocks[0]):  # nested
            assert model.blocks[0].up.weight.sum().isfinite()
        assert model.blocks[0].up.weight.sum().isfinite()
        assert model.embed.weight.sum().isfinite()
        text = batch(0)[0][:1, :3]
        for _ in range(3):  # generation, with no gather at all
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        with torch.no_grad():
            model.blocks[1](model.embed(text))
    assert_at_rest(model)
    with pytest.raises(KeyError), sw.full_params(model):
        raise KeyError
    assert_at_rest(model)
    if runtime_of(model).root.travels:
        with sw.full_params(model, model.blocks[1]):
            assert model.blocks[1].up.weight.sum().isfinite()
            with pytest.raises(sw.UsageError):
                model.blocks[0].up.weight.sum()
    adam = adamw(reference)
    optimizer.state.clear()
    lm_loss(reference, *batch(5)).backward()
    adam.step()
    train(model, optimizer, 5)
    assert largest_difference(full(model), reference.state_dict()) <= 1e-9
    sw.unshard(model)


@pytest.mark.parametrize("plan", ONE_LEVEL)
def test_full_params_for_reading(plan, two):
    two.run(read_full, plan)


def write_full(plan: str, compute: str | None) -> None:
    """Rank 0's changes win, reach every rank and every master, and training goes on from them."""
    rank, reference, model = dist.get_rank(), build(TinyGPT), build(TinyGPT)
    optimizer = shard(model, plan, precision=Precision(compute=compute))
    train(model, optimizer, 0)
    optimizer.state.clear()
    with torch.no_grad(), sw.full_params(model, write=True):
        for p, q in zip(model.parameters(), build(TinyGPT, seed=9).parameters(), strict=True):
            p.copy_(q if rank == 0 else torch.full_like(q, 7.0))
    expected = build(TinyGPT, seed=9)
    got, masters = full(model), full(model, master=True)
    for name, value in expected.state_dict().items():
        rounded = value if compute is None else value.bfloat16()
        assert torch.equal(got[name], rounded), name
        # A master that rounds to the written value already keeps its precision.
        assert torch.equal(masters[name].to(rounded.dtype), rounded), name
    with torch.no_grad(), sw.full_params(model, model.blocks[0], write=True):
        model.blocks[0].up.bias.fill_(0.5 if rank == 0 else 0.25)
    assert (full(model)["blocks.0.up.bias"] == 0.5).all()
    with pytest.raises(KeyError), torch.no_grad(), sw.full_params(model, write=True):
        raise KeyError(model.blocks[0].up.bias.fill_(0.75))
    assert (full(model)["blocks.0.up.bias"] == 0.75).all()
    if compute is None:
        reference.load_state_dict(full(model))
        train_plain(reference, 2)
        train(model, optimizer, 0, 1)
        assert largest_difference(full(model), reference.state_dict()) <= 1e-9
    sw.unshard(model)


def write_under(plans: tuple[str, ...]) -> None:
    for plan in plans:
        write_full(plan, None)
        write_full(plan, "bfloat16")


def test_full_params_for_writing(two):
    two.run(write_under, ONE_LEVEL)


def test_full_params_for_writing_on_two_levels(four):
    four.run(write_under, TWO_LEVELS)


# --- state_dict -----------------------------------------------------------------------------------


def state_dicts(plan: str) -> None:
    rank, model, plain = dist.get_rank(), build(WithBuffers), build(WithBuffers)
    optimizer = shard(model, plan, precision=Precision(compute="bfloat16"))
    everywhere, on_first = full(model), sw.state_dict(model)
    assert bool(on_first) == (rank == 0)
    assert everywhere.keys() == plain.state_dict().keys()
    assert everywhere["head.weight"] is everywhere["embed.weight"]
    assert "passing" not in everywhere
    for name, value in everywhere.items():
        expected = plain.state_dict()[name]
        assert not value.requires_grad
        assert type(value) is torch.Tensor
        if name != "kept":
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, expected.bfloat16())
    assert largest_difference(full(model, master=True), plain.state_dict()) == 0
    train(model, optimizer, 0)
    masters, values = full(model, master=True), full(model)
    assert masters["norm.bias"].dtype == torch.float64
    assert torch.equal(masters["norm.bias"].bfloat16(), values["norm.bias"])
    before = values["norm.bias"].clone()
    values["norm.bias"].zero_()  # a copy: nothing of ours
    assert torch.equal(full(model)["norm.bias"], before)
    torch.save(values, io.BytesIO())
    assert_at_rest(model)
    sw.unshard(model)


def test_state_dict(two):
    for plan in ONE_LEVEL:
        two.run(state_dicts, plan)


def test_state_dict_on_two_levels(four):
    for plan in PLANS:
        four.run(state_dicts, plan)


# --- unshard --------------------------------------------------------------------------------------


def traces(model: nn.Module) -> list[str]:
    """Everything on modules and parameters that a plain model does not have."""
    plain, found = dict(build(TinyGPT).named_modules()), []
    for name, module in model.named_modules():
        found += [f"{name}.{key}" for key in vars(module).keys() ^ vars(plain[name]).keys()]
        found += [f"{name}.{key}" for key, value in vars(module).items() if "hooks" in key and value]  # fmt: skip
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            found.append(f"{name}: {type(parameter).__name__}")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            found.append(f"{name}: hooks")
        if parameter.untyped_storage().nbytes() != parameter.nbytes:
            found.append(f"{name}: shares memory")
    return found


def unshard_and_shard_again() -> None:
    reference, model = build(TinyGPT), build(TinyGPT)
    parameters, threads = list(model.parameters()), threading.active_count()
    adam, optimizer = adamw(reference), adamw(model)
    for step, plan in enumerate(ONE_LEVEL):
        world = dist.get_world_size()
        sw.shard(model, optimizer, small(PLANS[plan]), levels=LEVELS[world], timeout_s=LIMIT_S)
        adam.state.clear()
        lm_loss(reference, *batch(step)).backward()
        adam.step()
        adam.zero_grad()
        train(model, optimizer, step)
        with pytest.raises(sw.UsageError, match="sharded already"):
            sw.shard(model, plan="zero3")
        assert sw.unshard(model) is model
        assert traces(model) == []
        # Lanes of models that earlier tests dropped may end meanwhile, but none of these stays.
        assert threading.active_count() <= threads
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        assert largest_difference(model.state_dict(), reference.state_dict()) <= 1e-9
        optimizer.state.clear()
        with pytest.raises(sw.UsageError, match="not sharded"):
            sw.full_grads(model)
    loss = lm_loss(model, *batch(9))  # a plain model: local gradients
    loss.backward()
    optimizer.step()
    assert loss.isfinite()


def test_unshard_leaves_a_plain_model(two):
    two.run(unshard_and_shard_again)


def dropped_models_go() -> None:
    """A sharded model that nobody holds any more gives back memory, threads and hooks."""
    threads = threading.active_count()
    for plan in ("zero3", "zero1"):
        model = build(TinyGPT)
        optimizer = shard(model, plan)
        train(model, optimizer, 0)
        gone = weakref.ref(model), weakref.ref(model.embed.weight), weakref.ref(runtime_of(model))
        dist.barrier()
        del model, optimizer
        deadline = time.monotonic() + 10
        while any(ref() for ref in gone) and time.monotonic() < deadline:
            gc.collect()  # not at once: the last refresh may still run
            time.sleep(0.05)
        assert all(ref() is None for ref in gone)
    # Lanes of models that earlier tests dropped may end meanwhile, but none of these stays.
    assert threading.active_count() <= threads


def test_a_dropped_model_is_collected(two):
    two.run(dropped_models_go)


# --- deferred initialisation ----------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough that deferred_init defers it."""

    def __init__(self, dim: int = 160, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def deferred(plan: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3 if dist.get_rank() == 0 else 4)  # rank 0's seed counts
    with sw.deferred_init():
        model = Wide()
    optimizer = sgd(model)  # built before any value exists
    assert model.blocks[0][0].weight.is_meta
    world = dist.get_world_size()
    sw.shard(model, optimizer, small(PLANS[plan]), levels=LEVELS[world], timeout_s=LIMIT_S)
    assert not any(p.is_meta for p in model.parameters())
    start = full(model)
    plain = Wide()
    plain.load_state_dict(start)
    train_plain(plain, 2, sgd)
    train(model, optimizer, 0, 1)
    assert largest_difference(full(model), plain.state_dict()) < 1e-5  # float32
    sw.unshard(model)
    return start


def test_deferred_values_depend_on_the_seed_alone(two, four):
    values = [*two.run(deferred, "zero3"), *two.run(deferred, "ddp"), *four.run(deferred, "amsp")]
    for other in values[1:]:
        assert largest_difference(values[0], other) == 0
    torch.manual_seed(3)
    eager = Wide().state_dict()
    for name, value in eager.items():
        assert abs(value.std() - values[0][name].std()) < 0.2 * value.std() + 1e-3, name
        assert abs(value.mean() - values[0][name].mean()) < 0.2 * value.std() + 1e-3, name


def peak_while_sharding() -> tuple[int, int, int]:
    """Bytes beyond the start: at the peak of sharding; of this rank's parts; of one unit."""
    with sw.deferred_init():
        model = Wide()
    sw.shard(model, None, PLANS["zero3"], levels=LEVELS[2], timeout_s=LIMIT_S)  # imports, threads
    begin = peak_rss_bytes()
    with sw.deferred_init():
        model = Wide(dim=1024, layers=12)
    built = peak_rss_bytes()
    assert built - begin < 4 << 20
    sw.shard(model, None, PLANS["zero3"], levels=LEVELS[2], timeout_s=LIMIT_S)
    grown = peak_rss_bytes() - built
    total = sum(p.nbytes for p in model.parameters())
    unit = sum(p.nbytes for p in model.blocks[0].parameters())
    sw.unshard(model)
    return grown, total // dist.get_world_size(), unit


def test_a_deferred_model_is_never_held_in_full(two):
    two.stop()  # fresh processes, whose peak is this test's
    for grown, parts, unit in two.run(peak_while_sharding):
        assert parts > 4 * unit
        assert grown < parts + 1.5 * unit, (grown, parts, unit)


def full_params_gives_its_memory_back() -> tuple[int, int]:
    model = make(TinyGPT, layers=6)
    sw.shard(model, plan=replace(sw.presets.zero3(), min_unit_numel=1000))
    pool = runtime_of(model).pools.params
    with sw.full_params(model):
        inside = pool.held_bytes
    outside = pool.held_bytes
    sw.unshard(model)
    return inside, outside


def test_full_params_gives_its_memory_back(two):
    for inside, outside in two.run(full_params_gives_its_memory_back):
        assert inside > 6 * 7000 * 8  # all blocks at once
        assert outside == 0


def check_links() -> None:
    model = build(lambda: nn.Linear(8, 8))
    with peer_links():
        sw.shard(model, plan=sw.presets.zero3(), levels="world=2")
    assert sw.stats(model)["links"] == {"world": "messages"}
    sw.unshard(model)
    sw.shard(model, plan=sw.presets.zero3(), levels="world=2")
    assert sw.stats(model)["links"] == {"world": "shared memory"}
    sw.unshard(model)


def test_stats_say_how_ranks_meet(two):
    two.run(check_links)


def check_refused_reading() -> list[str]:
    from shardwise.comm import local

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    copy, local._copy_from = local._copy_from, lambda *_: -1
    model = build(lambda: nn.Linear(8, 8))
    sw.shard(model, plan=sw.presets.zero3(), levels="world=2")
    local._copy_from = copy
    logging.getLogger("shardwise").removeHandler(handler)
    assert sw.stats(model)["links"] == {"world": "messages"}
    sw.unshard(model)
    return heard


def test_hops_that_cannot_use_shared_memory_say_so(two):
    first, second = two.run(check_refused_reading)
    assert len(first) == 1
    assert "Ranks 0, 1 share a host but may not read each other's memory" in first[0]
    assert second == []
