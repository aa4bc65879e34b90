"""Run a training job: choose its directory, start the workers, return the summary.

This module does not import torch; the workers do.
"""

import datetime
from pathlib import Path

from shardwise.train import launch
from shardwise.train.config import ConfigError, TrainConfig
from shardwise.train.metrics import METRICS_FILE, Summary

CONFIG_FILE = "config.toml"


def run_training(config: TrainConfig, output: Path) -> Summary:
    """Train on `config.workers` local processes, or as one rank of an outer torchrun."""
    if not launch.under_torchrun():
        config.batching(config.workers)  # before anything slow begins
    arguments = {"config": config.model_dump(mode="json"), "output": str(output)}
    answer = launch.run(
        "shardwise.train.loop:train_worker",
        arguments,
        workers=config.workers,
        logs=output,
        watching=launch.Watching(config.timeout_s, config.patience_s),
    )
    return Summary(**answer)


def prepare_output(config: TrainConfig) -> Path:
    """Create the run's directory and write the job into it; raise if it holds another run."""
    output = Path(config.output) if config.output else _fresh_directory(Path("runs"))
    if not launch.is_rank_zero():
        return output  # rank 0 of the outer torchrun does it for all
    if (output / METRICS_FILE).exists():
        raise ConfigError(f"output: {output} already holds a run; choose another directory")
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / CONFIG_FILE).write_text(config.to_toml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: {output} cannot be written: {error.strerror}") from None
    return output


def _fresh_directory(parent: Path) -> Path:
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    candidates = [parent / stamp, *(parent / f"{stamp}-{n}" for n in range(2, 100))]
    return next(path for path in candidates if not path.exists())
