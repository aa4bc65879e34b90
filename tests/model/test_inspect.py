"""Which units are found in models of different shapes, and who owns shared parameters."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise.core.errors import PlanError
from shardwise.core.topology import Topology
from shardwise.model.inspect import find_members
from shardwise.model.units import describe
from shardwise.plans import presets

PLAN = replace(presets.zero3(), min_unit_numel=100)


def mlp(dim: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class Block(nn.Module):
    """Attention and a feed-forward list whose layers must not be mistaken for blocks."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.attention = nn.Linear(dim, dim)
        self.mlp = mlp(dim)


class Stage(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.merge = nn.Linear(dim, dim)


class MixedBlock(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(8, experts)
        self.experts = nn.ModuleList(mlp() for _ in range(experts))


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def names(model: nn.Module, plan=PLAN) -> list[str]:
    root, *units = find_members(model, plan)
    held = [p for unit in (root, *units) for p in unit.params.values()]
    assert root.name == "root"
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    return [unit.name for unit in units]


def test_a_block_is_one_unit_whatever_lists_are_inside():
    assert names(Model([Block(), Block()])) == ["layers.0", "layers.1"]
    assert names(Model([MixedBlock(), MixedBlock()])) == ["layers.0", "layers.1"]


def test_stages_fall_apart_into_their_blocks():
    model = Model([Stage(8, 2), Stage(16, 3)])
    assert names(model) == [
        "layers.0.blocks.0",
        "layers.0.blocks.1",
        "layers.1.blocks.0",
        "layers.1.blocks.1",
        "layers.1.blocks.2",
    ]
    root = find_members(model, PLAN)[0]
    assert {name.rpartition(".")[0] for name in root.params} == {"layers.0.merge", "layers.1.merge"}
    model.layers[1].merge = nn.Linear(16, 24)
    assert names(model)[-1] == "layers.1.merge"


def test_sequences_of_sequences_fall_apart_too():
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_stage_of_small_blocks_stays_whole():
    plan = replace(PLAN, min_unit_numel=500)
    assert names(Model([Stage(8, 2), Stage(8, 2)]), plan) == ["layers.0", "layers.1"]


def test_a_stage_that_is_mostly_something_else_stays_whole():
    stage = Stage(8, 2)
    stage.merge = nn.Linear(32, 64)
    assert names(Model([stage])) == ["layers.0"]


def test_small_models_are_one_unit():
    assert names(Model([Block(), Block()]), presets.zero3()) == []


def test_heavy_leaves_beside_the_blocks_are_units_unless_tied():
    model = Model([Block(), Block()])
    model.embed = nn.Embedding(40, 8)
    model.head = nn.Linear(8, 40, bias=False)
    assert names(model) == ["layers.0", "layers.1", "embed", "head"]
    model.head.weight = model.embed.weight
    assert names(model) == ["layers.0", "layers.1"]
    assert list(find_members(model, PLAN)[0].params) == ["embed.weight"]


def test_a_parameter_of_two_blocks_belongs_to_the_root():
    first, second = Block(), Block()
    second.attention.weight = first.attention.weight
    model = Model([first, second])
    assert names(model) == ["layers.0", "layers.1"]
    assert list(find_members(model, PLAN)[0].params) == ["layers.0.attention.weight"]


def test_a_block_that_is_listed_twice_is_one_unit():
    block = Block()
    assert names(Model([block, Block(), block])) == ["layers.0", "layers.1"]


def test_named_units():
    model = Model([Block(), Block()])
    assert names(model, replace(PLAN, units=("layers.*.mlp",))) == ["layers.0.mlp", "layers.1.mlp"]
    with pytest.raises(PlanError, match=r"'blocks\.\*' matches no module"):
        names(model, replace(PLAN, units=("blocks.*",)))


def test_description_needs_no_memory_and_separates_dtypes_and_frozen_parameters():
    with torch.device("meta"):
        model = Model([Block(), Block()])
    model.layers[0].attention.bfloat16().requires_grad_(False)
    spec = describe(model, PLAN, Topology.parse("world=4"))
    assert spec.numel == sum(p.numel() for p in model.parameters())
    kinds = [(flat.dtype, flat.requires_grad) for flat in spec.units[1].flats]
    assert kinds == [("bfloat16", False), ("float32", True)]
