"""One traced step as a picture: when it computes, transfers, reads and writes.

    python benchmarks/overlap.py --disk FOLDER --batch 2 --trace step.json
    python benchmarks/timeline.py step.json docs/step.svg

Perfetto and Chrome open the trace itself; this draws the same events for a page.
"""

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

ROWS = {
    "compute": ("forward and backward", "#2f6db5"),
    "gather": ("gathers", "#7a5fb0"),
    "reduce": ("reductions", "#c77f2e"),
    "update": ("updates", "#3d8f5f"),
    "read": ("disk reads", "#5c6b7a"),
    "write": ("disk writes", "#b5485a"),
}
"""By the trace's tracks; for threads of a disk, by the first word of the event."""
LEFT, WIDTH, ROW, BAR, TOP, BOTTOM = 150, 900, 30, 18, 54, 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="One step with every state on the disk")
    args = parser.parse_args()
    args.picture.write_text(draw(json.loads(args.trace.read_text()), args.title), encoding="utf-8")


def draw(trace: Any, title: str) -> str:
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[tuple[float, float, str]]] = {row: [] for row in ROWS}
    for event in (event for event in events if event["ph"] == "X"):
        track = tracks[event["tid"]]
        row = event["name"].split()[0] if track.startswith("nvme") else track
        if row in spans:
            spans[row].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    begin = min(start for row in spans.values() for start, _, _ in row)
    end = max(stop for row in spans.values() for _, stop, _ in row)
    scale = WIDTH / (end - begin)
    total, height = LEFT + WIDTH + 40, TOP + ROW * len(ROWS) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" width="{total}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(20, 28, title, size=16, weight="bold"),
    ]
    for index, (row, (label, color)) in enumerate(ROWS.items()):
        y = TOP + index * ROW
        busy = _union(spans[row])
        parts.append(_text(LEFT - 12, y + BAR - 4, label, anchor="end"))
        parts.append(_rect(LEFT, y, WIDTH, BAR, "#f2f4f6"))
        for start, stop, name in spans[row]:
            x, width = LEFT + (start - begin) * scale, max((stop - start) * scale, 0.6)
            parts.append(_rect(x, y, width, BAR, color, name))
        share = f"{100 * busy / (end - begin):.0f} %"
        parts.append(_text(LEFT + WIDTH + 4, y + BAR - 4, share, size=10, color="#69717a"))
    seconds = (end - begin) / 1e6
    for tick in range(int(seconds / 0.5) + 1):
        x = LEFT + tick * 0.5e6 * scale
        parts.append(_text(x, height - 16, f"{tick * 0.5:g} s", size=11, color="#69717a"))
    return "\n".join([*parts, "</svg>\n"])


def _union(spans: list[tuple[float, float, str]]) -> float:
    """The time in which at least one of the spans runs: threads of a disk overlap."""
    total, reached = 0.0, float("-inf")
    for start, stop, _ in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _rect(x: float, y: float, width: float, height: float, color: str, name: str = "") -> str:
    title = f"<title>{escape(name)}</title>" if name else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{color}" '
        f'fill-opacity="0.8">{title}</rect>'
    )


def _text(
    x: float, y: float, text: str, *, size: int = 13, color: str = "#22272e",
    weight: str = "normal", anchor: str = "start",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    main()
