"""Layers and losses in tiles, in one process: the same numbers as torch's own."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.core.topology import Topology
from shardwise.model.projection import Unread
from shardwise.model.tiling import Tile, embedding, linear
from shardwise.model.units import find_units
from shardwise.plans import presets
from shardwise.plans.plan import Override, Plan, StatePlan, Tiling

ROWS, WIDTH = 11, 6


def tiles_of(weight: torch.Tensor, height: int) -> list[Tile]:
    return [
        Tile(nn.Parameter(weight[start : start + height].clone()), start)
        for start in range(0, len(weight), height)
    ]


def grads_of(tiles: list[Tile]) -> torch.Tensor:
    return torch.cat([tile.weight.grad for tile in tiles])


def random(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


@settings(max_examples=30)
@given(height=st.integers(1, ROWS), bias=st.booleans(), seed=st.integers(0, 99))
def test_linear_layers(height, bias, seed):
    weight, x = random(ROWS, WIDTH, seed=seed), random(3, 2, WIDTH, seed=seed).requires_grad_()
    own = nn.Parameter(random(ROWS, seed=seed)) if bias else None
    tiles = tiles_of(weight, height)
    out = linear(tiles, x, own)
    whole, plain_x = nn.Parameter(weight), x.detach().clone().requires_grad_()
    plain_bias = nn.Parameter(own.detach()) if bias else None
    expected = F.linear(plain_x, whole, plain_bias)
    torch.testing.assert_close(out, expected)
    upstream = random(3, 2, ROWS, seed=seed + 1)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(grads_of(tiles), whole.grad)
    torch.testing.assert_close(x.grad, plain_x.grad)
    if bias:
        torch.testing.assert_close(own.grad, plain_bias.grad)


@settings(max_examples=30)
@given(height=st.integers(1, ROWS), padding=st.none() | st.integers(0, ROWS - 1), data=st.data())
def test_embeddings(height, padding, data):
    ids = torch.tensor(data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9)))
    weight = random(ROWS, WIDTH)
    weight[0] = float("inf")  # what a tile looks up for the entries of others must not matter
    tiles = tiles_of(weight, height)
    out = embedding(tiles, ids, padding)
    whole = nn.Parameter(weight)
    expected = F.embedding(ids, whole, padding)
    assert torch.equal(out, expected)
    upstream = random(len(ids), WIDTH)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(grads_of(tiles), whole.grad)


def test_indices_that_no_entry_has():
    tiles = tiles_of(random(ROWS, WIDTH), 4)
    for wrong in (-1, ROWS):
        with pytest.raises(IndexError, match="out of range"):
            embedding(tiles, torch.tensor([0, wrong]), None)
        unread = Unread.output(tiles, random(2, WIDTH), None)
        with pytest.raises(IndexError, match="out of bounds"):
            F.cross_entropy(unread, torch.tensor([0, wrong]))


class Projection:
    """An unread projection beside the same computed by torch."""

    def __init__(self, *lead: int, dtype=torch.float64, bias: bool = True) -> None:
        weight = random(ROWS, WIDTH, dtype=dtype)
        self.tiles = tiles_of(weight, 4)
        self.x = random(*lead, WIDTH, dtype=dtype).requires_grad_()
        self.bias = nn.Parameter(random(ROWS, dtype=dtype)) if bias else None
        self.plain_weight = nn.Parameter(weight)
        self.plain_x = self.x.detach().clone().requires_grad_()
        self.plain_bias = nn.Parameter(self.bias.detach()) if bias else None

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        unread = Unread.output(self.tiles, self.x, self.bias)
        return unread, F.linear(self.plain_x, self.plain_weight, self.plain_bias)

    def compare(self, run, **tolerance) -> None:
        """Runs the same on both, and compares results and gradients."""
        got, expected = (run(logits) for logits in self.both())
        torch.testing.assert_close(torch.as_tensor(got), expected, **tolerance)
        weights = random(*expected.shape, dtype=expected.dtype)
        (got * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(grads_of(self.tiles), self.plain_weight.grad, **tolerance)
        torch.testing.assert_close(self.x.grad, self.plain_x.grad, **tolerance)
        if self.bias is not None:
            torch.testing.assert_close(self.bias.grad, self.plain_bias.grad, **tolerance)


TARGETS = torch.tensor([3, 10, 0, -100, 7, 4])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 7}])
def test_cross_entropy(reduction, options):
    targets = TARGETS.clamp(min=0) if "ignore_index" in options else TARGETS
    case = Projection(6, bias="ignore_index" not in options)
    case.compare(lambda z: F.cross_entropy(z, targets, reduction=reduction, **options))


def test_the_loss_of_a_language_model_reads_no_logits(monkeypatch):
    case = Projection(2, 4, dtype=torch.bfloat16)
    targets = torch.tensor([[3, 10, 0, 1], [7, 4, 2, 2]])
    monkeypatch.setattr("shardwise.model.projection.linear", None)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        wide = logits.float()[..., :-1, :].contiguous()
        return nn.CrossEntropyLoss()(wide.view(-1, wide.size(-1)), targets[:, 1:].reshape(-1))

    case.compare(loss, rtol=2e-2, atol=2e-3)


def test_losses_that_need_logits_read_them():
    class_weights = random(ROWS).abs()
    Projection(6).compare(lambda z: F.cross_entropy(z, TARGETS, weight=class_weights))
    soft = random(6, ROWS).softmax(-1)
    Projection(6).compare(lambda z: F.cross_entropy(z, soft))


@pytest.mark.parametrize(
    "run",
    [
        lambda z: z * 2,
        lambda z: z.view(6, ROWS)[:, 2:5],
        lambda z: z[0, ..., 1],
        lambda z: z.transpose(1, 2).contiguous(),
        lambda z: torch.stack([z, z]),
        lambda z: z.flatten(),
        lambda z: z[torch.tensor([0, 1])].logsumexp(-1),
        lambda z: z.to(torch.float32).log_softmax(-1),
        lambda z: z[1].unsqueeze(0).clone(),
    ],
)
def test_reading_gives_values_and_gradients(run):
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    Projection(2, 3).compare(run, **tolerance)


def test_an_unread_projection_knows_its_shape():
    unread, expected = Projection(2, 3).both()
    for logits in (unread, unread.float().double()):
        assert type(logits) is Unread
        assert (logits.shape, logits.dtype) == (expected.shape, expected.dtype)
        assert logits.requires_grad
        assert logits.size(-1) == ROWS
    assert type(unread.view(-1, ROWS)) is Unread
    assert unread[:, :-1].shape == (2, 2, ROWS)
    assert type(unread[:, :-1]) is Unread


def test_autocast_is_as_it_was_in_the_layer():
    case = Projection(6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        unread, expected = case.both()
    assert unread.dtype == expected.dtype == torch.bfloat16
    got, wanted = (F.cross_entropy(z.float(), TARGETS) for z in (unread, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    got.backward()
    wanted.backward()
    torch.testing.assert_close(grads_of(case.tiles), case.plain_weight.grad, rtol=2e-2, atol=1e-2)


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros(6, ROWS, dtype=torch.float64)


def test_a_reader_that_nobody_sees_is_refused():
    unread, _ = Projection(6).both()
    with pytest.raises(UsageError, match=r"tiling\.loss = false"):
        _Hidden.apply(unread).backward()


def test_an_input_that_changes_is_noticed():
    case = Projection(6)
    x = case.x * 1
    unread = Unread.output(case.tiles, x, case.bias)
    rows = unread[:3]
    x.add_(1)
    for use in (lambda: unread + 1, lambda: F.cross_entropy(rows, TARGETS[:3]), lambda: unread[0]):
        with pytest.raises(UsageError, match="was changed in place"):
            use()


def test_changes_in_place_are_refused():
    unread, _ = Projection(6).both()

    def divide(logits: torch.Tensor) -> None:
        logits /= 2

    def mask(logits: torch.Tensor) -> None:
        logits[:, 0] = float("-inf")

    def replace_data(logits: torch.Tensor) -> None:
        logits.data = torch.zeros(6, ROWS)

    for change in (
        divide,
        mask,
        replace_data,
        lambda z: z.clamp_(0, 1),
        lambda z: z.register_hook(print),
        lambda z: z.retain_grad(),
    ):
        with pytest.raises(UsageError, match=r"tiling\.loss = false"):
            change(unread)
    assert (~(unread > 0)).shape == (6, ROWS)
    other = torch.zeros(6, ROWS, dtype=torch.float64)
    other += unread
    assert torch.isfinite(other).all()


# --- what is cut ----------------------------------------------------------------------------------

TWO = Topology.parse("node=2")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)) for _ in "ab")
        self.head = nn.Linear(8, 100)


def names(model: nn.Module, plan: Plan) -> list[str]:
    return [unit.name for unit in find_units(model, replace(plan, min_unit_numel=100), TWO)]


def tiling(numel: int, plan: Plan | None = None, **changes) -> Plan:
    return replace(plan or presets.zero3(), tiling=Tiling(numel=numel), **changes)


def test_units_of_tiles_follow_the_unit_that_they_were_cut_from():
    found = names(Model(), tiling(400))
    assert found == [
        "root",
        "embed/weight[0:50]", "embed/weight[50:100]",
        "layers.0", "layers.1",
        "head/weight[0:50]", "head/weight[50:100]",
    ]  # fmt: skip
    inner = names(Model(), tiling(128))
    assert [n for n in inner if n.startswith("layers.0")] == [
        "layers.0",
        "layers.0/0.weight[0:16]", "layers.0/0.weight[16:32]",
        "layers.0/1.weight[0:4]", "layers.0/1.weight[4:8]",
    ]  # fmt: skip


def test_what_is_not_cut():
    whole = names(Model(), tiling(0))
    assert names(Model(), tiling(400, presets.zero1())) == whole  # rests in full
    assert names(Model(), tiling(800)) == whole  # not larger

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight)

    model = Model()
    model.head = Own(8, 100)
    assert not any(name.startswith("head/") for name in names(model, tiling(400)))
    model = Model()
    model.embed = nn.Embedding(100, 8, max_norm=1.0)
    assert not any(name.startswith("embed/") for name in names(model, tiling(400)))


def test_overrides_of_a_unit_are_its_tiles_too():
    kept = Override(unit="layers.0", params=StatePlan(spread="none"))
    plan = tiling(128, overrides=(kept,))
    found = names(Model(), plan)
    assert not any(name.startswith("layers.0/") for name in found)
    assert any(name.startswith("layers.1/") for name in found)
    assert plan.for_unit("layers.0/0.weight[0:16]").params.spread == "none"
