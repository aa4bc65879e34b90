"""Transformers by formulas: units, operations and saved bytes without a module, whatever the size.

[Note: Calls by formulas]
A model is written down as the calls of its modules in one forward: the parameters that each has
itself, what it is given, what autograd saves of it, and the operations of its matrix products.
Everything else follows by the rules that hold for real modules: ``model/inspect.py`` finds units,
``model/tiling.py`` cuts tiles, ``model/activations.py`` counts saved storages. Tests compare all of
it with the modules that the two families describe: ``model/gpt.py``, and Llama of transformers.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod

from shardwise.core.calls import Call, Forward, Input
from shardwise.core.errors import PlanError
from shardwise.core.layout import DTYPE_BYTES, ModelSpec, ParamSpec, lay_out
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.plans.plan import Plan, tile_name
from shardwise.plans.tiles import TWO_RANKS, cuts, may_cut, on_two_ranks, tile_rows

ROOT = "root"
"""The unit that has everything that no other unit has, as in ``model/inspect.py``."""
INDEX_BYTES = 8
"""Token ids, positions and labels are int64."""

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The shape of a decoder-only language model; its ``Facts`` by formulas."""

    name: str
    family: str
    """``gpt``: layer norms, biases, learned positions, GELU, one projection for q, k and v.
    ``llama``: RMS norms, no biases, rotary positions, gated SiLU, projections for each."""
    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and values, each shared by several of the queries' (``gpt``: as many)."""
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
                    f"Model '{self.name}' has {many}={getattr(self, many)}, which is no multiple "
                    f"of {few}={getattr(self, few)}; change one of both."
                )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in _shapes(self).values())

    def spec(self, plan: Plan, topology: Topology) -> ModelSpec:
        return _spec(self, *_cut_key(self, plan, topology), topology.world)

    def work(
        self, micro_batch: int, seq: int, plan: Plan, topology: Topology | None = None
    ) -> Work:
        if self.family == "gpt" and seq > self.context:
            raise PlanError(
                f"Sequences of {seq} tokens exceed the {self.context} positions of model "
                f"'{self.name}'; use shorter ones, or a model with a larger context."
            )
        if topology is None:
            plan, topology = on_two_ranks(plan), TWO_RANKS
        dtype = plan.precision.compute_dtype(self.dtype)
        key = _cut_key(self, plan, topology)
        return _work(self, micro_batch, seq, dtype, plan.tiling.loss, *key)


