"""Models by name, and the loss taken uniformly from what they return."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.core.errors import UsageError
from shardwise.model.gpt import SIZES
from shardwise.train.config import ConfigError, ModelConfig
from shardwise.train.models import build_model, context_of, count_parameters, loss_of, vocab_of

TINY_GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 64}


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt-tiny", 1), ("gpt-mini", 11), ("gpt-small", 51), ("gpt-base", 86)]
)
def test_sizes(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name))
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.05)


def test_the_built_in_model_learns_to_predict_the_next_token() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="gpt-tiny", num_layers=1, width=32, num_heads=2))
    rows = torch.arange(32).repeat(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss_of(model(input_ids=rows, labels=rows)).item()
    for _ in range(20):
        loss = loss_of(model(input_ids=rows, labels=rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first == pytest.approx(torch.log(torch.tensor(256.0)).item(), rel=0.05)
    assert loss.item() < first / 2


def test_it_sees_only_the_past() -> None:
    model = build_model(ModelConfig(name="gpt-tiny", num_layers=2, width=32, num_heads=2))
    rows = torch.zeros(1, 8, dtype=torch.long)
    changed = rows.clone()
    changed[0, 5] = 1
    before, after = model(rows).logits, model(changed).logits
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_embeddings_are_tied() -> None:
    model = build_model(ModelConfig(name="gpt-tiny"))
    assert model.head.weight is model.tokens.weight


def test_fields_reshape_a_size() -> None:
    model = build_model(ModelConfig(name="gpt-tiny", vocab=300, context=64, dtype="float64"))
    assert (vocab_of(model), context_of(model)) == (300, 64)
    assert next(model.parameters()).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_a_transformers_config_file_or_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_GPT2))
    for path in (tmp_path, tmp_path / "config.json"):
        model = build_model(ModelConfig(name=str(path)), dropout=False).train()
        assert (vocab_of(model), context_of(model)) == (64, 1024)
        rows = torch.arange(16)[None]
        losses = {loss_of(model(input_ids=rows, labels=rows)).item() for _ in range(3)}
        assert len(losses) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gpt-tinny"}, "did you mean 'gpt-tiny'"),
        ({"name": "bert"}, ", ".join(SIZES)),
        ({"name": "transformers:nonsense"}, "no model type 'nonsense'"),
        ({"name": "no/such/config.json"}, "there is no file"),
        ({"name": "transformers:gpt2", "width": 8}, "model.width works with built-in sizes only"),
        ({"name": "gpt-tiny", "width": 65}, "not a multiple of 4 heads"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig.model_validate(options))


def test_the_loss_is_found_in_objects_and_tuples() -> None:
    loss = torch.tensor(2.0)
    assert loss_of(SimpleNamespace(loss=loss)) is loss
    assert loss_of((loss, None)) is loss
    with pytest.raises(UsageError, match="without a scalar loss"):
        loss_of(torch.zeros(3))
