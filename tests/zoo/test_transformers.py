"""Unmodified transformers models, sharded, train and generate like one plain process."""

import dataclasses
import logging
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.model.deferred import recorder
from shardwise.model.inspect import find_members
from shardwise.model.units import unit_spec
from shardwise.plans.plan import Tiling
from shardwise.plans.presets import PRESETS
from shardwise.runtime.unit import State
from tests.harness import PRELOAD
from tests.models import largest_difference
from tests.zoo.configs import CASES, Batch, Case, batch, expand, loss_of, make, make_adapted

STEPS = 2
NODES = "node=2,world=2"
PRELOAD.append("tests.zoo.configs")

logging.getLogger("transformers").setLevel(logging.ERROR)


def plan_for(case: Case, preset: str = "zero3") -> sw.Plan:
    return dataclasses.replace(PRESETS[preset](), min_unit_numel=case.min_unit_numel)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def mine(whole: Batch) -> Batch:
    """This rank's slice of a global batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: tensor.chunk(world)[rank] for name, tensor in whole.items()}


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def reference(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final values of one plain process on the global batch."""
    torch.set_num_threads(1)
    model = make(CASES[name])
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        loss = loss_of(CASES[name], model, batch(CASES[name], step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("references")
    for name in CASES:
        torch.save(reference(name), where / f"{name}.pt")
    return str(where)


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(case, model, mine(batch(case, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


# --- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_found(name: str) -> None:
    case = CASES[name]
    model = make(case)
    root, *units = find_members(model, plan_for(case))
    assert [unit.name for unit in units] == expand(case.units)
    held = [p for unit in (root, *units) for p in unit.params.values()]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    assert 2 * sum(p.numel() for p in root.params.values()) < sum(p.numel() for p in held)


# --- training -------------------------------------------------------------------------------------


def compare_training(name: str, model: nn.Module, plan: sw.Plan, levels: str, where: str) -> None:
    """Shards a model, trains it, and compares it with the reference."""
    case = CASES[name]
    losses, values = torch.load(Path(where) / f"{name}.pt")
    loss_tolerance, tolerance = case.tolerances
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan=plan, levels=levels)
    trained = train(case, model, optimizer)
    got = sw.state_dict(model, rank0_only=False)
    stats = sw.stats(model)
    sw.unshard(model)
    assert trained == pytest.approx(losses, rel=0, abs=loss_tolerance)
    assert largest_difference(got, values) <= tolerance
    assert stats["extra_gathers"] == stats["late_reduces"] == stats["skipped_gathers"] == 0, stats


def check_training(name: str, preset: str, levels: str, where: str, tile: int = 0) -> None:
    case = CASES[name]
    model = make(case, seed=dist.get_rank())  # rank 0's values win
    plan = dataclasses.replace(plan_for(case, preset), tiling=Tiling(numel=tile))
    compare_training(name, model, plan, levels, where)


@pytest.mark.parametrize(
    ("preset", "name"),
    [("zero3", name) for name in CASES] + list(zip(cycle(["amsp", "hsdp"]), CASES, strict=False)),
)
def test_training_on_two_nodes_equals_one_process(preset, name, four, references):
    four.run(check_training, name, preset, NODES, references)


@pytest.mark.parametrize("name", CASES)
def test_training_in_tiles_on_two_ranks_equals_one_process(name, two, references):
    two.run(check_training, name, "zero3", "world=2", references, tile=1500)


def check_checkpointing(name: str, use_reentrant: bool, preset: str, where: str) -> None:
    case = CASES[name]
    model = make(case)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    compare_training(name, model, plan_for(case, preset), NODES, where)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    ("name", "presets"),
    [
        ("gpt2", ["zero3", "amsp"]),
        ("t5", ["amsp", "zero3"]),
        ("deberta_v2", ["zero3", "amsp"]),
        ("whisper", ["amsp", "zero3"]),
    ],
)
def test_gradient_checkpointing_does_not_change_training(
    name, presets, use_reentrant, four, references
):
    four.run(check_checkpointing, name, use_reentrant, presets[use_reentrant], references)


def check_gathered(name: str, checkpointing: str) -> None:
    """Never more than a few units are gathered at once, whatever a block takes and returns."""
    case = CASES[name]
    model = make(case, layers=6)
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan=plan_for(case), levels="world=2")
    runtime = runtime_of(model)
    peak = 0

    def count(_: object) -> None:
        nonlocal peak
        peak = max(peak, sum(unit.state is not State.RESTING for unit in runtime.units[1:]))

    runtime.observers.append(count)
    train(case, model, optimizer)
    assert all(unit.state is State.RESTING for unit in runtime.units)
    assert 1 <= peak <= 3 < len(runtime.units) - 1, peak
    sw.unshard(model)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "deberta_v2"])
