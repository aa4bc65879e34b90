"""What a plan takes on a device beside what the memory model says: at rest, at peak, and pinned."""

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.model.facts import ModuleFacts
from shardwise.model.gpt import GPT, GPTConfig
from shardwise.plans import staged
from shardwise.plans.memory import Memory, memory
from shardwise.plans.plan import Plan, resolve
from shardwise.plans.sized import Sized
from shardwise.plans.updates import OPTIM_WORDS
from shardwise.tier import rest
from tests.accelerator.accelerators import chosen

SMALL = GPTConfig(num_layers=4, width=192, num_heads=4, vocab=512, context=256)
"""Large enough that what allocators round up to does not matter."""
LARGE = GPTConfig(num_layers=8, width=1024, num_heads=8, vocab=8192, context=256)
"""For real devices, whose libraries take some memory as well."""
STEPS = 2
"""The first makes the optimizer's states, and the second has a recorded order."""
WRITES_IN_FLIGHT_BYTES = 1 << 20
"""Instead of 64 MiB, which so small models never reach: how far they get depends on the disk."""


def shape() -> GPTConfig:
    return SMALL if chosen().type == "sim" else LARGE


@dataclass(frozen=True)
class Case:
    """One way to train, and a batch of each rank."""

    name: str
    plan: Plan
    levels: str
    micro_batches: int = 1
    batch: int = 2
    seq: int = 128
    vocab: int | None = None

    @property
    def shape(self) -> GPTConfig:
        return replace(shape(), vocab=self.vocab) if self.vocab else shape()


@dataclass(frozen=True)
class Taken:
    """Bytes on this rank, and the model of them."""

    name: str
    predicted: Memory
    at_rest_bytes: int
    """Device memory between steps, above what there was before the model, without buffers."""
    buffers_bytes: int
    """Of codecs, and of shards that come from a tier: they stay between steps."""
    peak_bytes: int
    """The most device memory, from the beginning of ``shard`` on."""
    pinned_peak_bytes: int | None
    unpinned_bytes: int
    """What else the model counts in host memory."""
    races: list[str] | None


def taken_by(cases: list[Case]) -> list[Taken]:
    """Trains by each plan for a few steps."""
    return [_taken_by(case) for case in cases]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The kernel of attention that all devices have: others save less."""
    with sdpa_kernel(SDPBackend.MATH):
        return model(tokens, labels=tokens).loss


def _taken_by(case: Case) -> Taken:
    accelerator = chosen()
    tokens = torch.randint(case.shape.vocab, (case.batch, case.seq), device=accelerator.device)
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    model = GPT(case.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with _with_path(case.plan) as plan, _few_writes_in_flight():
        with accelerator.watch() as seen:
            sw.shard(model, optimizer, plan=plan, levels=case.levels)
            for _ in range(STEPS):
                for index in range(case.micro_batches):
                    last = index == case.micro_batches - 1
                    with contextlib.nullcontext() if last else sw.no_sync(model):
                        loss_of(model, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
        runtime = runtime_of(model)
        topology = runtime.grid.place.topology
        facts = ModuleFacts(lambda: GPT(case.shape), _forward)
        predicted = memory(
            plan,
            facts.spec(plan, topology),
            topology,
            accumulates=case.micro_batches > 1,
            saved=facts.work(case.batch, case.seq, plan, topology).saved,
            accelerated=True,
        )
        sized = [
            Sized(unit, plan, resolve(plan, topology, unit.name))
            for unit in facts.spec(plan, topology).units
        ]
        unpinned = staged.unpinned_bytes(sized, plan, OPTIM_WORDS)
        buffers = runtime.carriers.held_bytes + runtime.pools.staging.on_device.held_bytes
        sw.unshard(model)
    pinned = None
    if seen.pinned_peak_bytes is not None:
        pinned = seen.pinned_peak_bytes - seen.pinned_start_bytes
    return Taken(
        case.name,
        predicted,
        at_rest_bytes=seen.end_bytes - before - buffers,
        buffers_bytes=buffers,
        peak_bytes=seen.peak_bytes - before,
        pinned_peak_bytes=pinned,
        unpinned_bytes=unpinned,
        races=seen.races,
    )


def _forward(model: nn.Module, batch: int, seq: int) -> torch.Tensor:
    """For the memory model, which runs it on fake tensors."""
    return loss_of(model, torch.zeros(batch, seq, dtype=torch.int64))


@contextlib.contextmanager
def _with_path(plan: Plan) -> Iterator[Plan]:
    with tempfile.TemporaryDirectory() as folder:
        moves = plan.rests_on("nvme") or plan.activations == "nvme"
        yield replace(plan, tiers=replace(plan.tiers, path=folder)) if moves else plan


@contextlib.contextmanager
def _few_writes_in_flight() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (rest, staged):
            stack.enter_context(
                patch.object(module, "WRITES_IN_FLIGHT_BYTES", WRITES_IN_FLIGHT_BYTES)
            )
        yield
