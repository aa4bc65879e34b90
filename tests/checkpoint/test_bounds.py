"""What saving and loading take: memory beside training, and bytes of the checkpoint."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.train.metrics import peak_rss_bytes
from tests.checkpoint.runs import plan_of
from tests.harness import Workers

WIDTH, LAYERS = 1024, 6  # 25 MB of weights, 76 MB with Adam's states
LIMIT_BYTES = 64 << 20


def sharded(plan: str, folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    sw.shard(model, optimizer, plan_of(plan, folder))
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_bytes(action: Callable[[], object]) -> int:
    """The most resident memory meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    action()
    return peak_rss_bytes()


def memory(root: str, plan: str) -> dict[str, int]:
    """What saving and loading take above training, in bytes."""
    model, optimizer = sharded(plan, root)
    path = Path(root) / plan
    trained = peak_bytes(lambda: step(model, optimizer))
    actions = {
        "save": lambda: sw.save(path, model, optimizer),
        "beside": lambda: sw.save(path, model, optimizer, asynchronous=True).wait(),
        "load": lambda: sw.load(path, model, optimizer),
    }
    found = {name: peak_bytes(action) - trained for name, action in actions.items()}
    sw.unshard(model)
    return found


def bytes_read(root: str, saved_under: str | None, plan: str) -> float:
    """What this rank read, relative to what its shards have."""
    path = Path(root) / "saved"
    if saved_under is not None:
        model, optimizer = sharded(saved_under, root)
        sw.save(path, model, optimizer)
        sw.unshard(model)
        dist.barrier()
    model, optimizer = sharded(plan, root)
    found = sw.load(path, model, optimizer, random=False)
    flats = [flat for unit in runtime_of(model).units for flat in unit.flats]
    shards = [flat.part_at.numel + 2 * flat.optim_at.numel for flat in flats]
    sw.unshard(model)
    return found.bytes_read / (4 * sum(shards))


class TestBounds:
    def test_memory(self, one: Workers, tmp_path: Path) -> None:
        for plan in ("zero3", "infinity"):
            (found,) = one.run(memory, str(tmp_path), plan)
            assert all(added < LIMIT_BYTES for added in found.values()), (plan, found)

    def test_bytes_read(self, one: Workers, two: Workers, tmp_path: Path) -> None:
        """Resharded from one rank to two, and whole on each."""
        one.run(bytes_read, str(tmp_path), "zero3", "zero3")
        for plan in ("zero3", "zero1", "infinity"):
            assert all(ratio < 1.05 for ratio in two.run(bytes_read, str(tmp_path), None, plan)), (
                plan
            )
