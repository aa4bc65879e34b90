"""The report of ``doctor --gpu``: parts that are measured one by one, each on its own.

A part that fails is in the report with its error as one line, and the next one is measured. The
report is plain data; a terminal, a program and a file get it in their own form.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.core.sizes import format_bytes
from shardwise.device.facts import first_line

Row = Mapping[str, Any]
Measure = Callable[[], Sequence[Row]]
_UNITS = {"_bytes": "", "_gb_s": ", GB/s", "_tflop_s": ", TFLOP/s", "_s": ", s"}
"""Ends of a column's name that are its unit; longer ones first."""
SLOW_S = 3.0
"""Parts that are expected to take longer are announced."""


@dataclass(frozen=True, slots=True)
class Part:
    """One table of the report."""

    title: str
    measure: Measure
    seconds: float = 0.0
    """How long it may take, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a part gave."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the part or one of its rows has an error, or something came out wrong."""
        return bool(self.error) or any(map(_is_wrong, self.rows))


def measure_all(parts: Sequence[Part], tell: Callable[[str], None]) -> Iterator[Found]:
    """The parts' results, as they come."""
    for number, part in enumerate(parts, start=1):
        if part.seconds >= SLOW_S:
            tell(f"{number}/{len(parts)}  {part.title} (up to {part.seconds:.0f} s) ...")
        begin = time.perf_counter()
        rows: list[dict[str, Any]] = []
        error = ""
        try:
            rows = [dict(row) for row in part.measure()]
        except Exception as raised:  # of any kind: the report goes on
            error = first_line(raised)
        yield Found(title=part.title, rows=rows, error=error, seconds=time.perf_counter() - begin)


def as_json(found: Sequence[Found]) -> dict[str, Any]:
    """The report for programs."""
    return {
        "failed": [part.title for part in found if part.failed],
        "parts": [asdict(part) for part in found],
    }


def as_markdown(found: Sequence[Found]) -> str:
    """The report as a file that can be sent."""
    lines = ["# shardwise doctor --gpu", "", _verdict(found), ""]
    for part in found:
        lines += [f"## {part.title}", ""]
        if part.error:
            lines += [f"failed: {part.error}", ""]
        if part.rows:
            columns = _columns(part.rows)
            lines.append("| " + " | ".join(map(_words, columns)) + " |")
            lines.append("|" + "---|" * len(columns))
            for row in part.rows:
                cells = (_cell(name, row).replace("|", "\\|") for name in columns)
                lines.append("| " + " | ".join(cells) + " |")
            lines.append("")
    data = json.dumps(as_json(found), indent=1, default=str)
    lines += ["<details><summary>as JSON</summary>", "", "```json", data, "```", "", "</details>"]
    return "\n".join(lines) + "\n"


def show(part: Found, console: Console) -> None:
    """One part on a terminal."""
    console.print(Text(part.title, style="bold"))
    if part.error:
        console.print(Text(f"  failed: {part.error}", style="red"), soft_wrap=True)
    if part.rows:
        columns = _columns(part.rows)
        table = Table(box=box.SIMPLE_HEAD)
        for name in columns:
            table.add_column(_words(name), overflow="fold", no_wrap=name == columns[0])
        for row in part.rows:
            cells = (Text(_cell(name, row)) for name in columns)
            table.add_row(*cells, style="red" if _is_wrong(row) else "")
        console.print(table)


def _is_wrong(row: Row) -> bool:
    return bool(row.get("error")) or row.get("right") is False


def _verdict(found: Sequence[Found]) -> str:
    bad = [part.title for part in found if part.failed]
    return f"Something is wrong in: {', '.join(bad)}." if bad else "Every part is as it should be."


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """All keys in the order of their first use; errors last."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return sorted(names, key=lambda name: name == "error")


def _words(name: str) -> str:
    for unit, written in _UNITS.items():
        if name.endswith(unit):
            return name.removesuffix(unit).replace("_", " ") + written
    return name.replace("_", " ")


def _cell(name: str, row: Row) -> str:
    value = row.get(name)
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return format_bytes(value)
    return _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return " ".join(_text(item) for item in value)
    return str(value)
