"""The facts of modules told without memory, and those by formulas: the two are equal."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.core.errors import PlanError
from shardwise.core.topology import Topology
from shardwise.model.facts import ModuleFacts
from shardwise.model.gpt import GPT, SIZES, GPTConfig
from shardwise.model.named import facts_of
from shardwise.plans import presets
from shardwise.plans.builtin import builtin
from shardwise.plans.plan import Plan, Precision, Tiling

GRID = Topology.parse("node=2,world=2")
ZERO3 = replace(presets.zero3(), min_unit_numel=1000)
HALF = replace(ZERO3, precision=Precision(compute="bfloat16"))
TILED = replace(HALF, tiling=Tiling(numel=5000))
PLANS = {
    "float32": ZERO3,
    "bfloat16": HALF,
    "tiled": TILED,
    "tiled but the loss": replace(TILED, tiling=Tiling(numel=5000, loss=False)),
    "units in units": replace(ZERO3, units=("*s.?", "*mlp*", "*head")),
    "tiled units in units": replace(TILED, units=("*s.?", "*mlp*", "*head")),
}


def _gpt() -> nn.Module:
    return GPT(GPTConfig(num_layers=2, width=64, num_heads=4, vocab=960, context=128))


def _llama(**changes: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 960,
    }
    config = transformers.LlamaConfig(**shape, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _tied_llama() -> nn.Module:
    return _llama(tie_word_embeddings=True)


MODELS = {
    "gpt:layers=2,width=64,heads=4,vocab=960,seq=128": _gpt,
    "llama:layers=2,width=64,heads=4,kv_heads=2,ffn=176,vocab=960": _llama,
    "llama:layers=2,width=64,heads=4,kv_heads=2,ffn=176,vocab=960,tied=1": _tied_llama,
}


@pytest.fixture(scope="module")
def measured() -> Callable[[str], ModuleFacts]:
    found: dict[str, ModuleFacts] = {}

    def facts(form: str) -> ModuleFacts:
        return found.setdefault(form, ModuleFacts(MODELS[form], name=form))

    return facts


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", MODELS)
def test_formulas_give_the_units_of_the_module(form: str, plan: str, measured):
    """Their names, parameters with shapes, layout, tiles and their order."""
    assert builtin(form).numel == measured(form).numel
    assert builtin(form).spec(PLANS[plan], GRID) == measured(form).spec(PLANS[plan], GRID)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", MODELS)
def test_formulas_give_the_operations_and_saved_bytes_of_the_module(form: str, plan: str, measured):
    """Every figure, to the byte. One sequence is a case for itself (views in place of copies)."""
    for micro_batch in (1, 2):
        by_formulas = builtin(form).work(micro_batch, 48, PLANS[plan])
        assert by_formulas == measured(form).work(micro_batch, 48, PLANS[plan])


@pytest.mark.parametrize("name", SIZES)
def test_built_in_sizes_are_those_that_train(name: str):
    """The table of the formulas, and that of the trainer."""
    plan = presets.zero3()
    facts = ModuleFacts(lambda: GPT(SIZES[name]), name=name)
    assert builtin(name).numel == facts.numel
    assert builtin(name).spec(plan, GRID) == facts.spec(plan, GRID)
    assert builtin(name).context == SIZES[name].context
    assert builtin(name).heads == SIZES[name].num_heads


@pytest.mark.parametrize(
    ("plan", "size"), [(ZERO3, 4), (ZERO3, 7), (TILED, 4)], ids=["whole", "larger", "tiled"]
)
def test_large_batches_are_extrapolated_exactly(plan: Plan, size: int):
    """Also beyond where inputs are small: a sequence's are 48 * 64 * 4 bytes."""

    def run(model: nn.Module, micro_batch: int, seq: int) -> object:
        tokens = torch.zeros(size, seq, dtype=torch.int64)  # this batch, whatever was asked for
        return model(tokens, labels=tokens)

    told, exact = ModuleFacts(_gpt).work(size, 48, plan), ModuleFacts(_gpt, run).work(1, 48, plan)
    assert told.saved == exact.saved
    assert told.forward_flops == exact.forward_flops
    assert told.tokens == size * 48
    assert (told.saved.largest_input > 0) == (size == 7)


