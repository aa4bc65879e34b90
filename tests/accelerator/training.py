"""Trains small models on an accelerator and on one plain process, and says what was seen."""

import contextlib
import gc
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.plans.plan import Plan
from tests.accelerator.accelerators import Seen, chosen
from tests.models import adamw, batch, largest_difference, lm_loss, make, mine

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    plan: Plan
    levels: str
    kind: type[nn.Module]
    dtype: torch.dtype = torch.float64
    micro_batches: int = 1
    clip: float | None = None
    deferred: bool = False
    delay: str = "none"
    sizes: dict[str, int] = field(default_factory=dict)
    """What the model is made with."""

    def __str__(self) -> str:
        return self.name


@dataclass
class Outcome:
    """What training on the accelerator gave on this rank, and how far it is from one process."""

    loss_difference: float
    parameter_difference: float
    norm_difference: float
    seen: Seen
    """Of the last step; races of all."""
    rest_bytes: int
    """Device memory between steps, above what there was before the model."""
    peak_bytes: int
    """The most device memory of a step, above the same."""
    pinned_bytes: int | None
    extra_gathers: int


def train(case: Case) -> Outcome:
    """Trains by a plan on this rank's device, and one plain process on the CPU beside it."""
    accelerator, device = chosen(), chosen().device
    reference = make(case.kind, case.dtype, **case.sizes)
    plain_losses, plain_norms = _train_plain(reference, case)
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        plan = _on_disk(case.plan, folder)
        torch.manual_seed(0)
        with sw.deferred_init() if case.deferred else contextlib.nullcontext():
            model = make(case.kind, case.dtype, **case.sizes)
        optimizer = adamw(model)
        sw.shard(model, optimizer, plan=plan, levels=case.levels)
        if case.deferred:
            _copy_values(model, make(case.kind, case.dtype, **case.sizes))
        assert {p.device for p in model.parameters()} == {device}
        accelerator.delay(case.delay)
        try:
            losses, norms = [], []
            with accelerator.watch() as first:
                for step in range(STEPS - 1):
                    _step(model, optimizer, case, step, device, losses, norms)
            with accelerator.watch() as seen:
                _step(model, optimizer, case, STEPS - 1, device, losses, norms)
            if seen.races is not None:
                seen.races += first.races or []
        finally:
            accelerator.delay("none")
        got = sw.state_dict(model, rank0_only=False)
        totals = torch.stack([loss.double().cpu() for loss in losses])
        dist.all_reduce(totals)
        totals /= dist.get_world_size()
        outcome = Outcome(
            loss_difference=float(
                (totals - torch.tensor(plain_losses, dtype=torch.float64)).abs().max()
            ),
            parameter_difference=largest_difference(got, reference.state_dict()),
            norm_difference=max(
                (abs(float(a) - b) for a, b in zip(norms, plain_norms, strict=True)), default=0.0
            ),
            seen=seen,
            rest_bytes=seen.end_bytes - before,
            peak_bytes=seen.peak_bytes - before,
            pinned_bytes=seen.pinned_peak_bytes,
            extra_gathers=sw.stats(model)["extra_gathers"],
        )
        sw.unshard(model)
    return outcome


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    step: int,
    device: torch.device,
    losses: list[torch.Tensor],
    norms: list[torch.Tensor],
) -> None:
    total = None
    for index in range(case.micro_batches):
        tokens = mine(*batch(step * case.micro_batches + index))
        tokens = tuple(t.pin_memory().to(device, non_blocking=True) for t in tokens)
        last = index == case.micro_batches - 1
        with contextlib.nullcontext() if last else sw.no_sync(model):
            loss = lm_loss(model, *tokens)
            loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    if case.clip is not None:
        norms.append(sw.clip_grad_norm_(model, case.clip))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total)


def _train_plain(model: nn.Module, case: Case) -> tuple[list[float], list[float]]:
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for index in range(case.micro_batches):
            loss = lm_loss(model, *batch(step * case.micro_batches + index))
            loss.backward()
            total += loss.item()
        if case.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def _on_disk(plan: Plan, folder: str) -> Plan:
    plan = replace(plan, min_unit_numel=1000)
    if plan.rests_on("nvme"):
        plan = replace(plan, tiers=replace(plan.tiers, path=folder))
    return plan


def _copy_values(model: nn.Module, like: nn.Module) -> None:
    """A deferred model draws other numbers than one that is made at once."""
    with sw.full_params(model, write=True), torch.no_grad():
        values: dict[str, Any] = dict(like.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
