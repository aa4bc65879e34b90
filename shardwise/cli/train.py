"""`shardwise train`: train a model on local workers and show the progress."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.common import JSON_OPTION, interruptible, print_json

if TYPE_CHECKING:
    from shardwise.train.config import TrainConfig
    from shardwise.train.metrics import Summary


def train(
    job: Annotated[
        Path | None, typer.Argument(help="A job as TOML; every option in it has a default.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="gpt-tiny ... gpt-xl, transformers:gpt2, or a config.json."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="stdlib, a text file, or a .bin or .npy token file.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="auto (default), a preset's name, or a plan's TOML file.")
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(help="A folder on a disk, for plans with states on tier nvme.")
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Grid of ranks, innermost first: node=2,world=2.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Local processes to start.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    output: Annotated[
        str | None, typer.Option(help="Directory for metrics (default: runs/<timestamp>).")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between two checkpoints (default: none are saved).")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on from a checkpoint's path, or from the run's latest one."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="How often to go on from the last checkpoint after a rank has failed."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other option of the job: --set optim.lr=1e-4."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole job as TOML and exit.")
    ] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Train a model; by default a small GPT on the sources of Python's standard library.

    By default the planner chooses the plan for this machine, which is probed once for that.

    Examples:

      shardwise train

      shardwise train --plan zero2 --model gpt-tiny --steps 200

      shardwise train --plan infinity --nvme /mnt/fast/scratch

      shardwise train --print-config > job.toml; shardwise train job.toml --set optim.lr=3e-4

      shardwise train --save-every 50 --output runs/mine --resume latest

      torchrun --nproc-per-node 2 -m shardwise train job.toml
    """
    from shardwise.train.config import load_config, parse_assignment

    named = {
        "model.name": model,
        "data.source": data,
        "plan": plan,
        "nvme": nvme,
        "levels": levels,
        "workers": workers,
        "train.steps": steps,
        "output": output,
        "train.save_every": save_every,
        "resume": resume,
        "max_restarts": max_restarts,
    }
    changes: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    changes.update(parse_assignment(text) for text in assignments or [])
    config = load_config(job, changes)
    if print_config:
        typer.echo(config.to_toml(), nl=False)
    else:
        _run(config, as_json)


def _run(config: "TrainConfig", as_json: bool) -> None:
    from shardwise.train import launch
    from shardwise.train.run import RESUME_LATEST, PreemptedError, prepare_output, run_training

    restarted = launch.restarts_of_torchrun() > 0
    if restarted and config.resume is None:
        config = config.model_copy(update={"resume": RESUME_LATEST})
    directory = prepare_output(config, restarted=restarted)
    try:
        with interruptible(f"; the run is in {directory}"):
            summary = run_training(config, directory)
    except PreemptedError as preempted:
        if launch.is_rank_zero():
            typer.echo(str(preempted), err=True)
        raise typer.Exit(preempted.exit_code) from None
    if not launch.is_rank_zero():
        return
    if as_json:
        print_json(summary.to_dict())
    else:
        _print_summary(summary)


def _print_summary(summary: "Summary") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from shardwise.core.sizes import format_bytes, format_count

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", f"{summary.model}, {format_count(summary.num_parameters)} parameters")
    table.add_row("plan", f"{summary.plan} on {summary.ranks} ranks")
    table.add_row("steps", f"{summary.steps} in {summary.seconds:.0f} s")
    if summary.predicted_step_s is not None:
        ratio = summary.predicted_step_s / summary.step_s
        table.add_row(
            "step time",
            f"{summary.step_s:.3f} s, predicted {summary.predicted_step_s:.3f} s "
            f"({ratio:.2f} of the measured time)",
        )
    table.add_row("loss", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}")
    table.add_row("validation loss", f"{summary.val_loss:.4f}")
    table.add_row("tokens/s", format_count(summary.tokens_per_s))
    table.add_row("peak memory per rank", ", ".join(map(format_bytes, summary.peak_rss_bytes)))
    table.add_row("metrics", summary.metrics)
    table.add_row("plan file", summary.plan_file)
    Console().print(table)
