"""The `shardwise` command: its subcommands, its version, and its exit codes.

Exit codes: 0 done, 1 a run failed, 2 a request cannot be carried out, 130 interrupted.
Imports no torch: each command imports what it needs when it is called.
"""

import importlib.metadata
import sys
from typing import Annotated, NoReturn

import typer

from shardwise.cli import bench
from shardwise.cli.common import print_error
from shardwise.cli.doctor import doctor
from shardwise.cli.explain import explain
from shardwise.cli.export import export
from shardwise.cli.import_ import import_
from shardwise.cli.inspect import inspect
from shardwise.cli.plan import plan
from shardwise.cli.probe import probe
from shardwise.cli.simulate import simulate
from shardwise.cli.train import train
from shardwise.cli.verify import verify
from shardwise.core.errors import ShardwiseError, SyncError

EXIT_FAILED = 1
EXIT_MISTAKE = 2

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(verify)
app.command()(explain)
app.command()(simulate)
app.command()(inspect)
app.command()(export)
app.command(name="import")(import_)
app.command()(plan)
app.command()(probe)
app.command()(doctor)
app.add_typer(bench.app, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        try:
            version = importlib.metadata.version("shardwise")
        except importlib.metadata.PackageNotFoundError:
            version = "(a source tree that is not installed)"
        typer.echo(f"shardwise {version}")
        raise typer.Exit


@app.callback()
def shardwise(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train PyTorch models whose states do not fit in the memory at hand.

    Try it: shardwise train
    """


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; a mistake is one sentence, never a stack trace."""
    try:
        app(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ShardwiseError as error:
        for sentence in str(error).splitlines():
            print_error(sentence)
        for line in getattr(error, "details", ()):
            typer.echo(line, err=True)
        failed = isinstance(error, SyncError)
        return getattr(error, "exit_code", EXIT_FAILED if failed else EXIT_MISTAKE)
    return 0


def main() -> NoReturn:
    """Entry point of the command and of `python -m shardwise`."""
    code = run()
    if "torch.distributed" in sys.modules:
        from shardwise.train.worker import leave

        leave(code)  # this process may itself have been a rank
    sys.exit(code)