def test_a_batch_is_run_once_however_often_it_is_asked_for():
    sizes = []

    def run(model: nn.Module, micro_batch: int, seq: int) -> object:
        sizes.append(micro_batch)
        return model(torch.zeros(micro_batch, seq, dtype=torch.int64))

    facts = ModuleFacts(_gpt, run)
    for micro_batch in (8, 64, 8, 3):
        facts.work(micro_batch, 16, ZERO3)
        facts.work(micro_batch, 16, replace(ZERO3, activations="recompute"))
    assert sizes == [2, 3]


class Vision(nn.Module):
    """No language model: frozen patches, blocks, and a batch that changes its way."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return (x.exp() if len(images) % 2 else x).sum()


def _look(model: nn.Module, micro_batch: int, seq: int) -> object:
    return model(torch.zeros(micro_batch, 3, seq, seq))


def test_any_module_with_a_forward_of_its_own():
    facts = ModuleFacts(Vision, _look)
    work = facts.work(2, 32, ZERO3)
    tokens, products = 2 * 16, 4 * 64 * 64 + 2 * 64 * 128
    patches = 2 * tokens * 64 * 3 * 8 * 8
    assert work.forward_flops["patches"] == patches
    assert work.forward_flops["blocks.0"] > 2 * tokens * products
    frozen = [unit for unit in facts.spec(ZERO3, GRID).units if unit.name == "patches"]
    assert [flat.requires_grad for unit in frozen for flat in unit.flats] == [False]


def test_where_two_runs_differ_the_batch_itself_is_run():
    sizes = []

    def run(model: nn.Module, micro_batch: int, seq: int) -> object:
        sizes.append(micro_batch)
        return _look(model, micro_batch, seq)

    odd = ModuleFacts(Vision, run).work(5, 32, ZERO3)
    assert sizes == [2, 3, 5]
    assert odd.saved.root == 5 * 16 * 64 * 4  # what exp makes of the patches


class Experts(nn.Module):
    """Each expert computes the tokens that chose it: how many, only their values say."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).flatten(0, 1)
        chosen = x[:, :2].argmax(-1)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            x = x.index_add(0, rows, expert(x[rows]))
        return x.sum()


def test_what_depends_on_values_is_told():
    facts = ModuleFacts(Experts, name="moe")
    with pytest.raises(PlanError, match=r"computes depends on its values.*plan with a dense model"):
        facts.work(2, 16, ZERO3)


def test_a_forward_that_fails_is_told_in_a_sentence():
    with pytest.raises(PlanError, match="of gpt on 1 sequences of 500 tokens failed on fake"):
        ModuleFacts(_gpt, name="gpt").work(1, 500, ZERO3)


class Grouped(nn.Module):
    """Experts in one product, for which fake tensors know bfloat16 only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
        return F.grouped_mm(x.to(self.weight.dtype), self.weight, offs=ends).sum()


def _route(model: nn.Module, micro_batch: int, seq: int) -> object:
    return model(torch.zeros(micro_batch * seq, 32))


def test_experts_multiply_the_rows_that_they_get():
    """torch's own counter leaves grouped products out."""
    flops = ModuleFacts(Grouped, _route).work(2, 16, HALF).forward_flops
    assert flops == {"root": 2 * 32 * 32 * 64}


def test_an_error_comes_without_a_log_of_stack_traces(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")  # which passes nothing on
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(PlanError, match="another compute dtype"):
            ModuleFacts(Grouped, _route).work(2, 16, ZERO3)
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.records
    assert not log.disabled


def test_facts_by_name(tmp_path: Path):
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    others = {"intermediate_size": 176, "num_key_value_heads": 2, "vocab_size": 960}
    file.write_text(json.dumps({"model_type": "llama", **shape, **others}))
    form = "llama:layers=2,width=64,heads=4,kv_heads=2,ffn=176,vocab=960"
    assert facts_of(str(file)).spec(ZERO3, GRID) == facts_of(form).spec(ZERO3, GRID)
    assert facts_of("transformers:gpt2").numel == 124_439_808
    assert facts_of("gpt-mini").numel == 11_139_072
    with pytest.raises(PlanError, match="did you mean 'llama3-8b'"):
        facts_of("llama3-8")
