"""Short training runs that are saved and resumed, for the tests of checkpoints."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.plans.plan import Plan, Precision, Tiers, Tiling
from tests.models import TinyGPT, adamw, batch, lm_loss, make, mine
from tests.runtime.support import LEVELS, LIMIT_S, small

HALF = Precision(compute="bfloat16", reduce="float32", master="float32")
PURE = Precision(compute="bfloat16", reduce="bfloat16", master="bfloat16")


def wired(plan: Plan, **wires: str) -> Plan:
    return replace(plan, **{s: replace(getattr(plan, s), wire=w) for s, w in wires.items()})


def plan_of(name: str, folder: str = "") -> Plan:
    """A plan by the name that tests use, for small models."""
    if name == "infinity":
        plan = sw.presets.infinity(folder)
        return small(replace(plan, tiers=Tiers(path=folder, window_numel=4096)))
    if name == "tiled":
        return small(replace(sw.presets.zero3(), tiling=Tiling(numel=600)))
    if name == "feedback":
        plan = wired(sw.presets.zero3(), params="int8", grads="int4/feedback,node=int8")
        return small(plan)
    if name == "tiled infinity":
        plan = plan_of("infinity", folder)
        return replace(plan, tiling=Tiling(numel=600))
    if name == "optim on disk":
        plan = sw.presets.amsp()
        tiers = Tiers(path=folder, window_numel=4096)
        return small(replace(plan, optim=replace(plan.optim, tier="nvme"), tiers=tiers))
    return small(getattr(sw.presets, name)())


class Model(TinyGPT):
    """Tied embeddings, a scalar, frozen weights, dropout, and buffers: one differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.blocks[1].up.weight.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += int(tokens.sum())  # what each rank has seen
        return self.dropout(super().forward(tokens))


class Run:
    """A model, its optimizer and its scheduler, under a plan."""

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int = 0,
        dtype=torch.float64,
        kind=Model,
        optimizer=adamw,
        **kwargs,
    ) -> None:
        self.model = make(kind, dtype, seed, **kwargs)
        self.optimizer = optimizer(self.model)
        sw.shard(
            self.model,
            self.optimizer,
            plan,
            levels=LEVELS[dist.get_world_size()],
            timeout_s=LIMIT_S,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        torch.manual_seed(100 * seed + dist.get_rank())

    def step(self, number: int) -> float:
        """One step with two micro-batches; the mean loss of all ranks."""
        with sw.no_sync(self.model):
            lm_loss(self.model, *mine(*batch(2 * number))).backward()
        loss = lm_loss(self.model, *mine(*batch(2 * number + 1)))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def steps(self, *numbers: int) -> list[float]:
        return [self.step(number) for number in numbers]

    def save(self, path, **kwargs):
        return sw.save(path, self.model, self.optimizer, scheduler=self.scheduler, **kwargs)

    def load(self, path, **kwargs) -> sw.Resumed:
        return sw.load(path, self.model, self.optimizer, scheduler=self.scheduler, **kwargs)

    def values(self, *, exact: bool = False) -> dict[str, torch.Tensor]:
        """Weights in both precisions and optimizer states, in full, by name; ``exact``: without the
        weights in the dtype, and with the losses, of compute."""
        model, found = self.model, {}
        for master in (True,) if exact else (False, True):
            full = sw.state_dict(model, rank0_only=False, master=master)
            found |= {f"{master}.{name}": value for name, value in full.items() if name != "seen"}
        for name, states in sw.optim_state_dict(model, self.optimizer).items():
            found |= {f"{name}.{key}": torch.as_tensor(v) for key, v in states.items()}
        return found

    def end(self) -> None:
        sw.unshard(self.model)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], label="") -> None:
    assert got.keys() == expected.keys(), (label, got.keys() ^ expected.keys())
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, (label, name)
        assert torch.equal(got[name], value), (label, name)
