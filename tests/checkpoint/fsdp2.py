"""Runs of FSDP2 that are saved as accelerate and torchtitan save them, for the tests of imports."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests.models import TinyGPT, batch, lm_loss, make, mine


class Tied(TinyGPT):
    """Tied embeddings, a parameter of one element (FSDP2 knows no scalars), and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.arange(5.0))


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups."""
    small = [p for p in model.parameters() if p.dim() < 2]
    large = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": large, "weight_decay": 0.3}, {"params": small, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> list[float]:
    losses = []
    for number in numbers:
        loss = lm_loss(model, *mine(*batch(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, layout: str) -> None:
    weights = get_model_state_dict(model)
    if layout == "accelerate":
        states: Any = get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": weights}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": states}, checkpoint_id=f"{folder}/optimizer_0")
        if dist.get_rank() == 0:
            torch.save({"last_epoch": 2}, Path(folder) / "scheduler.bin")
        return
    if layout == "app":  # as torch's own tutorial does
        states = get_optimizer_state_dict(model, optimizer)
        dcp.save({"app": {"model": weights, "optim": states}}, checkpoint_id=folder)
        return
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    step = {"step": 2, "seen": torch.arange(2)}
    dcp.save({**weights, "optimizer": states, "train_state": step}, checkpoint_id=folder)


LAYOUTS = ("accelerate", "titan", "app")


def run(root: str) -> dict[str, Any]:
    """Two steps, saved in each layout; the full tensors then, and the losses of two more steps."""
    model = make(Tied, torch.float64, 0)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = grouped(model)
    steps(model, optimizer, 0, 1)
    for layout in LAYOUTS:
        save(f"{root}/{layout}", model, optimizer, layout)
    tensors = {name: _full(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"state.{name}.{key}"] = _full(value)
    return {"tensors": tensors, "losses": steps(model, optimizer, 2, 3)}


def _full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
