"""Short runs recorded number by number: sharded on many ranks, and in plain PyTorch.

Both start from the same weights and see the same global batches, so that every difference between
the two records comes from the sharding.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.device.choice import local_device, make_current
from shardwise.train.config import TrainConfig
from shardwise.train.loop import (
    accumulate_gradients,
    build,
    build_batches,
    build_optimizer,
    build_scheduler,
    mean_over_ranks,
)
from shardwise.train.models import build_model, loss_of

INITIAL_FILE = "initial.pt"


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """What a run computed."""

    losses: list[float] = field(default_factory=list)
    """One per step, over the global batch."""
    loss_dtype: str = "float64"
    """The dtype in which the model computed its loss; some models always use float32."""
    total_norms: list[float] = field(default_factory=list)
    """Norm of the whole gradient, one per step, before clipping."""
    grad_norms: list[dict[str, float]] = field(default_factory=list)
    """Norm of each parameter's gradient, one dict per step, before clipping."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""
    optimizer_states: dict[str, Tensor] = field(default_factory=dict)
    """After the last step, by "<parameter>:<state>"."""

    def save(self, path: Path) -> None:
        """Write the record."""
        torch.save(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> "Trajectory":
        """Read a record."""
        return cls(**torch.load(path, weights_only=True))


def sharded_worker(config: dict[str, Any], directory: str, name: str) -> None:
    """Record the run under the plan; rank 0 writes the initial weights and the record."""
    job = build(TrainConfig.model_validate(config), dropout=False)
    is_first = dist.get_rank() == 0
    initial = sw.state_dict(job.model)
    if is_first:
        torch.save(initial, Path(directory) / INITIAL_FILE)
    record = Trajectory()
    for step in range(1, job.config.train.steps + 1):
        record.losses.append(mean_over_ranks(accumulate_gradients(job, step)))
        record.grad_norms.append(_norms(sw.full_grads(job.model)))
        norm = sw.clip_grad_norm_(job.model, job.config.train.clip or math.inf)
        record.total_norms.append(float(norm))
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
    final = sw.state_dict(job.model)
    states = sw.optim_state_dict(job.model, job.optimizer)
    if is_first:
        record.parameters = dict(final)
        record.optimizer_states = _flatten(states)
        record.save(Path(directory) / name)


def reference_worker(config: dict[str, Any], directory: str, name: str) -> None:
    """Record the same run in one process, with plain PyTorch and nothing of shardwise."""
    job = TrainConfig.model_validate(config)
    device = make_current(local_device())
    model = build_model(job.model, dropout=False).train().to(device)
    model.load_state_dict(torch.load(Path(directory) / INITIAL_FILE, weights_only=True))
    batches, _ = build_batches(job, model, rank=0, world=1)
    optimizer = build_optimizer(model, job.optim)
    scheduler = build_scheduler(optimizer, job.optim, job.train.steps)
    record = Trajectory()
    for step in range(1, job.train.steps + 1):
        loss = 0.0
        for micro in range(batches.accumulation):
            rows = batches.get(step, micro).to(device)
            part = loss_of(model(input_ids=rows, labels=rows)) / batches.accumulation
            record.loss_dtype = str(part.dtype).removeprefix("torch.")
            part.backward()
            loss += part.item()
        record.losses.append(loss)
        record.grad_norms.append(_norms(_gradients(model)))
        norm = nn.utils.clip_grad_norm_(model.parameters(), job.train.clip or math.inf)
        record.total_norms.append(norm.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    record.parameters = {name: value.cpu() for name, value in model.state_dict().items()}
    record.optimizer_states = _flatten(
        {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    )
    record.save(Path(directory) / name)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _norms(gradients: dict[str, Tensor]) -> dict[str, float]:
    return {name: g.double().norm().item() for name, g in gradients.items()}


def _flatten(states: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    flat = {}
    for name, state in states.items():
        for key, value in state.items():
            tensor = torch.as_tensor(value).cpu()
            # A number (the step count) may have any type; only its value matters.
            flat[f"{name}:{key}"] = tensor if tensor.dim() else tensor.double()
    return flat
