"""`shardwise bench`: compare plans and peers, for now on an emulated cluster with slow links."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import JSON_OPTION, interruptible, print_json
from shardwise.core.errors import UsageError

if TYPE_CHECKING:
    from shardwise.bench.run import ClusterBench

DTYPES = ("bfloat16", "float32")

app = typer.Typer(no_args_is_help=True, help="Compare plans and peers in the same run.")


@app.callback()
def bench() -> None:
    """Compare plans and peers in the same run."""


@app.command()
def cluster(
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks per node.")] = 2,
    rate: Annotated[
        list[str] | None,
        typer.Option(help="Rate of each node's link: 200mbit, 1gbit, none; may be repeated."),
    ] = None,
    latency: Annotated[str, typer.Option(help="One-way, on every link: 0ms, 5ms.")] = "0ms",
    model: Annotated[str, typer.Option(help="gpt-tiny ... gpt-xl.")] = "gpt-small",
    seq: Annotated[
        int, typer.Option(min=2, help="Tokens per sequence; each rank computes one sequence.")
    ] = 128,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of compute and transfers: bfloat16 or float32; masters are float32."
        ),
    ] = "bfloat16",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn.")] = 2,
    warmup: Annotated[
        int, typer.Option(min=0, help="Untimed steps of each contender at each rate, run first.")
    ] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender at each rate.")] = 3,
    plans: Annotated[
        str, typer.Option(help="Presets or plan files, separated by commas.")
    ] = "zero3,hsdp,amsp",
    peers: Annotated[
        str, typer.Option(help="Some of fsdp2, hsdp, ddp, deepspeed, separated by commas, or ''.")
    ] = "fsdp2,hsdp,ddp,deepspeed",
    native_bf16: Annotated[
        bool,
        typer.Option(
            "--native-bf16", help="Let torch emulate bfloat16 where the CPU has none: 90x slower."
        ),
    ] = False,
    deepspeed_python: Annotated[
        str,
        typer.Option(help="Python interpreter with deepspeed and shardwise's dependencies."),
    ] = sys.executable,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the result (JSON) and a chart.")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Train on several emulated nodes with slow links, and count the bytes that cross them.

    Nodes are network namespaces joined by shaped links; ranks are processes that torchrun starts in
    them. Needs root, and `ip` and `tc` (iproute2). The namespaces are removed at the end.

    Examples:

      shardwise bench cluster --rate 200mbit --rate 50mbit --rate none

      shardwise bench cluster --nodes 4 --ranks 1 --plans zero3,amsp --peers fsdp2 --json
    """
    from shardwise.bench.cluster import Rate, check_machine, parse_latency_us

    rates = tuple(Rate.parse(text) for text in rate or ["200mbit"])
    latency_us = parse_latency_us(latency)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not supported here; use {' or '.join(DTYPES)}")
    check_machine()

    from shardwise.bench.run import ClusterBench
    from shardwise.probing.matmul import has_bfloat16

    chosen = ClusterBench(
        nodes=nodes,
        ranks=ranks,
        rates=rates,
        latency_us=latency_us,
        model=model,
        seq=seq,
        dtype=dtype,
        in_float32=dtype == "bfloat16" and not native_bf16 and not has_bfloat16(),
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        plans=_names(plans),
        peers=_names(peers),
        deepspeed_python=deepspeed_python,
    )
    _run(chosen, out, as_json)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _run(bench: "ClusterBench", out: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from shardwise.bench import report
    from shardwise.bench.run import run

    with interruptible("; the cluster is removed"), _progress() as tell:
        result = run(bench, tell)
    files = report.save(result, out) if out else []
    if as_json:
        print_json(report.to_dict(result))
        return
    console = Console(highlight=False)
    report.print_tables(result, console)
    for file in files:
        console.print(f"written: {file}", soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Progress on standard error: one updated line on a terminal, plain lines elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting ...") as status:
            yield status.update
    else:
        yield lambda text: console.print(text, markup=False, soft_wrap=True)
