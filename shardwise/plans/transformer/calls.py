"""The calls of a model's modules in one forward; see Note: Calls by formulas."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from shardwise.plans.transformer.shape import Shape

INDEX_BYTES = 8
"""Token ids, positions and labels are int64."""

ParamShape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A storage, identified by its key."""

    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Module:
    """A module's call, without the calls of its children."""

    name: str
    params: tuple[tuple[str, ParamShape], ...] = ()
    """Full name and shape; a tied parameter has the name of its first use."""
    given: tuple[Tensor, ...] = ()
    saves: tuple[Tensor, ...] = ()
    flops: int = 0
    is_block: bool = False
    is_called: bool = True
    """False for lists of modules."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch, in a compute dtype of ``word`` bytes, with the tiles of the model."""

    size: int
    seq: int
    word: int
    tiles: dict[str, int] = field(default_factory=dict)
    """The number of tiles of each parameter that is cut."""
    tiled_loss: bool = False

    @property
    def tokens(self) -> int:
        return self.size * self.seq

    @property
    def ids(self) -> Tensor:
        return Tensor("ids", INDEX_BYTES * self.tokens)

    def tensor(self, key: str, width: int) -> Tensor:
        """One vector per token."""
        return Tensor(key, self.tokens * width * self.word)

    def linear(self, name: str, x: Tensor, shape: tuple[int, int], *, bias: bool = False) -> Module:
        weight = (f"{name}.weight", shape)
        params = (weight, (f"{name}.bias", shape[:1])) if bias else (weight,)
        return Module(name, params, (x,), (x,), 2 * self.tokens * prod(shape))

    def embedding(self, name: str, shape: tuple[int, int], ids: Tensor) -> Module:
        weight = f"{name}.weight"
        saves: tuple[Tensor, ...] = (ids,)
        if tiles := self.tiles.get(weight):
            # Each tile saves the indices of its entries, and all but the first which those are.
            own = tiles * ids.num_bytes + (tiles - 1) * ids.num_bytes // INDEX_BYTES
            saves = (Tensor(f"{name}.own", own),)
        return Module(name, ((weight, shape),), (ids,), saves)

    def attention(self, model: Shape, name: str) -> tuple[Tensor, ...]:
        """What a fused kernel saves besides q, k and v: its output, and a sum per row."""
        row_bytes = model.heads * max(4, self.word)
        return (
            self.tensor(f"{name}.mixed", model.width),
            Tensor(f"{name}.logsumexp", self.tokens * row_bytes),
        )

    def attention_flops(self, model: Shape) -> int:
        """Scores and values; the masked half of causal attention counts, as in torch's counter."""
        return 4 * self.tokens * self.seq * model.width

    def head(self, model: Shape, name: str, tie: str, rows: int, wide: int) -> Iterator[Module]:
        """The head, and the cross entropy that the root's forward computes in ``wide`` bytes.

        ``rows`` is less than the number of tokens if the last of each sequence were cut off.
        """
        x = self.tensor("normed", model.width)
        weight, shape = tie if model.tied else f"{name}.weight", (model.vocab, model.width)
        whole = replace(self.linear(name, x, shape), params=((weight, shape),))
        cut_off = rows < self.tokens
        if self.tiled_loss and weight in self.tiles:
            tiles = self.tiles[weight]
            # Per tile: which targets it has, where, and its normaliser, which is also stacked.
            summaries = rows * tiles * (1 + INDEX_BYTES + 2 * wide)
            rest = rows * (wide + 1) + INDEX_BYTES  # normalisers, which rows count, their number
            copied = cut_off and self.size > 1
            read = Tensor("loss.x", rows * model.width * self.word) if copied else x
            yield replace(whole, saves=())  # computed with the loss
            yield Module("", saves=(read, Tensor("loss.summaries", summaries + rest)))
            return
        targets = Tensor("loss.targets", INDEX_BYTES * rows)
        if self.size == 1:  # then the shift is a view
            targets = self.ids if cut_off else Tensor("loss.targets", INDEX_BYTES * (rows + 1))
        yield whole
        scores = Tensor("loss.scores", rows * model.vocab * wide + wide)  # and the sum of weights
        yield Module("", saves=(scores, targets))


def modules_of(model: Shape, batch: MicroBatch) -> Iterator[Module]:
    """The modules of a model in the order of its tree."""
    return {"gpt": _gpt, "llama": _llama}[model.family](model, batch)


def _gpt(model: Shape, batch: MicroBatch) -> Iterator[Module]:
    positions = Tensor("positions", INDEX_BYTES * batch.seq)
    yield batch.embedding("tokens", (model.vocab, model.width), batch.ids)
    yield batch.embedding("positions", (model.context, model.width), positions)
    yield Module("blocks", is_called=False)
    for layer in range(model.layers):
        yield from _gpt_block(model, batch, f"blocks.{layer}")
    yield _layer_norm(model, batch, "norm", batch.tensor("x", model.width))
    rows = batch.size * (batch.seq - 1)
    yield from batch.head(model, "head", "tokens.weight", rows, max(4, batch.word))


