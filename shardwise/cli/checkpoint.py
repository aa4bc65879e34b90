"""What `shardwise inspect` shows of a training checkpoint: contents, sizes, plan, integrity."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardwise.cli.common import largest_tensors, print_error, print_json
from shardwise.core.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.checkpoint.training.index import Index

_LARGEST = 5
_KINDS = {"model": "weights", "compute": "weights as computed with", "optim": "optimizer states"}
EXIT_DAMAGED = 1


def is_training_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint of `sw.save` or other programs, or a folder of them."""
    from shardwise.checkpoint.training import place
    from shardwise.core.errors import UsageError

    try:
        return place.is_checkpoint(place.find(path))
    except UsageError:
        return False


def inspect_checkpoint(path: Path, *, verify: bool, as_json: bool) -> None:
    """Show a checkpoint; with `verify` compare every byte of it."""
    from shardwise.checkpoint.training import place
    from shardwise.checkpoint.training.index import read_index
    from shardwise.checkpoint.training.verify import faults, total_bytes
    from shardwise.cli.bars import bytes_bar

    folder = place.find(path)
    found: list[str] | None = None
    if verify:
        with bytes_bar("verifying", total_bytes(folder), visible=not as_json) as progress:
            found = faults(folder, progress)
    if found:
        if as_json:
            print_json({"path": str(folder), "faults": found})
        for fault in [] if as_json else found:
            print_error(fault)
        if not as_json and (earlier := place.before(folder)) is not None:
            print_error(f"The checkpoint before it is '{earlier}'.")
        raise typer.Exit(EXIT_DAMAGED)
    answer = to_dict(folder, read_index(folder)) | ({"faults": found} if verify else {})
    if as_json:
        print_json(answer)
    else:
        _print(answer, verified=verify)


def to_dict(folder: Path, index: "Index") -> dict[str, Any]:
    """The result as plain data for JSON."""
    kinds: dict[str, dict[str, int]] = {}
    dtypes: dict[str, int] = {}
    for name, tensor in index.tensors.items():
        kind = _KINDS.get(name.partition(".")[0], "of each rank")
        counts = kinds.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0})
        counts["tensors"] += 1
        counts["elements"] += tensor.numel
        counts["bytes"] += tensor.num_bytes
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.num_bytes
    largest = sorted(index.tensors.items(), key=lambda item: (-item[1].num_bytes, item[0]))
    values = index.values
    return {
        "path": str(folder),
        "step": values.get("step"),
        "world": values.get("world"),
        "levels": values.get("levels"),
        "plan": values.get("plan"),
        "optimizer": values.get("optimizer"),
        "imported": values.get("imported"),
        "only_trained": bool(values.get("trained")),
        "files": [file.name for file in index.files],
        "bytes": sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file()),
        "contents": kinds,
        "dtypes": dtypes,
        "largest": [
            {
                "name": name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.num_bytes,
            }
            for name, tensor in largest[:_LARGEST]
        ],
    }


def _print(answer: dict[str, Any], *, verified: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    step = "" if answer["step"] is None else f", step {answer['step']}"
    table = Table(
        title=f"{escape(answer['path'])}: {format_bytes(answer['bytes'])}{step}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("contents", "tensors", "elements", "bytes"):
        table.add_column(name, justify="left" if name == "contents" else "right")
    for kind, counts in answer["contents"].items():
        amounts = str(counts["tensors"]), format_count(counts["elements"])
        table.add_row(kind, *amounts, format_bytes(counts["bytes"]))
    console.print(table)
    optimizer = f", {answer['optimizer']}" if answer["optimizer"] else ""
    if answer["imported"]:
        console.print(escape(f"imported from {answer['imported']}"))
    else:
        console.print(f"saved by {answer['world']} rank(s) ({answer['levels']}){optimizer}, under")
        console.print(escape(answer["plan"] or ""), highlight=False)
    console.print(largest_tensors(answer["largest"]))
    if verified:
        console.print("Every byte is as it was saved.")
