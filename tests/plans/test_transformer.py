"""Transformers by formulas: known sizes, names and forms, rules of units, without torch."""

import subprocess
import sys
from dataclasses import replace

import pytest

from shardwise.core.errors import PlanError
from shardwise.core.topology import Topology
from shardwise.plans import presets
from shardwise.plans.builtin import NAMES, builtin
from shardwise.plans.plan import Plan, Precision, StatePlan, Tiling

TWO = Topology.parse("node=2")
ZERO3 = presets.zero3()


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("gpt-125m", 125_226_240),
        ("gpt-13b", 12_853_386_240),
        ("gpt-175b", 174_604_259_328),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-30b", 32_528_943_616),
        ("llama-65b", 65_285_660_672),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_published_models_have_their_published_numbers_of_parameters(name: str, numel: int):
    assert builtin(name).numel == numel


@pytest.mark.parametrize("name", NAMES)
def test_units_have_every_parameter_once(name: str):
    model = builtin(name)
    spec = model.spec(ZERO3, TWO)
    params = [s.param.name for unit in spec.units for flat in unit.flats for s in flat.slots]
    assert len(set(params)) == len(params)
    assert spec.numel == model.numel


@pytest.mark.parametrize("name", ["gpt-6.7b", "gpt-175b", "llama-7b", "llama3-70b"])
def test_operations_are_two_for_each_token_and_parameter_and_attention(name: str):
    """Tables that are only looked up multiply nothing; a tied one is the head's as well."""
    model, tokens, seq = builtin(name), 2 * 2048, 2048
    looked_up = model.context * model.width if model.family == "gpt" else 0
    looked_up += 0 if model.tied else model.vocab * model.width
    attention = 4 * tokens * seq * model.width * model.layers
    expected = 2 * tokens * (model.numel - looked_up) + attention
    work = model.work(2, seq, ZERO3)
    assert work.tokens == tokens
    assert sum(work.forward_flops.values()) == pytest.approx(expected, rel=1e-3)  # norms, biases


def test_operations_belong_to_units():
    model = builtin("llama-7b")
    flops = model.work(1, 1024, ZERO3).forward_flops
    assert set(flops) == {unit.name for unit in model.spec(ZERO3, TWO).units}
    assert flops["lm_head"] == 2 * 1024 * model.vocab * model.width
    assert flops["model.embed_tokens"] == flops["root"] == 0
    assert len({flops[f"model.layers.{layer}"] for layer in range(32)}) == 1


def test_in_half_precision_half_as_much_is_saved_but_what_stays_wide():
    model = builtin("gpt-13b")
    wide, half = (
        model.work(4, 2048, replace(ZERO3, precision=Precision(compute=dtype)))
        for dtype in ("float32", "bfloat16")
    )
    assert (wide.dtype, half.dtype) == ("float32", "bfloat16")
    assert half.saved.checkpoints * 2 == wide.saved.checkpoints
    assert half.saved.largest_unit * 2 == pytest.approx(wide.saved.largest_unit, rel=0.01)
    assert half.saved.root * 2 > 1.5 * wide.saved.root  # scores of the loss are float32


def test_tiles_are_cut_where_parameters_travel():
    model = builtin("gpt:layers=2,width=256,heads=4,vocab=1000")
    tiled = replace(ZERO3, tiling=Tiling(numel=100_000))
    names = [unit.name for unit in model.spec(tiled, TWO).units]
    assert "blocks.1/mlp.up.weight[0:342]" in names
    assert "root/tokens.weight[0:334]" in names
    assert model.spec(tiled, Topology.parse("node=1")) == model.spec(
        ZERO3, Topology.parse("node=1")
    )
    kept = replace(tiled, params=StatePlan())
    assert model.spec(kept, TWO) == model.spec(ZERO3, TWO)


def test_without_a_topology_spreads_are_taken_to_cut():
    model = builtin("gpt:layers=2,width=256,heads=4,vocab=1000")
    tiled = replace(ZERO3, tiling=Tiling(numel=100_000))
    assert model.work(2, 64, tiled) == model.work(2, 64, tiled, TWO) != model.work(2, 64, ZERO3)
    alone = Topology.parse("node=1")
    assert model.work(2, 64, tiled, alone) == model.work(2, 64, ZERO3, alone)
    inside = replace(tiled, params=StatePlan(spread="rack:4"))  # a level that two ranks lack
    assert model.work(2, 64, inside) == model.work(2, 64, tiled)


def test_a_model_of_a_paper_can_be_written_down():
    model = builtin("gpt:layers=128,width=25600,heads=200,vocab=50257,seq=1024")
    assert model.numel == pytest.approx(1.01e12, rel=0.01)
    llama = builtin("llama:layers=2,width=4096,heads=32,kv_heads=8")
    assert (llama.ffn, llama.tied) == (11008, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-mnii", "no model 'gpt-mnii'; did you mean 'gpt-mini'"),
        ("gpt:layrs=3", "'layrs' in model 'gpt:layrs=3' is unknown; did you mean 'layers'"),
        ("gpt:kv_heads=3", "'kv_heads' in model 'gpt:kv_heads=3' is unknown"),
        ("llama:layers=x", "'layers=x' in model 'llama:layers=x' is not KEY=NUMBER"),
        ("gpt:layers=2,heads=4", "has no width; add width=NUMBER"),
        ("gpt:layers=2,width=100,heads=3", "width=100, which is not a multiple of heads=3"),
        ("gpt:layers=0,width=64,heads=4", "has layers=0; use 1 or more"),
    ],
)
def test_a_wrong_name_or_form_is_told_with_what_to_do(name: str, message: str):
    with pytest.raises(PlanError, match=message):
        builtin(name)


def test_sequences_longer_than_the_positions_are_refused():
    with pytest.raises(
        PlanError, match="2048 tokens exceed the 1024 positions of model 'gpt-mini'"
    ):
        builtin("gpt-mini").work(1, 2048, Plan())


def test_a_pattern_of_units_that_matches_nothing_is_told():
    with pytest.raises(PlanError, match=r"'layers\.\*' matches no module of model 'gpt-mini'"):
        builtin("gpt-mini").spec(replace(ZERO3, units=("layers.*",)), TWO)


def test_formulas_need_no_torch():
    script = (
        "import sys; from shardwise.model.named import facts_of; from shardwise.plans import presets;"
        "facts_of('llama3-405b').work(1, 4096, presets.zero3()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