# --- the calls of a forward -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A storage, told apart by its key."""

    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Module:
    """A module's call, what its children do in it aside."""

    name: str
    params: tuple[tuple[str, _Shape], ...] = ()
    """Full name and shape; a tied parameter has the name of its first place."""
    given: tuple[_Tensor, ...] = ()
    saves: tuple[_Tensor, ...] = ()
    flops: int = 0
    is_block: bool = False
    is_called: bool = True
    """Lists of modules are not."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A micro-batch, in a compute dtype of ``word`` bytes, and the tiles that it meets."""

    size: int
    seq: int
    word: int
    tiles: dict[str, int] = field(default_factory=dict)
    """How many tiles each parameter that is cut is in."""
    tiled_loss: bool = False

    @property
    def tokens(self) -> int:
        return self.size * self.seq

    @property
    def ids(self) -> _Tensor:
        return _Tensor("ids", INDEX_BYTES * self.tokens)

    def tensor(self, key: str, width: int) -> _Tensor:
        """One vector a token."""
        return _Tensor(key, self.tokens * width * self.word)

    def linear(
        self, name: str, x: _Tensor, shape: tuple[int, int], *, bias: bool = False
    ) -> _Module:
        weight = (f"{name}.weight", shape)
        params = (weight, (f"{name}.bias", shape[:1])) if bias else (weight,)
        return _Module(name, params, (x,), (x,), 2 * self.tokens * prod(shape))

    def embedding(self, name: str, shape: tuple[int, int], ids: _Tensor) -> _Module:
        weight = f"{name}.weight"
        saves: tuple[_Tensor, ...] = (ids,)
        if tiles := self.tiles.get(weight):
            # Each tile has the indices of its own entries; all but the first, which these are.
            own = tiles * ids.num_bytes + (tiles - 1) * ids.num_bytes // INDEX_BYTES
            saves = (_Tensor(f"{name}.own", own),)
        return _Module(name, ((weight, shape),), (ids,), saves)

    def attention(self, model: Transformer, name: str) -> tuple[_Tensor, ...]:
        """What a fused kernel saves beside q, k and v: its output, and a sum for each row."""
        row_bytes = model.heads * max(4, self.word)
        return (
            self.tensor(f"{name}.mixed", model.width),
            _Tensor(f"{name}.logsumexp", self.tokens * row_bytes),
        )

    def attention_flops(self, model: Transformer) -> int:
        """Scores and values; of causal ones the half that is masked counts, as torch counts it."""
        return 4 * self.tokens * self.seq * model.width

    def head(
        self, model: Transformer, name: str, tie: str, rows: int, wide: int
    ) -> Iterator[_Module]:
        """The head, and the cross entropy that the root's forward computes in ``wide`` bytes.

        ``rows`` below the number of tokens: the last of each sequence were cut off.
        """
        x = self.tensor("normed", model.width)
        weight, shape = tie if model.tied else f"{name}.weight", (model.vocab, model.width)
        whole = replace(self.linear(name, x, shape), params=((weight, shape),))
        cut_off = rows < self.tokens
        if self.tiled_loss and weight in self.tiles:
            tiles = self.tiles[weight]
            # Of each tile: which targets are its own, where, and its normaliser, also stacked.
            summaries = rows * tiles * (1 + INDEX_BYTES + 2 * wide)
            rest = rows * (wide + 1) + INDEX_BYTES  # normalisers, which rows count, how many do
            copied = cut_off and self.size > 1
            read = _Tensor("loss.x", rows * model.width * self.word) if copied else x
            yield replace(whole, saves=())  # computed with the loss
            yield _Module("", saves=(read, _Tensor("loss.summaries", summaries + rest)))
            return
        targets = _Tensor("loss.targets", INDEX_BYTES * rows)
        if self.size == 1:  # then a shift is a view
            targets = self.ids if cut_off else _Tensor("loss.targets", INDEX_BYTES * (rows + 1))
        yield whole
        scores = _Tensor("loss.scores", rows * model.vocab * wide + wide)  # and their weights' sum
        yield _Module("", saves=(scores, targets))


def _modules(model: Transformer, batch: _Batch) -> Iterator[_Module]:
    """The modules of a model in the order of its tree."""
    return {"gpt": _gpt, "llama": _llama}[model.family](model, batch)


def _gpt(model: Transformer, batch: _Batch) -> Iterator[_Module]:
    positions = _Tensor("positions", INDEX_BYTES * batch.seq)
    yield batch.embedding("tokens", (model.vocab, model.width), batch.ids)
    yield batch.embedding("positions", (model.context, model.width), positions)
    yield _Module("blocks", is_called=False)
    for layer in range(model.layers):
        yield from _gpt_block(model, batch, f"blocks.{layer}")
    yield _layer_norm(model, batch, "norm", batch.tensor("x", model.width))
    rows = batch.size * (batch.seq - 1)
    yield from batch.head(model, "head", "tokens.weight", rows, max(4, batch.word))


