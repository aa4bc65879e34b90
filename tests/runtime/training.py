"""One training loop, run by one plain process and by ranks under several plans.

A loop is a function of a ``Job``: what a user would write, with the few calls that differ hidden in
the job. The plain job does the work of all ranks, one after the other; a sharded one does its
own rank's. ``compare`` runs a loop both ways and compares what it returns, the parameters and the
optimizer's states.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.plans.plan import Plan
from tests.models import TinyGPT, largest_difference, on_rank_0
from tests.runtime.support import (
    LIMIT_S,
    PLANS,
    assert_at_rest,
    assert_close,
    levels_of,
    small,
)

FEW = ("zero3", "ddp", "zero1", "amsp")
"""Where the plan hardly matters: parts of all, of none, of some states."""
GRADS = tuple(name for name in PLANS if "keep=" not in name)
"""Where only gradients matter: what is kept of gathered parameters makes no difference to them."""

Make = Callable[[nn.Module], Optimizer]


def gpt() -> nn.Module:
    return TinyGPT(vocab=19, dim=12, layers=2, length=6)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class Signs(Optimizer):
    """An element-wise optimizer that shardwise cannot know."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class Job:
    """A model, its optimizer, and the ranks whose batches this process works on."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: range, world: int) -> None:
        self.model, self.optimizer, self.ranks, self.world = model, optimizer, ranks, world

    @property
    def is_plain(self) -> bool:
        return len(self.ranks) == self.world > 1

    def tokens(self, rank: int, step: int, size: int = 2) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(19, (size, 7), generator=generator)

    def loss(self, rank: int, step: int, **options: Any) -> torch.Tensor:
        tokens = self.tokens(rank, step)
        logits = self.model(tokens[:, :-1], **options)
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, step: int, loss: Callable[[int, int], torch.Tensor] | None = None) -> float:
        """One backward of every rank; the plain process averages over ranks. The mean loss."""
        total = torch.zeros((), dtype=torch.float64)
        for rank in self.ranks:
            value = (loss or self.loss)(rank, step)
            (value / self.world if self.is_plain else value).backward()
            total += value.detach()
        if not self.is_plain:
            dist.all_reduce(total)
        return total.item() / self.world

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_plain else sw.no_sync(self.model)

    def clip(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> float:
        if self.is_plain:
            parameters = self.model.parameters()
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, **options).item()
        return sw.clip_grad_norm_(self.model, max_norm, norm_type, **options).item()

    def grads(self) -> dict[str, torch.Tensor]:
        if not self.is_plain:
            return sw.full_grads(self.model)
        named = self.model.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    def parameters(self) -> dict[str, torch.Tensor]:
        if not self.is_plain:
            state = sw.state_dict(self.model, rank0_only=False)
            return {n: state[n] for n, _ in self.model.named_parameters()}
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def states(self) -> dict[str, torch.Tensor]:
        """All optimizer states of the model's parameters, as ``parameter/key``."""
        if self.is_plain:
            names = {p: n for n, p in self.model.named_parameters()}
            found = {names[p]: s for p, s in self.optimizer.state.items() if p in names}
        else:
            found = sw.optim_state_dict(self.model, self.optimizer)
        return {f"{n}/{k}": torch.as_tensor(v) for n, s in found.items() for k, v in s.items()}


def train(job: Job, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(job.backward(step))
        job.update()
    return losses


Loop = Callable[[Job], Any]


def compare(
    loop: Loop,
    plans: tuple[str, ...] | dict[str, Plan] = tuple(PLANS),
    *,
    kind: Callable[[], nn.Module] = gpt,
    optimizer: Make = adamw,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    elementwise: bool = False,
) -> None:
    """Runs on every rank: the loop under all plans against one plain process."""

    def reference() -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        plain = plain_job(kind, optimizer, dtype)
        return loop(plain), plain.parameters(), plain.states()

    expected, parameters, plain_states = on_rank_0(reference)
    chosen = plans if isinstance(plans, dict) else {name: PLANS[name] for name in plans}
    for name, plan in chosen.items():
        job = sharded_job(plan, kind, optimizer, dtype, elementwise=elementwise)
        assert_close(loop(job), expected, name, tolerance)
        difference = largest_difference(job.parameters(), parameters)
        assert difference <= tolerance, (name, "parameters", difference)
        states = job.states()
        assert {k: v.shape for k, v in states.items()} == {
            k: v.shape for k, v in plain_states.items()
        }, name
        difference = largest_difference(states, plain_states)
        assert difference <= tolerance, (name, "states", difference)
        assert_at_rest(job.model)
        sw.unshard(job.model)


def plain_job(
    kind: Callable[[], nn.Module] = gpt, optimizer: Make = adamw, dtype: torch.dtype = torch.float64
) -> Job:
    torch.manual_seed(0)
    model = kind().to(dtype)
    world = dist.get_world_size()
    return Job(model, optimizer(model), range(world), world)


def sharded_job(
    plan: Plan | str,
    kind: Callable[[], nn.Module] = gpt,
    optimizer: Make = adamw,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Job:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = kind().to(dtype)
    made = optimizer(model)
    plan = small(PLANS[plan] if isinstance(plan, str) else plan)
    sw.shard(model, made, plan, levels=levels_of(plan), timeout_s=LIMIT_S, **options)
    return Job(model, made, range(rank, rank + 1), world)


def each_plan(*names: str, **options: Any) -> Iterator[tuple[str, Job]]:
    """Sharded jobs under some plans, one after the other."""
    for name in names or PLANS:
        job = sharded_job(name, **options)
        yield name, job
        sw.unshard(job.model)