def test_only_a_few_units_are_gathered_at_once(name, checkpointing, two):
    two.run(check_gathered, name, checkpointing)


def check_outside_embeddings(name: str, min_unit_numel: int, where: str) -> None:
    """Embeddings looked up by the user, as for soft prompts and multimodal inputs."""
    case = CASES[name]
    model = make(case)
    losses, values = torch.load(Path(where) / f"{name}.pt")
    optimizer = adamw(model)
    plan = dataclasses.replace(plan_for(case), min_unit_numel=min_unit_numel)
    sw.shard(model, optimizer, plan=plan, levels="world=2")
    for step in range(STEPS):
        given = mine(batch(case, step))
        embeds = model.get_input_embeddings()(given.pop("input_ids"))
        loss = loss_of(case, model, {"inputs_embeds": embeds, **given})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert mean_over_ranks(loss) == pytest.approx(losses[step], abs=case.tolerances[0])
    got = sw.state_dict(model, rank0_only=False)
    assert largest_difference(got, values) <= case.tolerances[1]
    sw.unshard(model)


@pytest.mark.parametrize(
    ("name", "min_unit_numel"), [("gpt2", 4000), ("llama", 4000), ("llama", 3000)]
)
def test_embeddings_may_be_looked_up_outside_forward(name, min_unit_numel, two, references):
    two.run(check_outside_embeddings, name, min_unit_numel, references)


# --- deferred initialisation ----------------------------------------------------------------------


def check_deferred(name: str) -> None:
    case = CASES[name]
    smallest, recorder.MIN_NUMEL = recorder.MIN_NUMEL, 64
    try:
        with sw.deferred_init():
            model = make(case, seed=dist.get_rank())
    finally:
        recorder.MIN_NUMEL = smallest
    assert any(parameter.is_meta for parameter in model.parameters())
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan=plan_for(case), levels="world=2")
    start = sw.state_dict(model, rank0_only=False)
    plain = make(case)
    compare_distributions(start, plain.state_dict())
    plain.load_state_dict(start)
    expected = loss_of(case, plain, batch(case, 0)).item()
    losses = train(case, model, optimizer)
    assert losses[0] == pytest.approx(expected, rel=0, abs=case.tolerances[0])
    assert losses[1] != losses[0]
    sw.unshard(model)


def compare_distributions(
    got: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], tolerance: float = 0.25
) -> None:
    """Constants are equal; random values have the spread that eager initialisation gives them."""
    assert got.keys() == eager.keys()
    for name, value in got.items():
        expected = eager[name]
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
        if expected.numel() < 2 or expected.std() == 0 or not expected.is_floating_point():
            assert torch.equal(value, expected), name
        elif expected.numel() >= 512:
            ratio = (value.std() / expected.std()).item()
            assert abs(ratio - 1) < tolerance, f"{name}: {ratio}"


@pytest.mark.parametrize("name", CASES)
def test_deferred_initialisation(name, two):
    two.run(check_deferred, name)


# --- generation -----------------------------------------------------------------------------------