def _gpt_block(model: Transformer, batch: _Batch, name: str) -> Iterator[_Module]:
    width, attention, mlp = model.width, f"{name}.attention", f"{name}.mlp"
    x, normed = batch.tensor(f"{name}.x", width), batch.tensor(f"{attention}.x", width)
    yield _Module(name, given=(x,), is_block=True)
    yield _layer_norm(model, batch, f"{name}.attention_norm", x)
    qkv = batch.tensor(f"{attention}.qkv", 3 * width)
    saves = batch.attention(model, attention)
    flops = batch.attention_flops(model)
    yield _Module(attention, given=(normed,), saves=(qkv, *saves), flops=flops)
    yield batch.linear(f"{attention}.qkv", normed, (3 * width, width), bias=True)
    yield batch.linear(f"{attention}.proj", saves[0], (width, width), bias=True)
    yield _layer_norm(model, batch, f"{name}.mlp_norm", batch.tensor(f"{name}.y", width))
    normed, up = batch.tensor(f"{mlp}.x", width), batch.tensor(f"{mlp}.up", model.ffn)
    yield _Module(mlp, given=(normed,), saves=(up,))
    yield batch.linear(f"{mlp}.up", normed, (model.ffn, width), bias=True)
    activated = batch.tensor(f"{mlp}.activated", model.ffn)
    yield batch.linear(f"{mlp}.down", activated, (width, model.ffn), bias=True)


def _layer_norm(model: Transformer, batch: _Batch, name: str, x: _Tensor) -> _Module:
    params = ((f"{name}.weight", (model.width,)), (f"{name}.bias", (model.width,)))
    return _Module(name, params, (x,), (x, batch.tensor(f"{name}.mean_and_rstd", 2)))


def _llama(model: Transformer, batch: _Batch) -> Iterator[_Module]:
    yield _Module("model", given=(batch.ids,))
    yield batch.embedding("model.embed_tokens", (model.vocab, model.width), batch.ids)
    yield _Module("model.layers", is_called=False)
    for layer in range(model.layers):
        yield from _llama_block(model, batch, f"model.layers.{layer}")
    yield _rms_norm(model, batch, "model.norm", batch.tensor("x", model.width))
    yield _Module("model.rotary_emb", given=(batch.tensor("model.layers.0.x", model.width),))
    yield from batch.head(model, "lm_head", "model.embed_tokens.weight", batch.tokens, 4)


