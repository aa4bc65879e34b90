"""`shardwise doctor RUN`: the report of a failure, and its ranks' flight recorders lined up."""

import json
from pathlib import Path
from typing import Any

import typer

from shardwise.cli.common import print_json
from shardwise.core.errors import UsageError
from shardwise.core.failure import name_ranks
from shardwise.core.flight import SUFFIX, read_folder
from shardwise.core.lineup import Row, conclusion, line_up
from shardwise.train.metrics import PLAN_FILE
from shardwise.train.run import CONFIG_FILE

_MOST_BESIDES = 2
"""Operations shown of one rank."""


def find_failures(path: Path) -> list[Path]:
    """The failures in a run's folder, the latest last; a failure's own folder is one as well."""
    if any(path.glob(f"*{SUFFIX}")):
        return [path]
    return sorted({file.parent for file in path.glob(f"failure-*/*{SUFFIX}")})


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run of `shardwise train`."""
    return (path / CONFIG_FILE).is_file() and (path / PLAN_FILE).is_file()


def show_none(path: Path, *, as_json: bool) -> None:
    """Say that nothing has failed in a run."""
    if as_json:
        print_json({"folder": str(path), "failures": 0})
    else:
        typer.echo(f"No failure was reported in {path}.")


def show_failure(folder: Path, number: int, *, as_json: bool) -> None:
    """Print the latest of a run's failures."""
    try:
        flights = read_folder(folder)
        report_file = folder / "report.json"
        report = json.loads(report_file.read_text("utf-8")) if report_file.exists() else None
    except (OSError, ValueError) as error:
        raise UsageError(f"The records in {folder} cannot be read: {error}.") from None
    failed = {cause["rank"] for cause in report["cause"]} if report is not None else set()
    rows = line_up(flights, report["wall_s"] if report is not None else None, failed)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "failures": number,
                "report": report,
                "ranks": [row.to_dict() for row in rows],
                "conclusion": conclusion(rows),
            }
        )
    else:
        _print(folder, number, report, rows)


def _print(folder: Path, number: int, report: dict[str, Any] | None, rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"{folder}" + (f" (the latest of {number} failures)" if number > 1 else ""))
    if report is not None:
        say(f"{report['time']}: {report['sentence']}.")
    failed = {cause["rank"] for cause in report["cause"]} if report is not None else set()
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "step", "was doing", "waited for", "behind"):
        table.add_column(name, overflow="fold")
    for row in rows:
        doing = [f"{title}, {for_s:.1f} s" for title, for_s in row.doing[:_MOST_BESIDES]]
        table.add_row(
            Text(f"{row.rank} failed" if row.rank in failed else str(row.rank)),
            Text(str(row.step)),
            Text("\n".join(doing) or f"last: {row.last or 'nothing known'}"),
            Text(name_ranks(row.waits_for) if row.waits_for else ""),
            Text(f"{row.behind} operations" if row.behind else ""),
        )
    console.print(table)
    say(conclusion(rows))