def _gpt_block(model: Shape, batch: MicroBatch, name: str) -> Iterator[Module]:
    width, attention, mlp = model.width, f"{name}.attention", f"{name}.mlp"
    x, normed = batch.tensor(f"{name}.x", width), batch.tensor(f"{attention}.x", width)
    yield Module(name, given=(x,), is_block=True)
    yield _layer_norm(model, batch, f"{name}.attention_norm", x)
    qkv = batch.tensor(f"{attention}.qkv", 3 * width)
    saves = batch.attention(model, attention)
    flops = batch.attention_flops(model)
    yield Module(attention, given=(normed,), saves=(qkv, *saves), flops=flops)
    yield batch.linear(f"{attention}.qkv", normed, (3 * width, width), bias=True)
    yield batch.linear(f"{attention}.proj", saves[0], (width, width), bias=True)
    yield _layer_norm(model, batch, f"{name}.mlp_norm", batch.tensor(f"{name}.y", width))
    normed, up = batch.tensor(f"{mlp}.x", width), batch.tensor(f"{mlp}.up", model.ffn)
    yield Module(mlp, given=(normed,), saves=(up,))
    yield batch.linear(f"{mlp}.up", normed, (model.ffn, width), bias=True)
    activated = batch.tensor(f"{mlp}.activated", model.ffn)
    yield batch.linear(f"{mlp}.down", activated, (width, model.ffn), bias=True)


def _layer_norm(model: Shape, batch: MicroBatch, name: str, x: Tensor) -> Module:
    params = ((f"{name}.weight", (model.width,)), (f"{name}.bias", (model.width,)))
    return Module(name, params, (x,), (x, batch.tensor(f"{name}.mean_and_rstd", 2)))


def _llama(model: Shape, batch: MicroBatch) -> Iterator[Module]:
    yield Module("model", given=(batch.ids,))
    yield batch.embedding("model.embed_tokens", (model.vocab, model.width), batch.ids)
    yield Module("model.layers", is_called=False)
    for layer in range(model.layers):
        yield from _llama_block(model, batch, f"model.layers.{layer}")
    yield _rms_norm(model, batch, "model.norm", batch.tensor("x", model.width))
    yield Module("model.rotary_emb", given=(batch.tensor("model.layers.0.x", model.width),))
    yield from batch.head(model, "lm_head", "model.embed_tokens.weight", batch.tokens, 4)


def _llama_block(model: Shape, batch: MicroBatch, name: str) -> Iterator[Module]:
    width, kv, attention, mlp = model.width, model.kv_width, f"{name}.self_attn", f"{name}.mlp"
    angle_bytes = batch.seq * model.head_width * batch.word
    angles = (Tensor("cos", angle_bytes), Tensor("sin", angle_bytes))
    shared = (*angles, Tensor("position_ids", INDEX_BYTES * batch.seq))
    x = batch.tensor(f"{name}.x", width)
    yield Module(name, given=(x, *shared), is_block=True)
    normed, saves = batch.tensor(f"{attention}.x", width), batch.attention(model, attention)
    yield Module(
        attention,
        given=(normed, *shared),
        saves=(*angles, batch.tensor(f"{attention}.qkv", width + 2 * kv), *saves),
        flops=batch.attention_flops(model),
    )
    yield batch.linear(f"{attention}.q_proj", normed, (width, width))
    yield batch.linear(f"{attention}.k_proj", normed, (kv, width))
    yield batch.linear(f"{attention}.v_proj", normed, (kv, width))
    yield batch.linear(f"{attention}.o_proj", saves[0], (width, width))
    normed, gate = batch.tensor(f"{mlp}.x", width), batch.tensor(f"{mlp}.gate", model.ffn)
    gated = batch.tensor(f"{mlp}.gated", model.ffn)
    yield Module(mlp, given=(normed,), saves=(batch.tensor(f"{mlp}.factors", 2 * model.ffn),))
    yield batch.linear(f"{mlp}.gate_proj", normed, (model.ffn, width))
    yield batch.linear(f"{mlp}.up_proj", normed, (model.ffn, width))
    yield batch.linear(f"{mlp}.down_proj", gated, (width, model.ffn))
    yield Module(f"{mlp}.act_fn", given=(gate,), saves=(gate,))
    yield _rms_norm(model, batch, f"{name}.input_layernorm", x)
    after = f"{name}.post_attention_layernorm"
    yield _rms_norm(model, batch, after, batch.tensor(f"{name}.y", width))


def _rms_norm(model: Shape, batch: MicroBatch, name: str, x: Tensor) -> Module:
    """Computed in float32, on a copy if the input has another dtype."""
    wide = x if batch.word == 4 else Tensor(f"{name}.wide", batch.tokens * model.width * 4)
    rstd = Tensor(f"{name}.rstd", batch.tokens * 4)
    saves = (wide, rstd, batch.tensor(f"{name}.normed", model.width))
    return Module(name, ((f"{name}.weight", (model.width,)),), (x,), saves)