def _llama_block(model: Transformer, batch: _Batch, name: str) -> Iterator[_Module]:
    width, kv, attention, mlp = model.width, model.kv_width, f"{name}.self_attn", f"{name}.mlp"
    angle_bytes = batch.seq * model.head_width * batch.word
    angles = (_Tensor("cos", angle_bytes), _Tensor("sin", angle_bytes))
    shared = (*angles, _Tensor("position_ids", INDEX_BYTES * batch.seq))
    x = batch.tensor(f"{name}.x", width)
    yield _Module(name, given=(x, *shared), is_block=True)
    normed, saves = batch.tensor(f"{attention}.x", width), batch.attention(model, attention)
    yield _Module(
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
    yield _Module(mlp, given=(normed,), saves=(batch.tensor(f"{mlp}.factors", 2 * model.ffn),))
    yield batch.linear(f"{mlp}.gate_proj", normed, (model.ffn, width))
    yield batch.linear(f"{mlp}.up_proj", normed, (model.ffn, width))
    yield batch.linear(f"{mlp}.down_proj", gated, (width, model.ffn))
    yield _Module(f"{mlp}.act_fn", given=(gate,), saves=(gate,))
    yield _rms_norm(model, batch, f"{name}.input_layernorm", x)
    after = f"{name}.post_attention_layernorm"
    yield _rms_norm(model, batch, after, batch.tensor(f"{name}.y", width))


def _rms_norm(model: Transformer, batch: _Batch, name: str, x: _Tensor) -> _Module:
    """Computed in float32, of a copy where the input is not."""
    wide = x if batch.word == 4 else _Tensor(f"{name}.wide", batch.tokens * model.width * 4)
    rstd = _Tensor(f"{name}.rstd", batch.tokens * 4)
    saves = (wide, rstd, batch.tensor(f"{name}.normed", model.width))
    return _Module(name, ((f"{name}.weight", (model.width,)),), (x,), saves)


# --- units ----------------------------------------------------------------------------------------

_Units = tuple[tuple[str, ...], int]
"""What a plan says of units: the patterns of their names, and how small they may be."""


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    params: dict[str, _Shape]
    inside: bool = False


@dataclass(frozen=True, slots=True)
class _Cut:
    """Units in order, and which of their parameters are in tiles."""

    units: list[_Unit]
    wholes: list[str]
    """Units before the cut."""
    tiles: dict[str, int]
    used_again: tuple[str, ...]


@lru_cache
def _structure(model: Transformer) -> tuple[_Module, ...]:
    return tuple(_modules(model, _Batch(1, 1, 4)))


def _shapes(model: Transformer) -> dict[str, _Shape]:
    return {name: shape for module in _structure(model) for name, shape in module.params}


def _users(model: Transformer) -> dict[str, list[str]]:
    """The modules that hold each parameter; a tied one has several."""
    found: dict[str, list[str]] = {}
    for module in _structure(model):
        for name, _ in module.params:
            found.setdefault(name, []).append(module.name)
    return found


@lru_cache
def _members(model: Transformer, units: _Units) -> tuple[_Unit, ...]:
    """The units before any cut, root first, then in the order of the tree."""
    names = _named_units(model, units[0]) if units[0] else _found_units(model, units[1])
    members: dict[str, dict[str, _Shape]] = {ROOT: {}, **{name: {} for name in names}}
    shapes, chosen = _shapes(model), set(names)
    for name, users in _users(model).items():
        owners = {_innermost(user, chosen) for user in users}
        owner = owners.pop() if len(owners) == 1 else ROOT
        members[owner][name] = shapes[name]
    return tuple(_Unit(n, params) for n, params in members.items() if params or n == ROOT)


def _named_units(model: Transformer, patterns: tuple[str, ...]) -> list[str]:
    names = [module.name for module in _structure(model) if module.name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                f"The plan's unit pattern '{pattern}' matches no module of model '{model.name}'; "
                f"module names look like {', '.join(map(repr, names[:4]))}."
            )
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def _found_units(model: Transformer, min_numel: int) -> list[str]:
    """Blocks, and layers outside of them as heavy as a good part of one."""
    modules = _structure(model)
    blocks = {module.name for module in modules if module.is_block}
    sizes: Counter[str] = Counter()
    for module in modules:
        sizes[_innermost(module.name, blocks)] += sum(prod(shape) for _, shape in module.params)
    heaviest = max(sizes[name] for name in blocks)
    if heaviest < min_numel:
        return []
    users = _users(model)

    def is_heavy(module: _Module) -> bool:
        if _innermost(module.name, blocks) != ROOT or not module.params:
            return False
        alone = all(len(users[name]) == 1 for name, _ in module.params)
        numel = sum(prod(shape) for _, shape in module.params)
        return alone and numel >= max(min_numel, heaviest // 4)

    return [module.name for module in modules if module.name in blocks or is_heavy(module)]


def _ancestors(name: str) -> Iterator[str]:
    """A module and those around it, outwards.

    >>> list(_ancestors("blocks.0.mlp"))
    ['blocks.0.mlp', 'blocks.0', 'blocks']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]


def _innermost(name: str, units: set[str]) -> str:
    return next((found for found in _ancestors(name) if found in units), ROOT)


def _outermost(name: str, units: set[str]) -> str:
    return next((found for found in [*_ancestors(name)][::-1] if found in units), ROOT)


_CutKey = tuple[_Units, int, frozenset[str]]


def _cut_key(model: Transformer, plan: Plan, topology: Topology) -> _CutKey:
    """All that units and tiles depend on: units, elements of a tile, which units may be cut."""
    units = (plan.units, plan.min_unit_numel)
    if not may_cut(plan, topology):
        return units, 0, frozenset()
    names = [unit.name for unit in _members(model, units)]
    if not plan.overrides:
        cut = names if cuts(plan, topology, ROOT) else []
    else:
        cut = [name for name in names if cuts(plan, topology, name)]
    return units, plan.tiling.numel, frozenset(cut)


@lru_cache
def _cut(model: Transformer, units: _Units, numel: int, cut: frozenset[str]) -> _Cut:
    """As ``model.tiling.cut``: each tile comes after the unit that it was cut from."""
    members, users = _members(model, units), _users(model)
    root = _Unit(ROOT, dict(members[0].params))
    found: list[_Unit] = []
    tiles: dict[str, int] = {}
    again: list[tuple[int, str]] = []
    for member in members:
        unit = root if member.name == ROOT else _Unit(member.name, dict(member.params))
        large = [
            (name, shape)
            for name, shape in unit.params.items()
            if unit.name in cut and len(shape) == 2 and prod(shape) > numel and shape[0] > 1
        ]
        for name, _ in large:
            del unit.params[name]
        alone = any(unit.name in users[name] for name, _ in large)
        if alone:
            root.params.update(unit.params)
            unit.params.clear()
        if unit.params or unit is root:
            found.append(unit)
        for name, (rows, width) in large:
            parts = tile_rows(rows, width, numel)
            tiles[name] = len(parts)
            for part in parts:
                tile = tile_name(unit.name, name, part.start, part.stop)
                param: dict[str, _Shape] = {f"{name}[{part.start}:{part.stop}]": (len(part), width)}
                found.append(_Unit(tile, param, inside=unit is not root and not alone))
                again += [(layer, tile) for layer in range(1, len(users[name]))]
    used_again = tuple(name for _, name in sorted(again, key=lambda use: use[0]))
    return _Cut(found, [unit.name for unit in members], tiles, used_again)


@lru_cache
def _spec(
    model: Transformer, units: _Units, numel: int, cut: frozenset[str], world: int
) -> ModelSpec:
    found = _cut(model, units, numel, cut)
    return ModelSpec(
        tuple(
            lay_out(
                unit.name,
                [ParamSpec(name, shape, model.dtype) for name, shape in unit.params.items()],
                world,
                inside=unit.inside,
            )
            for unit in found.units
        ),
        found.used_again,
    )


# --- work -----------------------------------------------------------------------------------------


@lru_cache
def _work(
    model: Transformer,
    micro_batch: int,
    seq: int,
    dtype: str,
    tiled_loss: bool,
    units: _Units,
    numel: int,
    cut: frozenset[str],
) -> Work:
    found = _cut(model, units, numel, cut)
    batch = _Batch(micro_batch, seq, DTYPE_BYTES[dtype], found.tiles, tiled_loss)
    modules = [module for module in _modules(model, batch) if module.is_called]
    names = {module.name for module in modules}
    computing, called = names & set(found.wholes), names & {unit.name for unit in found.units}
    flops: dict[str, float] = dict.fromkeys(found.wholes, 0.0)
    for module in modules:
        flops[_innermost(module.name, computing)] += module.flops
    return Work(
        tokens=batch.tokens,
        dtype=dtype,
        forward_flops=flops,
        saved=_forward(modules, called).saved,
    )


def _forward(modules: Iterable[_Module], units: set[str]) -> Forward:
    root: dict[Hashable, int] = {}
    inner: dict[str, dict[Hashable, int]] = {}
    calls = []
    for module in modules:
        unit = _outermost(module.name, units)
        if unit == module.name:
            given: dict[Hashable, Input] = {
                t.key: Input(t.num_bytes, t.num_bytes) for t in module.given
            }
            calls.append(Call(given, inner.setdefault(unit, {})))
        saved = root if unit == ROOT else inner.setdefault(unit, {})
        saved.update((t.key, t.num_bytes) for t in module.saves)
    return Forward(root, tuple(calls))
