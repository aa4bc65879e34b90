"""Parameters that rest as shards: true metadata, no values, clear refusals; never garbage."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.plans.plan import Precision
from tests.models import TinyGPT, adamw, batch, largest_difference, lm_loss, mine
from tests.runtime.support import (
    LEVELS,
    LIMIT_S,
    ONE_LEVEL,
    PLANS,
    TWO_LEVELS,
    assert_at_rest,
    build,
    small,
)

P = nn.Parameter
READS: dict[str, Callable[[P], Any]] = {
    "sum": lambda p: p.sum(),
    "torch.sum": torch.sum,
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(-1),
    "transpose": lambda p: p.T,
    "contiguous": lambda p: p.contiguous(),
    "index": lambda p: p[0],
    "mask": lambda p: p[p > 0],
    "slice": lambda p: p[:1],
    "iterate": list,
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "matmul": lambda p: p @ p.new_ones(24),
    "negate": lambda p: -p,
    "compare": lambda p: p == 0,
    "contains": lambda p: 1.0 in p,
    "bool": lambda p: bool((p == p).all()),
    "item": lambda p: p.item(),
    "float": float,
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(force=True),
    "np.asarray": np.asarray,
    "np.array": np.array,
    "from_dlpack": torch.from_dlpack,
    "np.from_dlpack": np.from_dlpack,
    "__dlpack__": lambda p: p.__dlpack__(),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "isnan": torch.isnan,
    "allclose": lambda p: torch.allclose(p, p),
    "equal": lambda p: torch.equal(p, torch.zeros(p.shape, dtype=p.dtype)),
    "stack": lambda p: torch.stack([p, p]),
    "cat": lambda p: torch.cat([p, p]),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "foreach_norm": lambda p: torch._foreach_norm([p, p]),
    "foreach_mul_": lambda p: torch._foreach_mul_([p], 2.0),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "linear": lambda p: F.linear(torch.ones(1, 24, dtype=p.dtype), p),
    "einsum": lambda p: torch.einsum("ij->i", p),
    "copy into": lambda p: torch.zeros(p.shape, dtype=p.dtype).copy_(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "add_": lambda p: p.data.add_(1),
    "mul_": lambda p: p.mul_(2),
    "zero_": lambda p: p.zero_(),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "normal_": lambda p: nn.init.normal_(p),
    "out=": lambda p: torch.add(torch.ones(()), 1, out=p),
    "share_memory_": lambda p: p.share_memory_(),
    "type": lambda p: p.type(torch.float16),
    "half": lambda p: p.half(),
    "to": lambda p: p.to(torch.float32),
    "functional_call": lambda p: torch.func.functional_call(
        nn.Linear(24, p.shape[0], bias=False), {"weight": p}, torch.ones(1, 24)
    ),
}
UNSEEN: dict[str, Callable[[P], Any]] = {
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float32),
    "torch.tensor": lambda p: torch.tensor(p),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p),
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
}
"""Functions of torch that no subclass of Tensor hears about."""


def sharded(plan: str = "zero3", **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(TinyGPT)
    optimizer = adamw(model)
    world = dist.get_world_size()
    sw.shard(
        model, optimizer, small(PLANS[plan], **changes), levels=LEVELS[world], timeout_s=LIMIT_S
    )
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = lm_loss(model, *mine(*batch(step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def refused(call: Callable[[], Any], *words: str) -> None:
    """The call raises a UsageError that contains all words."""
    with pytest.raises(sw.UsageError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


# --- reads ----------------------------------------------------------------------------------------


def reads_raise() -> list[str]:
    """The reads that did not raise a UsageError, for each parameter and after each other."""
    model, optimizer = sharded()
    before = sw.state_dict(model, rank0_only=False)
    wrong = []
    for parameter in (model.blocks[1].qkv.weight, model.embed.weight):
        for name, read in READS.items():
            try:
                wrong.append(f"{name}: {type(read(parameter)).__name__}")
            except sw.UsageError as error:
                if not ("sharded" in str(error) or "shardwise.full_params" in str(error)):
                    wrong.append(f"{name}: {error}")
            except Exception as error:
                wrong.append(f"{name}: {error!r}")
        for name, read in UNSEEN.items():
            if not read(parameter).isnan().all():
                wrong.append(name)
    assert_at_rest(model)
    assert largest_difference(sw.state_dict(model, rank0_only=False), before) == 0
    train(model, optimizer, 0)
    sw.unshard(model)
    return wrong


def test_reading_values_outside_of_passes_raises(two):
    assert two.run(reads_raise) == [[], []]


def metadata_is_true() -> None:
    plain, (model, _) = build(TinyGPT), sharded()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(q, nn.Parameter)
        assert (q.shape, q.dtype, q.device) == (p.shape, p.dtype, p.device)
        assert (q.numel(), q.dim(), q.stride()) == (p.numel(), p.dim(), p.stride())
        assert q.requires_grad
        assert q.is_leaf
        assert q.grad is None
        assert q.nbytes == p.nbytes
        assert torch.is_floating_point(q)
        assert repr(name) in repr(q) or name == "head.weight"
        assert "not gathered" in f"{q} {q!r} {q:>10}"
        assert q in set(model.parameters())
        assert torch.empty_like(q).shape == torch.zeros_like(q).shape == p.shape
        assert q.new_zeros(2).dtype == p.dtype
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert repr(model) == repr(plain)
    sw.unshard(model)


def test_metadata_is_true(two):
    two.run(metadata_is_true)


def stale_aliases() -> None:
    """Views and .data taken while gathered read NaN afterwards, also while other units compute."""
    model, optimizer = sharded()
    with sw.full_params(model):
        aliases = [
            alias.detach()
            for p in (model.embed.weight, model.blocks[0].up.weight, model.blocks[2].out.bias)
            for alias in (p.data, p, p.view(-1), p[:1])
        ]
        assert not any(alias.isnan().any() for alias in aliases)
    assert all(alias.isnan().all() for alias in aliases)
    seen = []

    def look(*_: Any) -> None:
        seen.extend(alias.isnan().all().item() for alias in aliases[4:])

    hook = model.blocks[1].up.register_forward_hook(look)
    train(model, optimizer, 0)
    hook.remove()
    assert sum(seen) >= 4  # at least one of block 0 and block 2 rests while block 1 computes
    before = sw.state_dict(model, rank0_only=False)
    for alias in aliases:
        alias.fill_(3.0)  # a write through a stale alias reaches nothing
    after = sw.state_dict(model, rank0_only=False)
    assert largest_difference(before, after) == 0
    train(model, optimizer, 1)
    sw.unshard(model)


def test_stale_aliases_read_nan(two):
    two.run(stale_aliases)


def read_while_refreshing(name: str) -> None:
    """Right after a step the new values are on their way: reading waits for them."""
    reference = build(TinyGPT)
    adam = adamw(reference)
    model, optimizer = sharded(name)
    for step in range(3):
        lm_loss(reference, *batch(step)).backward()
        adam.step()
        adam.zero_grad()
        train(model, optimizer, step)
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            assert (p - q).abs().max() < 1e-9
            q.grad = None
    sw.unshard(model)


@pytest.mark.parametrize("plan", ["zero1", "ddp"])
def test_reading_while_a_refresh_is_pending_waits(plan, two):
    two.run(read_while_refreshing, plan)


# --- the model's own methods ----------------------------------------------------------------------


def model_methods(name: str) -> None:
    model, optimizer = sharded(name)
    before = sw.state_dict(model, rank0_only=False)
    for same in (
        lambda: model.to("cpu"),
        lambda: model.double(),
        lambda: model.to(torch.float64),
        lambda: model.cpu(),
        lambda: model.requires_grad_(True),
    ):
        assert same() is model
    for cast in (
        lambda: model.half(),
        lambda: model.float(),
        lambda: model.to(torch.bfloat16),
        lambda: model.blocks[0].to(torch.float32),
        lambda: model.to("meta"),
        lambda: model.to_empty(device="cpu"),
    ):
        refused(cast, "before shardwise.shard")
    refused(lambda: copy.deepcopy(model), "shardwise.state_dict")
    refused(lambda: copy.deepcopy(model.blocks[0]), "shardwise.state_dict")
    refused(lambda: pickle.dumps(model), "shardwise.state_dict")
    refused(lambda: torch.save(model, io.BytesIO()), "shardwise.state_dict")
    refused(lambda: _frozen(model), "requires_grad", "shardwise.unshard")
    for parameter in model.parameters():
        parameter.requires_grad = True
    if runtime_of(model).root.travels:
        refused(lambda: model.state_dict(), "shardwise.state_dict")
    else:
        assert largest_difference(model.state_dict(), before) == 0
    assert largest_difference(sw.state_dict(model, rank0_only=False), before) == 0
    train(model, optimizer, 0)
    sw.unshard(model)
    copy.deepcopy(model)


def _frozen(model: nn.Module) -> None:
    """Refused at once, or at the latest when the model is used."""
    model.blocks[0].up.weight.requires_grad_(False)
    model(batch(0)[0])


@pytest.mark.parametrize("plan", ONE_LEVEL)
def test_methods_of_the_model_work_or_refuse(plan, two):
    two.run(model_methods, plan)


def parameters_that_left() -> None:
    """A parameter that is replaced, or given other memory, is noticed at the next forward."""
    for name in ("zero3", "ddp"):
        model, _ = sharded(name)
        keep = model.norm.weight
        model.norm.weight = nn.Parameter(torch.ones(24, dtype=torch.float64))
        refused(lambda: model(batch(0)[0]), "norm.weight", "replaced")  # noqa: B023
        model.norm.weight = keep
        refused(lambda: model.load_state_dict(build(TinyGPT).state_dict(), assign=True), "assign")  # noqa: B023
        new = torch.full((24,), 2.0, dtype=torch.float64)
        model.norm.weight.data = new
        model(batch(0)[0])
        assert torch.equal(sw.state_dict(model, rank0_only=False)["norm.weight"], new)
        sw.unshard(model)


def test_parameters_that_left_their_unit_are_noticed(two):
    two.run(parameters_that_left)


# --- loading --------------------------------------------------------------------------------------


def load_full(name: str, compute: str | None) -> float:
    """load_state_dict after some steps; then training goes on like the plain process."""
    source = build(TinyGPT, seed=5)
    precision = Precision(compute=compute) if compute else Precision()
    model, optimizer = sharded(name, precision=precision)
    train(model, optimizer, 0)
    optimizer.state.clear()
    model.load_state_dict(source.state_dict())
    loaded = sw.state_dict(model, rank0_only=False, master=True)
    assert largest_difference(loaded, source.state_dict()) == 0
    if compute:
        train(model, optimizer, 1)
        masters = sw.state_dict(model, rank0_only=False, master=True)
        values = sw.state_dict(model, rank0_only=False)
        moved = max(float((masters[n] - loaded[n]).abs().max()) for n in masters)
        assert all(torch.equal(masters[n].to(torch.bfloat16), values[n]) for n in values)
        sw.unshard(model)
        return moved
    adam = adamw(source)
    for step in range(1, 3):
        lm_loss(source, *batch(step)).backward()
        adam.step()
        adam.zero_grad()
        train(model, optimizer, step)
    model.blocks[1].load_state_dict(source.blocks[1].state_dict())
    difference = largest_difference(sw.state_dict(model, rank0_only=False), source.state_dict())
    sw.unshard(model)
    return difference


def load_under(names: tuple[str, ...]) -> list[float]:
    # One step of AdamW with lr 0.01 and weight decay 0.1 moves no master by more.
    assert all(0 < load_full(name, "bfloat16") < 0.02 for name in names)
    return [load_full(name, None) for name in names]


def test_load_state_dict_then_training_goes_on(two):
    assert max(map(max, two.run(load_under, ONE_LEVEL))) <= 1e-9


def test_load_state_dict_on_two_levels(four):
    assert max(map(max, four.run(load_under, TWO_LEVELS))) <= 1e-9
