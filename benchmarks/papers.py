"""The simulator against the figures of three papers, measured on their own clusters.

    python benchmarks/papers.py                         # half a minute: groups A, B and C
    python benchmarks/papers.py --groups D              # the joint space: about a minute
    python benchmarks/papers.py --groups A,B,C,D --markdown --main   # the tables of docs/papers.md

Speeds come from the catalogue, which cites them; models, batches and placements are those of the
papers, and if they could not be read, a row or a group states the assumption. Nothing is fitted to
results. For DeepSpeed two bounds are shown, because how far it hides transfers is not published:
transfers hidden as in shardwise, and gathers not hidden at all (``prefetch=0``).
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from math import exp, log

from rich.console import Console
from rich.table import Table

from published import amsp, infinity, joint, zeropp
from published.rows import Group, Row

GROUPS = (*zeropp.GROUPS, *amsp.GROUPS, *infinity.GROUPS, *joint.GROUPS)


def mean_ratio(rows: Iterable[Row]) -> float | None:
    """The geometric mean of predicted over published."""
    logs = [log(row.ratio) for row in rows if row.ratio]
    return exp(sum(logs) / len(logs)) if logs else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", default="A,B,C", help="prefixes of their keys")
    parser.add_argument("--main", action="store_true", help="only the main rows")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    wanted = tuple(args.groups.split(","))
    found = {group: list(group.rows()) for group in GROUPS if group.key.startswith(wanted)}
    if args.json:
        rows = [
            {"group": group.key, **asdict(row), "ratio": row.ratio}
            for group, some in found.items()
            for row in some
        ]
        print(json.dumps(rows, indent=1))
        return
    for group, rows in found.items():
        # The summary covers all rows, even if only some are shown.
        shown = [row for row in rows if row.main or not args.main]
        (_print_markdown if args.markdown else _print)(group, shown, _summary(rows))


def _cells(row: Row) -> tuple[str, str, str, str]:
    published = f"{row.published:.3g} {row.unit}" if row.published is not None else ""
    ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
    return row.what, f"{row.predicted:.3g} {row.unit}".strip(), published.strip(), ratio


def _print(group: Group, rows: list[Row], summary: str) -> None:
    console = Console(highlight=False)
    table = Table("what", "predicted", "published", "ratio", title=f"{group.key}. {group.title}")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for text in (group.setup, summary, group.why):
        if text:
            console.print(text)
    console.print()


def _print_markdown(group: Group, rows: list[Row], summary: str) -> None:
    print(f"### {group.key}. {group.title}\n")
    if group.setup:
        print(f"{group.setup}\n")
    print("| what | predicted | published | ratio |\n|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(cell.replace("|", ", ") for cell in _cells(row)), "|")
    print()
    for text in (summary, group.why):
        if text:
            print(f"{text}\n")


def _summary(rows: list[Row]) -> str:
    """The mean ratio of each unit."""
    found = []
    for unit in dict.fromkeys(row.unit for row in rows):
        ratios = [row.ratio for row in rows if row.ratio and row.unit == unit]
        mean = mean_ratio(row for row in rows if row.unit == unit)
        if mean is not None and len(ratios) > 1:
            name = {"x": "speed-up", "": "share"}.get(unit, unit)
            found.append(
                f"{name} {mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} figures)"
            )
    return f"Predicted over published, geometric mean: {'; '.join(found)}." if found else ""


if __name__ == "__main__":
    main()
