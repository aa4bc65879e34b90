"""`shardwise verify`: show that a plan trains to the same numbers as one plain process."""

from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import JSON_OPTION, interruptible, print_json

if TYPE_CHECKING:
    from shardwise.train.config import TrainConfig
    from shardwise.train.verify import Verdict


def verify(
    plan: Annotated[str, typer.Option(help="A preset's name or a plan's TOML file.")] = "zero3",
    model: Annotated[
        str, typer.Option(help="gpt-tiny ... gpt-xl, transformers:gpt2, or a config.json.")
    ] = "gpt-tiny",
    nvme: Annotated[
        str | None, typer.Option(help="A folder on a disk, for plans with states on tier nvme.")
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Grid of ranks, innermost first: node=2,world=2.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes (default: the ranks of --levels, or 2).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 5,
    dtype: Annotated[
        str, typer.Option(help="float64 judges every quantity, float32 fewer.")
    ] = "float64",
    global_batch: Annotated[
        int | None,
        typer.Option(help="Sequences per step (default: one per worker and micro-batch)."),
    ] = None,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = 32,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 for none.")] = 1.0,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative difference allowed for every quantity.")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Train a few steps sharded and in one plain process, and compare every number.

    The exit code is 1 when a difference exceeds its tolerance.

    Examples:

      shardwise verify

      shardwise verify --plan zero3 --levels node=2,world=2 --accumulation 2

      shardwise verify --plan plan.toml --model transformers:gpt2 --dtype float32 --json
    """
    from shardwise.train.config import load_config

    workers = workers or (_num_ranks(levels) if levels else 2)
    changes = {
        "plan": plan,
        "nvme": nvme,
        "levels": levels,
        "workers": workers,
        "model.name": model,
        "model.dtype": dtype,
        "optim.lr": lr,
        "optim.warmup_steps": 2,
        "train.steps": steps,
        "train.global_batch": global_batch or workers * accumulation,
        "train.accumulation": accumulation,
        "train.seq": seq,
        "train.clip": clip,
        "train.seed": seed,
    }
    config = load_config(None, {k: v for k, v in changes.items() if v is not None})
    _run(config, tolerance, as_json)


def _run(config: "TrainConfig", tolerance: float | None, as_json: bool) -> None:
    from shardwise.train.verify import verify as run_verify

    with interruptible():
        verdict = run_verify(config, tolerance)
    if as_json:
        print_json(verdict.to_dict())
    else:
        _print_verdict(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def _num_ranks(levels: str) -> int:
    """The number of ranks of a grid such as node=2,world=2; `shard` explains a wrong grid."""
    product = 1
    for level in levels.split(","):
        size = level.partition("=")[2].strip()
        product *= int(size) if size.isdigit() else 1
    return max(1, product)


def _print_verdict(verdict: "Verdict") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{verdict.plan} on {verdict.workers} ranks against one plain process: "
        f"{verdict.model}, {verdict.steps} steps, {verdict.dtype}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("", "difference", "worst at", "tolerance", ""):
        table.add_column(name, overflow="fold")
    for row in verdict.comparisons:
        judged = row.tolerance is not None
        mark = "[green]PASS[/]" if row.passed else "[bold red]FAIL[/]"
        table.add_row(
            row.quantity,
            f"{row.difference:.2e}",
            row.worst if row.difference else "",
            f"{row.tolerance:.0e}" if judged else "-",
            mark if judged else "[dim]not judged[/]",
        )
    console = Console()
    console.print(table)
    console.print("[bold green]PASS[/]" if verdict.passed else "[bold red]FAIL[/]")
