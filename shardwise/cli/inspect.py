"""`shardwise inspect`: show what a safetensors file or folder contains, from its headers alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.checkpoint.folder import Source, read_source
from shardwise.cli.checkpoint import inspect_checkpoint, is_training_checkpoint
from shardwise.cli.common import JSON_OPTION, largest_tensors, print_json
from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes, format_count

_LARGEST = 5


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, a safetensors file, or a folder of either.")
    ],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare every byte of a checkpoint with its checksums."),
    ] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show what a checkpoint has, or safetensors files: tensors, parameters, bytes and dtypes.

    Examples:

      shardwise inspect checkpoints/step-1000 --verify

      shardwise inspect exported/

      shardwise inspect model.safetensors --json
    """
    if is_training_checkpoint(path):
        inspect_checkpoint(path, verify=verify, as_json=as_json)
        return
    if verify and path.exists():
        raise UsageError(
            f"'{path}' has no training checkpoint to verify; safetensors files have no checksums."
        )
    answer = to_dict(path, read_source(path))
    if as_json:
        print_json(answer)
    else:
        _print(answer)


def to_dict(path: Path, source: Source) -> dict[str, Any]:
    """The result as plain data for JSON."""
    infos = [stored.info for stored in source.tensors.values()]
    dtypes: dict[str, dict[str, int]] = {}
    for info in infos:
        counts = dtypes.setdefault(info.dtype, {"tensors": 0, "parameters": 0, "bytes": 0})
        counts["tensors"] += 1
        counts["parameters"] += info.numel
        counts["bytes"] += info.num_bytes
    largest = sorted(infos, key=lambda info: (-info.num_bytes, info.name))[:_LARGEST]
    return {
        "path": str(path),
        "files": [file.name for file in source.files],
        "tensors": len(infos),
        "parameters": sum(info.numel for info in infos),
        "bytes": sum(info.num_bytes for info in infos),
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1]["bytes"])),
        "largest": [
            {
                "name": info.name,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.num_bytes,
            }
            for info in largest
        ],
        "metadata": {k: v for header in source.files.values() for k, v in header.metadata.items()},
    }


def _print(answer: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"{escape(answer['path'])}: {len(answer['files'])} file(s)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("dtype", "tensors", "parameters", "bytes"):
        table.add_column(name, justify="left" if name == "dtype" else "right")
    for dtype, counts in [*answer["dtypes"].items(), ("total", answer)]:
        amounts = str(counts["tensors"]), format_count(counts["parameters"])
        table.add_row(dtype, *amounts, format_bytes(counts["bytes"]))
    console.print(table)
    console.print(largest_tensors(answer["largest"]))
