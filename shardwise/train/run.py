"""Run a training job: choose its directory, start the workers, return the summary.

This module does not import torch; the workers do.
"""

import datetime
import sys
from pathlib import Path

from shardwise.core.errors import ShardwiseError
from shardwise.train import launch
from shardwise.train.config import ConfigError, TrainConfig, load_config
from shardwise.train.metrics import METRICS_FILE, Summary

CONFIG_FILE = "config.toml"
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its directory."""
RESUME_LATEST = "latest"


def run_training(config: TrainConfig, output: Path) -> Summary:
    """Train on `config.workers` local processes, or as one rank of an outer torchrun."""
    if not launch.under_torchrun():
        config.batching(config.workers)  # before anything slow begins
    restarts = launch.restarts_of_torchrun()
    while True:
        try:
            answer = launch.run(
                "shardwise.train.loop:train_worker",
                {
                    "config": config.model_dump(mode="json"),
                    "output": str(output),
                    "restarts": restarts,
                },
                workers=config.workers,
                logs=output,
                watching=launch.Watching(config.timeout_s, config.patience_s),
                forwards_sigterm=True,
            )
            break
        except launch.WorkerError as error:
            if error.is_final or restarts >= config.max_restarts or launch.under_torchrun():
                raise
            restarts += 1
            said = [f"error: {error}", *error.details]
            said.append(f"restart {restarts} of {config.max_restarts}, from the last checkpoint")
            print("\n".join(said), file=sys.stderr, flush=True)
            config = config.model_copy(update={"resume": RESUME_LATEST})
    if "preempted" in answer:
        raise PreemptedError(answer["preempted"], config.preempted_code)
    return Summary(**answer)


class PreemptedError(ShardwiseError):
    """The run was asked to end, and did after it had saved a checkpoint."""

    def __init__(self, checkpoint: str, exit_code: int) -> None:
        super().__init__(f"preempted: saved {checkpoint}; go on with --resume latest")
        self.exit_code = exit_code


def prepare_output(config: TrainConfig, *, restarted: bool = False) -> Path:
    """Create the run's directory and write the job into it; raise if it holds another run.

    If the job was ``restarted`` by torchrun, it is the directory that its first start made.
    """
    output = Path(config.output) if config.output else _default_directory(config, restarted)
    if not launch.is_rank_zero():
        return output  # rank 0 of the outer torchrun does it for all
    if config.max_restarts and not config.train.save_every:
        raise ConfigError(
            f"max_restarts = {config.max_restarts} needs checkpoints to go on from; set "
            "train.save_every (--save-every)"
        )
    holds_another = not _is_of(output, config) if restarted else (output / METRICS_FILE).exists()
    if holds_another and (restarted or config.resume is None):
        raise ConfigError(
            f"output: {output} already holds a run; choose another directory, or go on with "
            "--resume latest"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / CONFIG_FILE).write_text(config.to_toml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: {output} cannot be written: {error.strerror}") from None
    return output


def _is_of(output: Path, config: TrainConfig) -> bool:
    """Whether a directory is new, or that of this job. What torchrun starts anew may have been
    refused because of another run's directory: this one must not be taken for its own."""
    file = output / CONFIG_FILE
    if not file.exists():
        return not (output / METRICS_FILE).exists()
    try:
        return load_config(file, {"resume": None}) == config.model_copy(update={"resume": None})
    except ConfigError:
        return False


def _default_directory(config: TrainConfig, restarted: bool) -> Path:
    """A new directory; with `--resume latest` the newest run that has checkpoints."""
    runs = Path("runs")
    if restarted:
        begun = sorted(runs.glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
        return begun[-1].parent if begun else _fresh_directory(runs)
    if config.resume == RESUME_LATEST:
        found = sorted(runs.glob(f"*/{CHECKPOINTS}/*"), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1].parent.parent
    return _fresh_directory(runs)


def _fresh_directory(parent: Path) -> Path:
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    candidates = [parent / stamp, *(parent / f"{stamp}-{n}" for n in range(2, 100))]
    return next(path for path in candidates if not path.exists())
