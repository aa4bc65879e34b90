"""Short trainings on all devices of the machine, one rank each; called by ``launch``."""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.bench.gpu.collectives import largest
from shardwise.device import streams
from shardwise.device.choice import local_device, make_current
from shardwise.plans.file import load_plan
from shardwise.plans.plan import Plan

FSDP2 = "torch FSDP2"
_LEARNING_RATE = 1e-3
_BATCH, _STEPS, _WARM_STEPS = 2, 4, 2
_TIMEOUT_S = 120.0
_TOLERANCE, _LOSSY_TOLERANCE = 1e-4, 2e-2
"""Largest relative differences of losses that pass. A device's kernels sum in an order that depends
on the size of the batch, so that even lossless plans are not equal to the last bit in float32."""

Rows = list[dict[str, Any]]
Built = tuple[nn.Module, Optimizer, int | None, Callable[[], None]]
"""Model, optimizer, predicted peak, and what ends it."""


def train(model: str, seq: int, contenders: list[str], levels: str | None) -> Rows:
    """Train a model under each contender, from the same weights on the same data.

    Each row has the losses (means over ranks), their largest relative difference to those of one
    plain process on the same global batches, the largest peak of all ranks, and the median step.
    """
    device = make_current(local_device())
    reference = _reference(model, seq, device)
    rows = []
    for name in contenders:
        with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
            plan = None if name == FSDP2 else _plan(name, folder)
            found = _train(plan, model, seq, device, levels)
        losses = found.pop("losses")
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
        lossy = plan is not None and plan.is_lossy()
        row: dict[str, Any] = {"contender": name, "losses": losses, "difference": difference}
        row |= {"right": difference <= (_LOSSY_TOLERANCE if lossy else _TOLERANCE)}
        rows.append(row | found)
    return rows


def _plan(name: str, folder: str) -> Plan:
    return sw.presets.infinity(folder) if name == "infinity" else load_plan(name)


def _reference(model: str, seq: int, device: torch.device) -> list[float]:
    """The losses of one plain process on the device, with the batches of all ranks."""
    told: list[list[float]] = [[]]
    if dist.get_rank() == 0:
        module = _model(model).to(device)
        optimizer = _adamw(module)
        told = [
            [_step(module, optimizer, _global_batch(seq, step, device)) for step in range(_STEPS)]
        ]
    dist.broadcast_object_list(told)
    return told[0]


def _train(
    plan: Plan | None, model: str, seq: int, device: torch.device, levels: str | None
) -> dict[str, Any]:
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(device)
    if plan is None:
        module, optimizer, predicted, close = _fsdp2(model, device)
    else:
        module, optimizer, predicted, close = _sharded(plan, model, seq, device, levels)
    torch.accelerator.reset_peak_memory_stats(device)
    rank, losses, times = dist.get_rank(), [], []
    for step in range(_STEPS):
        own = _global_batch(seq, step, device).chunk(dist.get_world_size())[rank]
        dist.barrier()
        begin = time.perf_counter()
        losses.append(_step(module, optimizer, own))
        streams.synchronize(device)
        times.append(time.perf_counter() - begin)
    peak = torch.accelerator.max_memory_allocated(device) - before
    close()
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return {
        "losses": (mean / dist.get_world_size()).tolist(),
        "peak_bytes": round(largest(peak)),
        "predicted_bytes": predicted,
        "step_s": largest(statistics.median(times[_WARM_STEPS:])),
    }


def _sharded(plan: Plan, model: str, seq: int, device: torch.device, levels: str | None) -> Built:
    from shardwise.api import runtime_of
    from shardwise.model.named import facts_of
    from shardwise.plans.memory import memory

    module = _model(model).to(device)
    optimizer = _adamw(module)
    sw.shard(module, optimizer, plan=plan, levels=levels, timeout_s=_TIMEOUT_S)
    grid = runtime_of(module).grid
    facts, topology = facts_of(model), grid.place.topology
    needed = memory(
        plan,
        facts.spec(plan, topology),
        topology,
        saved=facts.work(_BATCH, seq, plan, topology).saved,
        accelerated=True,
    )

    def close() -> None:
        grid.block_host_until_idle()
        grid.close()

    return module, optimizer, needed.total, close


def _fsdp2(model: str, device: torch.device) -> Built:
    from torch.distributed.fsdp import fully_shard

    module: Any = _model(model).to(device)
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    return module, _adamw(module), None, lambda: None


def _step(module: nn.Module, optimizer: Optimizer, tokens: Tensor) -> float:
    loss = module(tokens[:, :-1], labels=tokens[:, 1:]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _global_batch(seq: int, step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    size = (_BATCH * dist.get_world_size(), seq + 1)
    return torch.randint(256, size, generator=generator).to(device)


def _model(name: str) -> nn.Module:
    from shardwise.train.config import ModelConfig
    from shardwise.train.models import build_model

    torch.manual_seed(0)
    return build_model(ModelConfig(name=name))


def _adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE, fused=True)
