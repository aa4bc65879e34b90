"""The contenders of a benchmark: our plans and the peers, each as one step on one batch.

All train the same model from the same weights on the same data with torch's fused AdamW. Names
that start with `torch-` and `deepspeed` are peers; every other name is a preset or a plan's file.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.bench.messages import Setting
from shardwise.core.errors import UsageError
from shardwise.core.topology import Topology
from shardwise.plans.file import load_plan
from shardwise.plans.plan import Plan

LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Contender:
    """A model with a strategy that trains it."""

    name: str
    step: Callable[[Tensor], float]
    """One optimizer step on a batch; returns this rank's loss."""
    drain: Callable[[], None]
    """Returns when no communication is in flight."""
    close: Callable[[], None] = lambda: None
    """Ends its communication for good; collective."""


def build(name: str, setting: Setting) -> Contender:
    """The contender with this name; collective."""
    return _BUILDERS.get(name, _build_plan)(name, setting)


def is_peer(name: str) -> bool:
    return name in _BUILDERS


def plan_of(name: str, setting: Setting) -> Plan:
    """The named plan, in the benchmark's dtype unless the plan sets its own."""
    plan = load_plan(name)
    if not setting.is_mixed or plan.precision.compute:
        return plan
    mixed = replace(plan.precision, compute=setting.dtype, reduce=setting.dtype, master="float32")
    return replace(plan, precision=mixed)


def batch(setting: Setting, index: int) -> Tensor:
    """This rank's batch with this index: inputs and, shifted by one, labels."""
    generator = torch.Generator().manual_seed(index * 1000 + dist.get_rank())
    return torch.randint(256, (1, setting.seq + 1), generator=generator)


# --- builders -----------------------------------------------------------------------------------


def _build_plan(name: str, setting: Setting) -> Contender:
    import shardwise as sw
    from shardwise.api import runtime_of

    with sw.deferred_init() if setting.deferred else contextlib.nullcontext():
        model = _model(setting)
    optimizer = _adamw(model)
    sw.shard(model, optimizer, plan=plan_of(name, setting), levels=setting.levels, device="cpu")
    grid = runtime_of(model).grid
    return Contender(name, _plain_step(model, optimizer), grid.block_host_until_idle, grid.close)


def _build_ddp(name: str, setting: Setting) -> Contender:
    """DDP with everything in the benchmark's dtype, including weights and optimizer."""
    from torch.nn.parallel import DistributedDataParallel

    model = _model(setting).to(_dtype(setting))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contender(name, _plain_step(wrapped, _adamw(wrapped)), _nothing)


def _build_ddp_hook(name: str, setting: Setting) -> Contender:
    """DDP with float32 weights, autocast in forward and backward, and compressed gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    def compress(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        # DDP refuses its own bf16 hook without NCCL, although gloo can sum bfloat16.
        return bf16_compress_hook(state, bucket)

    wrapped = DistributedDataParallel(_model(setting), gradient_as_bucket_view=True)
    if setting.is_mixed:
        wrapped.register_comm_hook(None, compress)
    cast = torch.autocast("cpu", _dtype(setting), enabled=setting.is_mixed)
    return Contender(name, _plain_step(wrapped, _adamw(wrapped), cast), _nothing)


def _build_fsdp2(name: str, setting: Setting) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = _model(setting)
    if not hasattr(model, "blocks"):
        raise UsageError(f"{name} only takes the built-in models gpt-tiny ... gpt-xl")
    topology = Topology.parse(setting.levels)
    world, inner = topology.world, topology.levels[0].size
    if name == "torch-hsdp":
        shape, axes = (world // inner, inner), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    else:
        mesh = init_device_mesh("cpu", (world,))
    dtype = _dtype(setting) if setting.is_mixed else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Contender(name, _plain_step(model, _adamw(model)), _nothing)


def _build_deepspeed(name: str, setting: Setting) -> Contender:
    """DeepSpeed's ZeRO-3 with its own engine; no contender clips gradients."""
    import deepspeed

    model = _model(setting)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": setting.is_mixed},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)

    def step(tokens: Tensor) -> float:
        loss = engine(tokens[:, :-1], labels=tokens[:, 1:]).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return Contender(name, step, _nothing)


_BUILDERS: dict[str, Callable[[str, Setting], Contender]] = {
    "torch-ddp": _build_ddp,
    "torch-ddp-hook": _build_ddp_hook,
    "torch-fsdp2": _build_fsdp2,
    "torch-hsdp": _build_fsdp2,
    "deepspeed": _build_deepspeed,
}


def _dtype(setting: Setting) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, setting.dtype)
    return dtype


def _model(setting: Setting) -> nn.Module:
    from shardwise.train.config import ModelConfig
    from shardwise.train.models import build_model

    torch.manual_seed(0)
    return build_model(ModelConfig(name=setting.model))


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _plain_step(
    model: nn.Module,
    optimizer: Optimizer,
    cast: contextlib.AbstractContextManager[Any] | None = None,
) -> Callable[[Tensor], float]:
    def step(tokens: Tensor) -> float:
        with cast or contextlib.nullcontext():
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _nothing() -> None:
    """Drain for peers, which wait for their communication inside a step."""