def check_generation(name: str) -> None:
    case = CASES[name]
    plain, model = make(case).eval(), make(case).eval()
    whole = {n: t for n, t in batch(case, 0).items() if n != "labels"}
    inputs = mine(whole)
    options = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    expected = plain.generate(**inputs, **options)
    sw.shard(model, plan=plan_for(case), levels=NODES)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **options), expected)
    with sw.full_params(model):
        assert torch.equal(model.generate(**inputs, **options), expected)
        # No communication inside: ranks may go on for as long as they like.
        own = {**options, "max_new_tokens": 3 + dist.get_rank(), "min_new_tokens": 0}
        assert torch.equal(model.generate(**inputs, **own), plain.generate(**inputs, **own))
    assert torch.equal(model.generate(**inputs, **options), expected)
    sw.unshard(model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba", "mixtral", "t5", "bart", "whisper"])
def test_generation_equals_the_plain_model(name, four):
    four.run(check_generation, name)


# --- adapters -------------------------------------------------------------------------------------


def check_adapters(preset: str) -> None:
    case = CASES["llama"]
    world = dist.get_world_size()
    plain, model = make_adapted(), make_adapted()
    plan = plan_for(case, preset)
    members = find_members(model, plan)
    flats = unit_spec(members[1], world).flats
    assert {(f.dtype, f.requires_grad) for f in flats} == {("bfloat16", False), ("float32", True)}
    start = {n: p.clone() for n, p in plain.named_parameters()}
    trained = {n for n, p in plain.named_parameters() if p.requires_grad}
    expected_optimizer, optimizer = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in (plain, model)
    )
    sw.shard(model, optimizer, plan=plan, levels=NODES)
    for step in range(STEPS):
        whole = batch(case, step)
        total = 0.0
        for rank in range(world):  # sliced alike: bfloat16 rounds otherwise with other shapes
            loss = plain(**{n: t.chunk(world)[rank] for n, t in whole.items()}).loss / world
            loss.backward()
            total += loss.item()
        expected_optimizer.step()
        expected_optimizer.zero_grad()
        loss = model(**mine(whole)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert mean_over_ranks(loss) == pytest.approx(total, abs=1e-5)
    got = sw.state_dict(model, rank0_only=False)
    for name, value in plain.named_parameters():
        if name in trained:
            assert (got[name] - value).abs().max() <= 1e-5, name
            assert not torch.equal(got[name], start[name]), name
        else:
            assert torch.equal(got[name], start[name]), name
    sw.unshard(model)


@pytest.mark.parametrize("preset", ["zero3", "amsp", "hsdp"])
def test_float32_adapters_on_a_frozen_bfloat16_model(preset, four):
    four.run(check_adapters, preset)


# --- pretrained weights ---------------------------------------------------------------------------


def check_pretrained(where: str) -> None:
    """A new head is drawn on every rank: rank 0's wins, and the pretrained values are the file's."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = GPT2ForSequenceClassification.from_pretrained(where, num_labels=3)
    saved = GPT2LMHeadModel.from_pretrained(where).transformer.state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    heads: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heads, before["score.weight"])
    assert not torch.equal(heads[0], heads[1])

    optimizer = adamw(model)
    sw.shard(model, optimizer, plan=plan_for(CASES["gpt2"]), levels="world=2")
    start = sw.state_dict(model, rank0_only=False)
    assert torch.equal(start.pop("score.weight"), heads[0])
    assert largest_difference(
        {name.removeprefix("transformer."): value for name, value in start.items()}, saved
    ) == 0.0  # fmt: skip

    tokens, labels = batch(CASES["gpt2"], 0)["input_ids"], torch.tensor([0, 1, 2, 0])
    model(**mine({"input_ids": tokens, "labels": labels})).loss.backward()
    optimizer.step()
    values = sw.state_dict(model, rank0_only=False)
    again = f"{where}/trained"
    if rank == 0:
        model.save_pretrained(again, state_dict=values)
    dist.barrier()
    loaded = GPT2ForSequenceClassification.from_pretrained(again).state_dict()
    assert largest_difference(loaded, values) == 0.0
    sw.unshard(model)


def test_pretrained_round_trip(two, tmp_path):
    make(CASES["gpt2"], seed=5).float().save_pretrained(tmp_path)
    two.run(check_pretrained, str(tmp_path))
