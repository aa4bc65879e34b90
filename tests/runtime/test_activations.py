"""Activations that are recomputed, or whose starting points rest on a tier, change no number."""

import copy
import gc
import inspect
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.errors import ShardwiseError, UsageError
from shardwise.core.ticket import Ticket
from shardwise.core.work import IN_FLIGHT
from shardwise.device.streams import Mark
from shardwise.plans.inputs import Inputs
from shardwise.runtime.activations import offload, recompute
from shardwise.runtime.unit import State
from shardwise.tier.pool import Pool
from shardwise.tier.store import Record, TierError
from tests.models import Block, SharedLayers, TinyGPT, batch, mine
from tests.runtime.support import LEVELS, LIMIT_S, assert_at_rest

SETTINGS = ("recompute", "cpu", "nvme")


class Later:
    """A ticket whose work is done when somebody waits: what is used too early is wrong."""

    def __init__(self, store: "FakeStore", record: Record, work: Callable[[], None]) -> None:
        self._store, self._record, self._work = store, record, work

    def block_host(self) -> None:
        pending = self._store.pending[self._record]
        while self in pending:
            pending.popleft()._work()


class FakeStore:
    """Keeps records in memory, moves them as late as allowed, and remembers what was asked for."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.held_bytes = limit, 0
        self.kept: dict[Record, torch.Tensor] = {}
        self.pending: dict[Record, deque[Later]] = {}
        self.asked: list[tuple[str, Record]] = []
        self.fails_to_read = False

    def reserve(self, nbytes: int, label: str) -> Record:
        if self.held_bytes + nbytes > self.limit:
            raise TierError(f"no room for {label}")
        record = Record(label, nbytes, offset=4096 * len(self.kept))
        self.held_bytes += nbytes
        self.kept[record] = torch.zeros(nbytes, dtype=torch.uint8)
        self.pending[record] = deque()
        return record

    def put(
        self, record: Record, source: torch.Tensor, start: int = 0, *, after: Mark = None
    ) -> Ticket:
        self.asked.append(("put", record))
        assert source.data_ptr() % 4096 == 0
        assert source.nbytes == record.nbytes

        def work() -> None:
            self.kept[record][start : start + source.numel()] = source

        return self._later(record, work)

    def get(
        self, record: Record, out: torch.Tensor, start: int = 0, *, after: Mark = None
    ) -> Ticket:
        self.asked.append(("get", record))
        out.fill_(0xFF)

        def work() -> None:
            if self.fails_to_read:
                raise TierError("the disk is gone")
            out.copy_(self.kept[record][start : start + out.numel()])

        return self._later(record, work)

    def free(self, record: Record) -> None:
        self.held_bytes -= record.nbytes
        del self.kept[record], self.pending[record]

    def close(self) -> None:
        raise AssertionError("not for activations to do")

    def _later(self, record: Record, work: Callable[[], None]) -> Ticket:
        ticket = Later(self, record, work)
        self.pending[record].append(ticket)
        return ticket


@dataclass
class Sharded:
    """A sharded model and what its activations do."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    store: FakeStore
    activations: recompute.Activations
    pool: Pool

    @property
    def lent_bytes(self) -> int:
        """Buffers that somebody has."""
        assert self.activations.num_resting == 0
        runtime_of(self.model).recover()
        self.pool.trim()
        return self.pool.held_bytes


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def shard(
    kind: Callable[[], nn.Module],
    setting: str,
    small: int = 1,
    store: FakeStore | None = None,
    **plan: Any,
) -> Sharded:
    """A sharded model under zero3; inputs of at least ``small`` bytes are moved."""
    offload.SMALL_BYTES = small
    model = build(kind)
    optimizer = adamw(model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    chosen = replace(sw.presets.zero3(), min_unit_numel=500, activations=setting, **plan)
    # Sharded as if activations were kept, so that it is installed here, with the store of a test.
    sw.shard(
        model,
        optimizer,
        replace(chosen, activations="keep"),
        levels=LEVELS[world],
        timeout_s=LIMIT_S,
    )
    runtime = runtime_of(model)
    runtime.plan, runtime.issuer.inputs = chosen, Inputs(chosen)
    store, pool = store or FakeStore(), Pool(torch.device("cpu"))
    installed = recompute.install(runtime, store if setting == "nvme" else None, pool)
    return Sharded(model, optimizer, store, installed, pool)


@pytest.fixture(autouse=True)
def small_bytes() -> Iterator[None]:
    before = offload.SMALL_BYTES
    yield
    offload.SMALL_BYTES = before


# --- models ---------------------------------------------------------------------------------------


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Stack(nn.Module):
    """A model of blocks with its own way to call each of them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(24, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


def dropping() -> nn.Module:
    return Stack(*(Dropping(24) for _ in range(4)))


@dataclass
class Result:
    hidden: torch.Tensor
    parts: dict[str, torch.Tensor]


class Awkward(Block):
    """Takes keywords and containers, returns a dataclass with a dict inside."""

    def forward(self, x, *, scale, options, log):
        log.append(len(log))
        y = super().forward(x * scale) + options["bias"][0]
        return Result(y, {"more": y.sum(-1, keepdim=True)})


class AwkwardStack(Stack):
    def __init__(self) -> None:
        super().__init__(*(Awkward(24) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(24))
        self.log: list[int] = []

    def call(self, block, x):
        result = block(x, scale=self.scale, options={"bias": (x.mean(), None)}, log=self.log)
        return result.hidden + 0.1 * result.parts["more"]


class Normed(Block):
    """Has running statistics, and a buffer that its output depends on."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.batch_norm = nn.BatchNorm1d(dim)
        self.register_buffer("average", torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.5).add_(x.detach().mean((0, 1)))
        return self.batch_norm(super().forward(x).transpose(1, 2)).transpose(1, 2) * (
            1 + self.average
        )


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Dropping(24) for _ in range(2))
        self.mix = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = x + self.mix(block(x))
        return x


