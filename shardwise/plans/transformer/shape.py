"""The shape of a decoder-only language model."""

from dataclasses import dataclass

from shardwise.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """All that the formulas depend on."""

    name: str
    family: str
    """``gpt``: layer norms, biases, learned positions, GELU, one projection for q, k and v.
    ``llama``: RMS norms, no biases, rotary positions, gated SiLU, projections for each."""
    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and values, each shared by several query heads (``gpt``: as many as those)."""
    ffn: int
    """Width between the linear layers of a block's MLP."""
    vocab: int
    context: int
    """The longest sequence."""
    tied: bool
    """Whether the head's weight is the embedding's."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for key in ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "context"):
            if getattr(self, key) < 1:
                raise PlanError(
                    f"Model '{self.name}' has {key}={getattr(self, key)}; use 1 or more."
                )
        for many, few in (("width", "heads"), ("heads", "kv_heads")):
            if getattr(self, many) % getattr(self, few):
                raise PlanError(
                    f"Model '{self.name}' has {many}={getattr(self, many)}, which is not a "
                    f"multiple of {few}={getattr(self, few)}; change one of the two."
                )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width
