"""Small models for tests, and the one plain process that every plan is compared with."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Made = TypeVar("Made")


class Block(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A GPT with tied embeddings and a scalar parameter."""

    def __init__(self, vocab: int = 37, dim: int = 24, layers: int = 3, length: int = 8) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.temperature


class UntiedGPT(nn.Module):
    """A projection of its own, with a bias, and an embedding with padding."""

    def __init__(self, vocab: int = 37, dim: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=3)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedLayers(nn.Module):
    """Layers that are called several times in one forward, in different orders."""

    def __init__(self, vocab: int = 37, dim: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in (0, 0, 1, 0, 1):
            x = self.blocks[index](x)
        return self.head(x)


def make(
    kind: type[nn.Module], dtype: torch.dtype | None = torch.float64, seed: int = 0, **kwargs: Any
) -> nn.Module:
    torch.manual_seed(seed)
    return kind(**kwargs).to(dtype) if dtype else kind(**kwargs)


def batch(
    step: int, size: int = 8, length: int = 8, vocab: int = 37
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def mine(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """This rank's slice of a global batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return tuple(t.chunk(world)[rank] for t in tensors)


def on_rank_0(make: Callable[[], Made]) -> Made:
    """What rank 0 makes, on every rank: a reference need not be computed by each."""
    made: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def lm_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    return max(
        (
            float((left[n].double() - right[n].double()).abs().max())
            for n in left
            if left[n].numel()
        ),
        default=0.0,
    )


def train_plain(
    model: nn.Module,
    steps: int = 3,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> list[float]:
    """The reference: one plain process on the global batch."""
    opt = optimizer(model)
    losses = []
    for step in range(steps):
        loss = lm_loss(model, *batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses
