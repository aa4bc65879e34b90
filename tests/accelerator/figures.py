"""What training takes on a device: FSDP2's figures, and the same ones of anything else.

Both are measured on ranks of the same pool, in one function or two:

    theirs = fsdp2_figures(TinyGPT)
    ours = figures_of(lambda device: sw.shard(*built(TinyGPT, device), plan="zero3"))
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tests.accelerator.accelerators import Seen, chosen
from tests.models import batch, lm_loss, make, mine

WARM_STEPS = 2
"""The first creates the optimizer's states; what is recorded or cached is there after the second."""

Trained = tuple[nn.Module, Optimizer]


@dataclass(frozen=True)
class Figures:
    """What training takes on this rank; memory without what was there before."""

    losses: list[float]
    """Of all steps, mean over ranks."""
    at_rest_bytes: int
    """Device memory between steps, without gradients."""
    peak_bytes: int
    """The most device memory at once in a step."""
    launches: float
    """Kernels, copies and collectives a step."""
    launches_by_name: dict[str, float]
    host_waits: dict[str, float] | None
    """How often the host waited a step, by kind; only the simulated device counts it."""
    races: list[str] | None


def built(
    kind: type[nn.Module], device: torch.device, dtype: torch.dtype = torch.float32
) -> Trained:
    """A model, with equal values on all ranks, and torch's fused AdamW."""
    model = make(kind, dtype).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def fsdp2_figures(
    kind: type[nn.Module], dtype: torch.dtype = torch.float32, *, steps: int = 3, **options: Any
) -> Figures:
    """FSDP2 over all ranks; each of the model's ``blocks`` is gathered on its own. ``options`` are
    those of ``fully_shard``."""
    from torch.distributed.fsdp import fully_shard

    def shard(device: torch.device) -> Trained:
        model, _ = built(kind, device, dtype)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        return model, optimizer

    return figures_of(shard, steps=steps)


def figures_of(build: Callable[[torch.device], Trained], *, steps: int = 3) -> Figures:
    """Builds a model and its optimizer and trains, language models on ``tests.models.batch``."""
    accelerator = chosen()
    device = accelerator.device
    # There before the rest, so that neither their memory nor their copies count.
    batches = [
        tuple(t.to(device) for t in mine(*batch(step))) for step in range(WARM_STEPS + steps)
    ]
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    model, optimizer = build(device)
    losses = []

    def train(part: list[tuple[torch.Tensor, ...]]) -> None:
        for rows in part:
            loss = lm_loss(model, *rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

    with accelerator.watch() as warm:
        train(batches[:WARM_STEPS])
    with accelerator.watch() as seen:
        train(batches[WARM_STEPS:])
    return Figures(
        losses=_mean_over_ranks(losses),
        at_rest_bytes=seen.end_bytes - before,
        peak_bytes=seen.peak_bytes - before,
        launches=seen.launch_count / steps,
        launches_by_name={name: count / steps for name, count in seen.launches.items()},
        host_waits=_per_step(seen, steps),
        races=None if seen.races is None else [*(warm.races or []), *seen.races],
    )


def _per_step(seen: Seen, steps: int) -> dict[str, float] | None:
    if seen.host_waits is None:
        return None
    return {kind: count / steps for kind, count in seen.host_waits.items()}


def _mean_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    total = torch.stack(losses).double().cpu()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()
