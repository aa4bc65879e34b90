"""A small GPT in plain PyTorch: the trainer's default model, whose blocks are also timed by probes.

Pre-norm blocks, causal scaled-dot-product attention, learned positions, tied embeddings. It does
not depend on shardwise: every strategy is applied from outside.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTE_VOCAB = 256
"""One token per byte: text needs no tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT."""

    num_layers: int
    width: int
    num_heads: int
    vocab: int = BYTE_VOCAB
    context: int = 1024
    """The longest sequence: the number of learned positions."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.num_heads} heads")


SIZES: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(num_layers=4, width=128, num_heads=4),  # 0.9M
    "gpt-mini": GPTConfig(num_layers=6, width=384, num_heads=6),  # 11M
    "gpt-small": GPTConfig(num_layers=16, width=512, num_heads=8),  # 51M
    "gpt-base": GPTConfig(num_layers=12, width=768, num_heads=12),  # 86M; 124M with GPT-2's vocab
    "gpt-medium": GPTConfig(num_layers=24, width=1024, num_heads=16),  # 303M
    "gpt-large": GPTConfig(num_layers=36, width=1280, num_heads=20),  # 710M
    "gpt-xl": GPTConfig(num_layers=48, width=1600, num_heads=25),  # 1.5B
}
"""Built-in sizes by name, from one for tests to that of GPT-2 XL."""


def sized(name: str, **changes: int | None) -> GPTConfig:
    """The built-in size `name` with some fields changed; None leaves a field as it is."""
    return replace(SIZES[name], **{k: v for k, v in changes.items() if v is not None})


class CausalLMOutput(NamedTuple):
    """What the model returns; `loss` is None without labels."""

    loss: Tensor | None
    logits: Tensor


class Attention(nn.Module):
    """Causal multi-head self-attention with one fused projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class MLP(nn.Module):
    """Two linear layers, with four times the width between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One transformer block: attention and MLP, each on a normalised copy of the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's initialisation: N(0, 0.02), smaller where a layer adds to the residual."""
        writes = ("attention.proj.weight", "mlp.down.weight")
        for name, parameter in self.named_parameters():
            if name.endswith(writes):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.num_layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        """Logits, and the mean loss of predicting `labels[:, 1:]`; the shift is done here."""
        seq = input_ids.shape[1]
        if seq > self.config.context:
            raise ValueError(f"a sequence of {seq} exceeds the context of {self.config.context}")
        x = self.tokens(input_ids) + self.positions(torch.arange(seq, device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return CausalLMOutput(None, logits)
        # At least float32: a bfloat16 loss has three digits, too few to compare training runs.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits)
