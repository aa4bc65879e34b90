"""The whole trainer on real workers: metrics, summary, and the same losses on 1 and 2 ranks."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import UsageError
from shardwise.plans.file import load_plan
from shardwise.train.config import ConfigError, TrainConfig, load_config
from shardwise.train.launch import WorkerError
from shardwise.train.metrics import Summary
from shardwise.train.run import prepare_output, run_training

pytestmark = pytest.mark.timeout(240)
STEPS = 4


def job(tmp_path: Path, **changes: Any) -> TrainConfig:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    options = {
        "plan": "zero3",
        "data.source": str(text),
        "model.name": "gpt-tiny",
        "model.num_layers": 2,
        "model.width": 32,
        "model.num_heads": 2,
        "train.steps": STEPS,
        "train.global_batch": 8,
        "train.accumulation": 2,
        "train.seq": 24,
        "train.eval_every": 2,
        "train.eval_batches": 2,
        "optim.lr": 1e-2,
        "optim.warmup_steps": 1,
        "output": str(tmp_path / "run"),
    }
    return load_config(None, options | changes)


def run(config: TrainConfig) -> tuple[Summary, list[dict[str, Any]]]:
    summary = run_training(config, prepare_output(config))
    lines = Path(summary.metrics).read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


Run = tuple[Summary, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """The same job on one rank and on two."""
    return {n: run(job(tmp_path_factory.mktemp(f"loop{n}"), workers=n)) for n in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_and_summary(runs: dict[int, Run], ranks: int) -> None:
    summary, records = runs[ranks]
    assert load_plan(summary.plan_file) == load_plan("zero3")
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "step_s", "rss_bytes"}
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(keys | {"peak_rss_bytes"} <= record.keys() for record in records)
    assert [record["step"] for record in records if "val_loss" in record] == [2, 4]
    assert all(record["grad_norm"] > 0 and record["step_s"] > 0 for record in records)
    assert records[-1]["loss"] < records[0]["loss"]
    assert summary.ranks == len(summary.peak_rss_bytes) == ranks
    assert summary.last_loss == records[-1]["loss"]
    assert summary.val_loss == records[-1]["val_loss"]
    directory = Path(summary.metrics).parent
    assert json.loads((directory / "summary.json").read_text()) == summary.to_dict()
    assert tomllib.loads((directory / "config.toml").read_text())["train"]["steps"] == STEPS


def test_the_number_of_ranks_changes_no_number(runs: dict[int, Run]) -> None:
    for one, two in zip(runs[1][1], runs[2][1], strict=True):
        for key in ("loss", "grad_norm", "val_loss", "lr"):
            assert two.get(key, 0.0) == pytest.approx(one.get(key, 0.0), rel=1e-5), key


def test_divergence_ends_the_run_and_keeps_the_metrics(tmp_path: Path) -> None:
    config = job(tmp_path, **{"optim.lr": 1e30, "train.steps": 50, "workers": 1})
    output = prepare_output(config)
    with pytest.raises(
        WorkerError, match=r"rank 0: the loss is \S+ at step \d+(: .*)?; lower optim.lr"
    ):
        run_training(config, output)
    assert (output / "metrics.jsonl").read_text()


def test_mistakes_that_only_a_worker_can_see(tmp_path: Path) -> None:
    config = job(tmp_path, **{"model.context": 16, "workers": 1})
    with pytest.raises(UsageError, match=r"train.seq = 24 exceeds the 16 positions of gpt-tiny"):
        run_training(config, prepare_output(config))


def test_a_plan_that_updates_in_backward_trains_without_clipping(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('preset = "infinity"\nmin_unit_numel = 500\n[tiers]\nupdate = "backward"\n')
    given = {"plan": str(plan), "nvme": str(tmp_path), "workers": 1}
    clipped = job(tmp_path, **given)
    with pytest.raises(UsageError, match=r"train\.clip = 1\.0 needs all gradients"):
        run_training(clipped, prepare_output(clipped))
    losses = []
    for name, changes in {"early": given, "plain": {"workers": 1}}.items():
        changes = changes | {"train.clip": 0.0, "output": str(tmp_path / name)}
        losses.append([record["loss"] for record in run(job(tmp_path, **changes))[1]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_mistakes_before_anything_starts(tmp_path: Path) -> None:
    config = job(tmp_path, workers=3)
    with pytest.raises(ConfigError, match="cannot be divided: 3 ranks"):
        run_training(config, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare_output(config)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_output(job(tmp_path, output=str(tmp_path / "file" / "run")))
