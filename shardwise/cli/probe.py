"""`shardwise probe`: measure this cluster for the planner, and write the result to a file."""

import tempfile
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.common import JSON_OPTION, interruptible, print_json
from shardwise.core.errors import UsageError


def probe(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .toml file to write the cluster to.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Local processes to start, as many as will train.")
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Grid of ranks, innermost first: node=2,world=2.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="A folder on a disk that is measured as well.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of compute, besides float32: float32, bfloat16, float16.")
    ] = "float32",
    quick: Annotated[
        bool, typer.Option("--quick", help="A trial run on tiny amounts; its figures mean little.")
    ] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Measure the links, compute, memory and disk of this cluster for the planner.

    All ranks measure at the same time, as they train. The result is stored in the user's cache
    folder, where plan="auto" on the same ranks finds it; -o also writes it to a file for
    shardwise plan. It takes about a minute.

    Examples:

      shardwise probe -o cluster.toml

      shardwise probe --workers 4 --levels node=2,world=2 --path /mnt/nvme

      torchrun --nnodes 2 --nproc-per-node 8 ... -m shardwise probe -o cluster.toml
    """
    from shardwise.core.topology import Topology
    from shardwise.probing.scope import check_dtype
    from shardwise.train import launch

    grid = Topology.parse(levels) if levels is not None else None
    check_dtype(dtype)
    if output is not None and launch.is_rank_zero():
        _check_output(output)
    if path is not None and not path.is_dir():
        raise UsageError(f"--path {path} is not a folder; give one on a local disk.")
    arguments = {
        "levels": levels,
        "dtype": dtype,
        "path": str(path.absolute()) if path is not None else None,
        "quick": quick,
        "visible": True,
    }
    count = workers or (grid.world if grid is not None else _default_workers())
    with interruptible():
        answer = launch.run("shardwise.probing.job:command", arguments, workers=count)
    if launch.is_rank_zero():
        _finish(answer, output, as_json)


def _finish(answer: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Write and show what was measured."""
    from shardwise.cost.file import parse_cluster

    written = [answer["stored"]] if answer["stored"] else []
    if output is not None:
        try:
            output.write_text(answer["cluster"], encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}.") from None
        written.insert(0, str(output))
    if as_json:
        print_json({"cluster": tomllib.loads(answer["cluster"]), "written": written})
        return
    from rich.console import Console

    from shardwise.probing.report import print_cluster

    console = Console(highlight=False)
    print_cluster(parse_cluster(answer["cluster"]), console)
    for file in written:
        console.print(f"written: {file}", markup=False, soft_wrap=True)


def _check_output(output: Path) -> None:
    """Raise if the file cannot be written, before a minute is spent on measuring."""
    if output.is_dir():
        raise UsageError(f"{output} is a folder; give the name of a .toml file, such as "
                         f"{output / 'cluster.toml'}.")  # fmt: skip
    try:
        if output.exists():
            output.open("r+").close()
        else:
            tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror}; give a file in a writable folder."
        ) from None


def _default_workers() -> int:
    from shardwise.train.config import TrainConfig

    return TrainConfig().workers
