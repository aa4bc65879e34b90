"""What a plan takes on a device beside what the memory model says: at rest, at peak, and pinned."""

import contextlib
import gc
import tempfile
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.model.facts import ModuleFacts
from shardwise.model.gpt import GPT, GPTConfig
from shardwise.plans.memory import Memory, memory
from shardwise.plans.plan import Plan
from tests.accelerator.accelerators import chosen

SHAPE = GPTConfig(num_layers=5, width=192, num_heads=4, vocab=512, context=256)
"""Large enough that what allocators round up to does not matter."""
WARM_STEPS, STEPS = 1, 1


@dataclass(frozen=True)
class Case:
    """One way to train, and a batch of each rank."""

    name: str
    plan: Plan
    levels: str
    micro_batches: int = 1
    batch: int = 2
    seq: int = 128

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Taken:
    """Bytes on this rank, and the model of them."""

    name: str
    predicted: Memory
    rest_bytes: int
    """Device memory between steps, above what there was before the model."""
    peak_bytes: int
    pinned_rest_bytes: int | None
    pinned_peak_bytes: int | None
    races: list[str] | None


def taken_by(cases: list[Case]) -> list[Taken]:
    """Trains by each plan for a few steps."""
    return [_taken_by(case) for case in cases]


def _taken_by(case: Case) -> Taken:
    accelerator, device = chosen(), chosen().device
    facts = ModuleFacts(lambda: GPT(SHAPE), _forward)
    batches = [
        torch.randint(SHAPE.vocab, (case.batch, case.seq), device=device)
        for _ in range(case.micro_batches)
    ]
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        plan = case.plan
        if plan.rests_on("nvme"):
            plan = replace(plan, tiers=replace(plan.tiers, path=folder))
        torch.manual_seed(0)
        model: nn.Module = GPT(SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with accelerator.watch() as made:
            sw.shard(model, optimizer, plan=plan, levels=case.levels)
        pinned = made.pinned_start_bytes
        with accelerator.watch() as warm:
            for _ in range(WARM_STEPS):
                _step(model, optimizer, batches)
        with accelerator.watch() as seen:
            for _ in range(STEPS):
                _step(model, optimizer, batches)
        topology = runtime_of(model).grid.place.topology
        predicted = memory(
            plan,
            facts.spec(plan, topology),
            topology,
            accumulates=case.micro_batches > 1,
            saved=facts.work(case.batch, case.seq, plan, topology).saved,
            accelerated=True,
        )
        sw.unshard(model)
    return Taken(
        case.name,
        predicted,
        rest_bytes=seen.end_bytes - before,
        peak_bytes=max(seen.peak_bytes, warm.peak_bytes) - before,
        pinned_rest_bytes=None if pinned is None else seen.pinned_end_bytes - pinned,
        pinned_peak_bytes=None
        if pinned is None
        else max(seen.pinned_peak_bytes, warm.pinned_peak_bytes) - pinned,
        races=None if seen.races is None else [*(warm.races or []), *seen.races],
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for index, tokens in enumerate(batches):
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last else sw.no_sync(model):
            _loss(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _forward(model: nn.Module, batch: int, seq: int) -> torch.Tensor:
    """For the memory model, which runs it on fake tensors."""
    return _loss(model, torch.zeros(batch, seq, dtype=torch.int64))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the one that all devices have
        return model(tokens, labels=tokens).loss
