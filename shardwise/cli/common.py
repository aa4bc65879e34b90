"""What the commands share: how results and errors reach the user."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.core.sizes import format_bytes

EXIT_INTERRUPTED = 130
JSON_OPTION = typer.Option("--json", help="Print the result as JSON.")


def print_json(answer: Any) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(answer, indent=2))


def largest_tensors(rows: Iterable[dict[str, Any]]) -> Table:
    """A table of tensors: each with its name, dtype, shape and bytes."""
    table = Table(title="Largest tensors", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("name", "dtype", "shape", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for row in rows:
        shape = " × ".join(map(str, row["shape"])) or "scalar"
        table.add_row(escape(row["name"]), row["dtype"], shape, format_bytes(row["bytes"]))
    return table


def print_error(sentence: str) -> None:
    """Print a sentence on standard error, without markup or wrapping."""
    console = Console(stderr=True, soft_wrap=True)
    # In one piece: under torchrun several ranks may have something to say.
    console.print(Text.assemble(("error: ", "bold red"), sentence), highlight=False)


@contextmanager
def interruptible(remark: str = "") -> Iterator[None]:
    """Turn Ctrl-C into one line and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        console = Console(stderr=True)
        if console.is_terminal:  # the worker may have been stopped while it drew the live bar
            console.show_cursor()
            console.print()
        print_error(f"interrupted{remark}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
