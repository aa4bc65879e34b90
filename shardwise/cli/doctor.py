"""`shardwise doctor`: what this machine offers, what is on its disks, and why a run failed."""

import os
import platform
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.common import JSON_OPTION, interruptible, print_json
from shardwise.core.errors import UsageError

if TYPE_CHECKING:
    from shardwise.tier.folder import Found


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="The folder of a run that failed, or one for the nvme tier (tiers.path in a plan)."
        ),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove run folders that ended runs left under PATH.")
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Measure the accelerators, and train on them briefly.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="What --gpu trains: gpt-tiny, gpt-mini, gpt-small ...")
    ] = "gpt-tiny",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file for the report of --gpu.")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show what this machine offers for training, the state of a disk, or why a run failed.

    For a run that failed it lines the ranks up: what each was doing, and for whom it waited.

    Examples:

      shardwise doctor

      shardwise doctor runs/20261119-120000

      shardwise doctor /mnt/nvme --clean

      shardwise doctor --gpu -o report.md
    """
    if gpu:
        from shardwise.bench.gpu.run import report_accelerators

        if path is not None or clean:
            raise UsageError("--gpu takes no folder; check the disk without it.")
        with interruptible():
            raise typer.Exit(report_accelerators(model, output, as_json=as_json))
    if output is not None:
        raise UsageError("-o writes the report of --gpu; give --gpu as well.")
    if clean and path is None:
        raise UsageError("--clean needs a folder: shardwise doctor PATH --clean.")
    if path is not None and not clean:
        from shardwise.cli.failures import find_failures, is_run, show_failure, show_none

        if failures := find_failures(path):
            show_failure(failures[-1], len(failures), as_json=as_json)
            return
        if is_run(path):
            show_none(path, as_json=as_json)
            return
        if not path.is_dir():
            raise UsageError(f"'{path}' is not a folder; give a run's, or one on a local disk.")
    answer: dict[str, Any] = {"machine": _machine()}
    if path is not None:
        from shardwise.tier.folder import check_folder, find_folders, remove_left_behind

        check_folder(path)
        removed = remove_left_behind(path) if clean else []
        answer["disk"] = _disk(path)
        answer["folders"] = [_describe(found) for found in find_folders(path)]
        answer["removed"] = [_describe(found) for found in removed]
    if as_json:
        print_json(answer)
    else:
        _print(answer)


def _machine() -> dict[str, Any]:
    import psutil
    import torch

    from shardwise.probing.matmul import has_bfloat16

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "accelerators": torch.accelerator.device_count(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_free_bytes": psutil.virtual_memory().available,
        "bfloat16_instructions": has_bfloat16(),
        "bench_cluster": _bench_cluster(),
    }


def _bench_cluster() -> str:
    """Whether clusters can be emulated here, or what is missing."""
    from shardwise.bench.cluster import ClusterError, check_machine

    try:
        check_machine()
    except ClusterError as error:
        return str(error)
    return "possible"


def _disk(path: Path) -> dict[str, Any]:
    from shardwise.tier.folder import file_system, try_direct

    facts = os.statvfs(path)
    obstacle = try_direct(path)
    return {
        "path": str(path),
        "file_system": file_system(path) or "unknown",
        "total_bytes": facts.f_blocks * facts.f_frsize,
        "free_bytes": facts.f_bavail * facts.f_frsize,
        "direct": not obstacle,
        "obstacle": obstacle,
    }


def _describe(found: "Found") -> dict[str, Any]:
    return {
        "path": str(found.path),
        "state": found.state,
        "pid": found.pid,
        "host": found.host,
        "rank": found.rank,
        "age_s": None if found.started is None else max(0.0, time.time() - found.started),
        "bytes": found.nbytes,
    }


def _print(answer: dict[str, Any]) -> None:
    from rich.console import Console

    from shardwise.core.sizes import format_bytes

    console = Console()
    machine = answer["machine"]
    free, total = format_bytes(machine["memory_free_bytes"]), format_bytes(machine["memory_bytes"])
    _print_facts(
        {
            "python, torch": f"{machine['python']}, {machine['torch']}",
            "platform": machine["platform"],
            "accelerators": str(machine["accelerators"]),
            "cores": str(machine["cores"]),
            "memory": f"{free} free of {total}",
            "bfloat16 instructions": _yes(machine["bfloat16_instructions"]),
            "bench cluster": machine["bench_cluster"],
        }
    )
    if "disk" not in answer:
        return
    disk = answer["disk"]
    free, total = format_bytes(disk["free_bytes"]), format_bytes(disk["total_bytes"])
    obstacle = f": {disk['obstacle']}" if disk["obstacle"] else ""
    _print_facts(
        {
            "path": disk["path"],
            "file system": f"{disk['file_system']}, {free} free of {total}",
            "direct I/O": _yes(disk["direct"]) + obstacle,
        }
    )
    _print_folders(answer["folders"])
    for folder in answer["removed"]:
        console.print(f"removed {folder['path']}", markup=False, highlight=False, soft_wrap=True)
    if not answer["removed"] and any(f["state"] == "left behind" for f in answer["folders"]):
        console.print("--clean removes folders left behind, and so does the next run on this path.")


def _print_facts(facts: dict[str, str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    Console().print(table)


def _print_folders(folders: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shardwise.core.sizes import format_bytes

    if not folders:
        Console().print("There are no run folders.")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("run folder", "state", "rank", "pid", "host", "age", "size"):
        table.add_column(name, overflow="fold")
    for folder in folders:
        known = folder["pid"] is not None
        texts = (
            Path(folder["path"]).name,
            folder["state"],
            str(folder["rank"]) if known else "",
            str(folder["pid"]) if known else "",
            folder["host"] if known else "",
            str(timedelta(seconds=round(folder["age_s"]))) if known else "",
            format_bytes(folder["bytes"]) if known else "",
        )
        table.add_row(*(Text(text) for text in texts))
    Console().print(table)


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"
