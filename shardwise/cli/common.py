"""What the commands share: how results and errors reach the user."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

EXIT_INTERRUPTED = 130
JSON_OPTION = typer.Option("--json", help="Print the result as JSON.")


def print_json(answer: Any) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(answer, indent=2))


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