class Nested(Stack):
    """Units inside of units."""

    def __init__(self) -> None:
        super().__init__(Outer(), Outer(), Outer())


class SelfMade(Stack):
    """Checkpoints its blocks itself, but for the last one."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__(*(Dropping(24) for _ in range(3)))
        self.reentrant = reentrant

    def call(self, block, x):
        if block is self.blocks[-1]:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.reentrant)


class Pair(Block):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + other


class Pairs(Stack):
    """All blocks look at one other tensor."""

    def __init__(self) -> None:
        super().__init__(*(Pair(24) for _ in range(5)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        other = x.sin()
        for block in self.blocks:
            x = block(x, other)
        return self.head(x)


def gpt2(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=24, n_layer=3, n_head=2, **options
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_checkpointing(reentrant: bool) -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt": (TinyGPT, {}),
    "dropout": (dropping, {}),
    "units used twice": (SharedLayers, {}),
    "keywords, containers, dataclasses": (AwkwardStack, {}),
    "buffers that change": (lambda: Stack(*(Normed(24) for _ in range(3))), {}),
    "nested units": (Nested, {"units": ("blocks.?", "blocks.?.inner.?")}),
    "a tensor for all": (Pairs, {}),
    "a transformers model with dropout and a cache": (gpt2, {}),
    "transformers' own checkpoints": (lambda: gpt2_checkpointing(False), {}),
    "transformers' reentrant checkpoints": (lambda: gpt2_checkpointing(True), {}),
    "the model's own checkpoints": (SelfMade, {}),
    "the model's own reentrant checkpoints": (lambda: SelfMade(True), {}),
}


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Trained:
    losses: list[float]
    grads: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]

    def assert_equals(self, other: "Trained") -> None:
        assert self.losses == other.losses
        for left, right in zip(self.grads, other.grads, strict=True):
            _assert_equal(left, right)
        _assert_equal(self.state, other.state)


def _assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def train_plain(kind: Callable[[], nn.Module], steps: int = 3) -> Trained:
    """Passes of one plain process; it does not step, as a flat update rounds in its own way."""
    model = build(kind)
    trained = Trained([], [], {})
    for step in range(steps):
        torch.manual_seed(step)
        loss = loss_of(model, *batch(step))
        loss.backward()
        trained.losses.append(loss.item())
        trained.grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    trained.state = model.state_dict()
    return trained


def train(
    sharded: Sharded, steps: int = 3, micro_batches: int = 1, updates: bool = True
) -> Trained:
    model, optimizer = sharded.model, sharded.optimizer
    rank = dist.get_rank() if dist.is_initialized() else 0
    trained = Trained([], [], {})
    for step in range(steps):
        torch.manual_seed(step + 100 * rank)
        for micro in range(1, micro_batches):
            with sw.no_sync(model):
                loss_of(model, *my_batch(100 * micro + step)).backward()
        loss = loss_of(model, *my_batch(step))
        loss.backward()
        trained.losses.append(loss.item())
        trained.grads.append({n: g.clone() for n, g in sw.full_grads(model).items()})
        if updates:
            optimizer.step()
        optimizer.zero_grad()
    trained.state = {n: t.clone() for n, t in sw.state_dict(model, rank0_only=False).items()}
    return trained


def my_batch(step: int) -> tuple[torch.Tensor, ...]:
    return mine(*batch(step)) if dist.is_initialized() else batch(step)


# --- one process: as plain PyTorch ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Unit .* is called inside the model's own checkpoint")
@pytest.mark.parametrize("setting", ["recompute", "nvme"])
@pytest.mark.parametrize("name", KINDS)
def test_losses_gradients_and_states_are_those_of_plain_pytorch_bit_for_bit(name, setting):
    kind, changes = KINDS[name]
    sharded = shard(kind, setting, **changes)
    train(sharded, updates=False).assert_equals(train_plain(kind))
    assert_at_rest(sharded.model)
    if setting == "nvme":
        moved = sharded.activations.moved
        assert moved.out_bytes > 0 or "transformers' " in name
        assert sharded.lent_bytes == 0
    sw.unshard(sharded.model)
    assert sharded.store.held_bytes == 0


# --- two ranks: as with everything kept -----------------------------------------------------------


def check_on_ranks(name: str) -> None:
    kind, changes = KINDS[name]
    kept = shard(kind, "keep", **changes)
    expected = train(kept, steps=2, micro_batches=2)
    sw.unshard(kept.model)
    for setting in ("recompute", "nvme"):
        sharded = shard(kind, setting, **changes)
        peak = watch_gathered(sharded.model)
        train(sharded, steps=2, micro_batches=2).assert_equals(expected)
        assert "units" in changes or peak[0] <= 3, peak
        assert_at_rest(sharded.model)
        assert sw.stats(sharded.model)["extra_gathers"] == 0
        if setting == "nvme":
            assert sharded.activations.moved.in_bytes > 0
            assert sharded.lent_bytes == 0
        sw.unshard(sharded.model)


def watch_gathered(model: nn.Module) -> list[int]:
    """How many units beside the root are gathered at once, at most."""
    runtime, peak = runtime_of(model), [0]

    def count(_: object) -> None:
        now = sum(unit.state is not State.RESTING for unit in runtime.units[1:])
        peak[0] = max(peak[0], now)

    runtime.observers.append(count)
    return peak


class TestOnTwoRanks:
    @pytest.mark.parametrize(
        "name",
        [
            "dropout",
            "units used twice",
            "nested units",
            "a tensor for all",
            "keywords, containers, dataclasses",
            "a transformers model with dropout and a cache",
        ],
    )
    def test_training_under_zero3_is_as_with_everything_kept_bit_for_bit(self, name, two):
        two.run(check_on_ranks, name)


# --- what is saved and what is run ----------------------------------------------------------------


def saved_bytes(sharded: Sharded) -> int:
    """What autograd holds in memory after a forward, parameters aside."""
    model = sharded.model
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage())._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, *my_batch(0))
    loss.backward()
    return sum(saved.values())


def test_only_the_inputs_of_units_are_saved_and_on_a_tier_not_even_those():
    def kind() -> nn.Module:
        return Stack(*(Block(24) for _ in range(8)))

    saved = {s: saved_bytes(shard(kind, s)) for s in ("keep", "recompute", "cpu", "nvme")}
    one_input = 8 * 8 * 24 * 4
    assert saved["recompute"] == saved["cpu"] < saved["keep"] / 5
    assert saved["recompute"] - saved["nvme"] == 8 * one_input


def test_memory_of_inputs_is_free_after_forward():
    alive = {}
    for setting in ("recompute", "nvme"):
        sharded = shard(lambda: Stack(*(Block(24) for _ in range(6))), setting)
        outputs: list[StorageWeakRef] = []
        for block in sharded.model.blocks:
            block.register_forward_hook(
                lambda module, args, output, outputs=outputs: outputs.append(
                    StorageWeakRef(output.untyped_storage())
                )
            )
        loss = loss_of(sharded.model, *my_batch(0))
        alive[setting] = [not output.expired() for output in outputs]
        loss.backward()
    assert alive["recompute"] == [True] * 6
    assert alive["nvme"] == [False] * 5 + [True]  # the last one is the head's, which is the root's


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("name", "calls"),
    [("dropout", 4), ("nested units", 6), ("the model's own checkpoints", 3)],
)
def test_forward_runs_once_more_and_not_more_often(name, calls, setting, monkeypatch):
    runs = count_runs(monkeypatch)
    kind, changes = KINDS[name]
    sharded = shard(kind, setting, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = loss_of(sharded.model, *my_batch(0))
    assert runs[0] == calls
    loss.backward()
    assert runs[0] == 2 * calls
    assert sharded.activations.moved.recomputed_by_model == (2 if "own" in name else 0)


def test_nothing_is_recomputed_or_moved_without_gradients(monkeypatch):
    runs = count_runs(monkeypatch)
    sharded = shard(dropping, "nvme")
    with torch.no_grad():
        sharded.model(my_batch(0)[0])
    sharded.model.eval()
    with torch.inference_mode():
        sharded.model(my_batch(0)[0])
    assert runs[0] == 8
    assert not sharded.store.asked


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs, forward = [0], Block.forward

    def counting(self: Block, x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", counting)
    return runs


def test_arguments_that_forward_changes_are_changed_once():
    sharded = shard(AwkwardStack, "recompute")
    train(sharded, steps=1)
    assert sharded.model.log == [0, 1, 2]


# --- on a tier ------------------------------------------------------------------------------------


def test_inputs_of_the_next_unit_are_read_while_a_unit_goes_backward(monkeypatch):
    store, forward = FakeStore(), Block.forward
    asked = store.asked
    monkeypatch.setattr(
        Block, "forward", lambda self, x: asked.append(("run", self)) or forward(self, x)
    )
    sharded = shard(lambda: Stack(*(Block(24) for _ in range(6))), "nvme", store=store)
    loss = loss_of(sharded.model, *my_batch(0))
    records = [record for verb, record in asked if verb == "put"]
    assert len(records) == 6
    asked.clear()
    loss.backward()
    blocks = list(sharded.model.blocks)
    # The last inputs are in their buffers still; the others come one unit early, in reverse order.
    assert asked == [
        ("run", blocks[5]),
        ("get", records[3]),
        ("run", blocks[4]),
        ("get", records[2]),
        ("run", blocks[3]),
        ("get", records[1]),
        ("run", blocks[2]),
        ("get", records[0]),
        ("run", blocks[1]),
        ("run", blocks[0]),
    ]
    moved = sharded.activations.moved
    assert moved.num_reads == 4
    assert moved.late_reads == 0
    assert moved.in_bytes == 4 * records[0].nbytes
    assert moved.out_bytes == 6 * records[0].nbytes


def test_reads_that_could_not_come_early_are_counted():
    sharded = shard(lambda: Stack(*(Block(24) for _ in range(6))), "nvme")
    loss = loss_of(sharded.model, *my_batch(0))
    loss.backward(retain_graph=True)
    before = sharded.activations.moved.late_reads
    loss.backward()
    assert sharded.activations.moved.late_reads > before


def test_records_and_buffers_are_used_again_from_step_to_step():
    sharded = shard(lambda: Stack(*(Block(24) for _ in range(6))), "nvme")
    train(sharded, steps=1)
    held, peak = sharded.store.held_bytes, sharded.pool.peak_bytes
    assert len(sharded.store.kept) == 6
    train(sharded, steps=3, micro_batches=2)
    assert (sharded.store.held_bytes, sharded.pool.peak_bytes) == (held, peak)
    assert peak <= 3 * (held // 6)  # not one for every unit


def test_a_tensor_of_several_units_is_stored_and_read_once():
    sharded = shard(Pairs, "nvme")
    train(sharded, steps=1)
    puts = sum(verb == "put" for verb, _ in sharded.store.asked)
    assert puts == 5 + 1
    assert sharded.activations.moved.num_reads == puts - IN_FLIGHT


def test_small_tensors_parameters_and_views_of_them_stay_in_memory():
    class Views(Stack):
        def __init__(self) -> None:
            super().__init__(*(Pair(24) for _ in range(3)))
            self.scale = nn.Parameter(torch.ones(8, 8, 48))

        def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return block(
                x,
                self.scale[..., :24]
                if block is self.blocks[0]
                else self.scale.view(-1)[: 8 * 8 * 24].view(8, 8, 24),
            )

    sharded = shard(Views, "nvme")
    train(sharded, steps=1, updates=False)
    assert sum(verb == "put" for verb, _ in sharded.store.asked) == 3
    sharded = shard(Views, "nvme", small=8 * 8 * 24 * 4 + 1)
    train(sharded, steps=1)
    assert not sharded.store.asked


def test_the_layout_of_a_tensor_comes_back():
    seen = []

    class Strided(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.shape, x.stride()))
            return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)

    sharded = shard(lambda: Stack(*(Strided(24) for _ in range(4))), "nvme")
    train(sharded, steps=1)
    assert len(set(seen)) == 2
    assert seen[4:] == seen[:4][::-1]
    assert sum(verb == "put" for verb, _ in sharded.store.asked) == 4


def test_a_unit_that_writes_into_its_input_is_recomputed_from_what_it_got():
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += super().forward(x.clone())
            return x

    def kind() -> nn.Module:
        return Stack(*(InPlace(24) for _ in range(3)))

    sharded = shard(kind, "nvme")
    train(sharded, updates=False).assert_equals(train_plain(kind))
    small = shard(kind, "nvme", small=1 << 20)
    with pytest.raises(UsageError, match="written in place after its unit's forward"):
        train(small)


# --- passes that do not end -----------------------------------------------------------------------


class Failing(Block):
    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.where == "forward":
            raise RuntimeError("on purpose")
        if self.where == "backward" and x.requires_grad:
            x.register_hook(_raise)
        return x


def _raise(grad: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def failing() -> nn.Module:
    return Stack(*(Failing(24) for _ in range(6)))


@pytest.mark.parametrize("setting", ["recompute", "nvme"])
@pytest.mark.parametrize("where", ["forward", "backward", "no backward"])
def test_an_interrupted_pass_leaves_nothing_and_the_next_one_is_right(where, setting):
    sharded = shard(failing, setting)
    train(sharded, steps=1, updates=False)
    held = sharded.store.held_bytes
    block = sharded.model.blocks[3]
    block.where = where
    if where == "no backward":
        loss_of(sharded.model, *my_batch(0))
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_of(sharded.model, *my_batch(0)).backward()
    block.where = ""
    gc.collect()
    assert sharded.activations.num_resting == 0
    if setting == "nvme":
        assert sharded.lent_bytes == 0
    sharded.optimizer.zero_grad()
    train(sharded, updates=False).assert_equals(train_plain(failing))
    assert sharded.store.held_bytes == held


def test_a_full_store_is_an_error_in_forward_that_leaves_nothing():
    sharded = shard(failing, "nvme", store=FakeStore(limit=3 * 8 * 8 * 24 * 4))
    with pytest.raises(TierError, match="no room for inputs of units"):
        loss_of(sharded.model, *my_batch(0))
    gc.collect()
    assert sharded.lent_bytes == 0
    sharded.store.limit = 1 << 30
    train(sharded, updates=False).assert_equals(train_plain(failing))


def test_a_store_that_cannot_be_read_is_an_error_in_backward():
    sharded = shard(failing, "nvme")
    loss = loss_of(sharded.model, *my_batch(0))
    sharded.store.fails_to_read = True
    with pytest.raises(TierError, match="the disk is gone"):
        loss.backward()
    sharded.store.fails_to_read = False
    del loss
    gc.collect()
    assert sharded.lent_bytes == 0


# --- what users see -------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_unshard_leaves_no_trace(setting):
    def kind() -> nn.Module:
        model = dropping()
        inner = model.blocks[1].forward
        model.blocks[1].forward = lambda x: inner(x)  # somebody else's
        return model

    sharded = shard(kind, setting)
    model = sharded.model
    mine = model.blocks[1].forward.__wrapped__
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(Dropping(24).forward)
    assert list(sw.state_dict(model)) == list(build(dropping).state_dict())
    with pytest.raises(ShardwiseError, match="copied"):
        copy.deepcopy(model.blocks[0].forward)
    train(sharded, steps=1)
    sw.unshard(model)
    assert model.blocks[1].forward is mine
    assert not any("forward" in m.__dict__ for m in model.modules() if m is not model.blocks[1])
    assert sharded.store.held_bytes == 0
    del model.blocks[1].forward
    pickle.loads(pickle.dumps(model))(my_batch(0)[0]).sum().backward()


def test_a_plan_with_activations_on_disk_needs_a_store():
    sharded = shard(dropping, "keep")
    runtime = runtime_of(sharded.model)
    runtime.plan = replace(runtime.plan, activations="nvme")
    with pytest.raises(UsageError, match=r"set tiers\.path"):
        recompute.install(runtime, None)


def test_checkpoints_of_the_model_keep_inputs_in_memory_and_it_says_so():
    sharded = shard(SelfMade, "nvme")
    with pytest.warns(UserWarning, match=r"Unit 'blocks.0' .* in memory instead of on tier nvme"):
        loss_of(sharded.model, *my_batch(0)).backward()
    assert sharded.activations.moved.recomputed_by_model == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        loss_of(sharded.model, *my_batch(1)).backward()


def test_second_derivatives_are_those_of_plain_pytorch():
    def penalty(model: nn.Module, backward: Callable[[torch.Tensor], None]) -> float:
        x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.square().mean() + slope.square().mean()
        backward(loss)
        return loss.item()

    def kind() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)))

    plain = build(kind)
    expected = penalty(plain, torch.Tensor.backward)
    for setting in SETTINGS:
        sharded = shard(kind, setting)
        assert penalty(sharded.model, torch.Tensor.backward) == expected
        for name, grad in sw.full_grads(sharded.model).items():
            torch.testing.assert_close(grad, plain.get_parameter(name).grad)
