"""Metrics, progress and the learning-rate schedule."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwise.train.config import OptimConfig
from shardwise.train.metrics import MetricsWriter, StepRecord, peak_rss_bytes, rss_bytes
from shardwise.train.progress import reporter


def record(step: int, val_loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.5,
        lr=1e-3,
        grad_norm=0.5,
        tokens_per_s=1234.0,
        step_s=0.1,
        rss_bytes=400_000_000,
        peak_rss_bytes=500_000_000,
        val_loss=val_loss,
    )


def test_one_flat_line_a_step_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(record(1))
        metrics.write(record(2, val_loss=3.0))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert "val_loss" not in lines[0]
    assert lines[1]["val_loss"] == 3.0
    assert all(isinstance(value, (int, float)) for line in lines for value in line.values())


def test_other_ranks_write_nothing() -> None:
    with MetricsWriter(None) as metrics:
        metrics.write(record(1))


def test_memory_is_measured() -> None:
    assert 10_000_000 < rss_bytes() <= peak_rss_bytes()


def test_plain_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with reporter(500, visible=True, console=console) as progress:
        for step in range(1, 501):
            progress.show(record(step))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2  # the first step and the last; the rest came within one interval
    assert lines[0].startswith("step 1/500  loss 2.5000")
    assert "1.23k tokens/s" in lines[1]


def test_a_live_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with reporter(2, visible=True, console=console) as progress:
        progress.show(record(1))
        progress.show(record(2))
    assert "2/2" in console.file.getvalue()
    assert "loss 2.5000" in console.file.getvalue()


def test_invisible_reporters_are_silent() -> None:
    console = Console(file=io.StringIO())
    with reporter(2, visible=False, console=console) as progress:
        progress.show(record(1))
    assert console.file.getvalue() == ""


def test_the_schedule_warms_up_and_decays() -> None:
    from shardwise.train.loop import build_scheduler

    config = OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = build_scheduler(optimizer, config, steps=20)
    rates = []
    for _ in range(21):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == pytest.approx(0.1)
