"""The chart of a benchmark as SVG: a row per contender, a panel per rate.

Each panel has its own scale from zero, because rates differ by orders of magnitude; lengths compare
within a panel. The last panel shows bytes, with a mark at the prediction of `explain`.
"""

from collections.abc import Callable

from shardwise.bench.run import Result, Row
from shardwise.core.sizes import format_bytes
from shardwise.core.svg import ACCENT, FAINT, MARK, MUTED, RULE, TEXT, document, text

_LABEL_WIDTH, _PANEL_WIDTH, _GAP, _MARGIN = 130, 170, 22, 20
_VALUE_WIDTH = 62
"""Room to the right of the longest bar for its figure."""
_ROW_HEIGHT, _BAR_HEIGHT = 26, 16
_HEAD_HEIGHT, _FOOT_HEIGHT = 84, 66


def draw(result: Result) -> str:
    """The whole SVG document."""
    bench = result.bench
    names = [row.contender for row in result.rates[0].rows]
    num_panels = len(result.rates) + 1
    width = 2 * _MARGIN + _LABEL_WIDTH + num_panels * (_PANEL_WIDTH + _GAP) - _GAP
    height = _HEAD_HEIGHT + len(names) * _ROW_HEIGHT + _FOOT_HEIGHT
    title = f"{bench.model}, {bench.dtype}, {bench.nodes} nodes × {bench.ranks} ranks"
    parts = [
        text(_MARGIN, 28, title, size=16, weight="bold"),
        text(_MARGIN, 47, "Shorter is better; each panel has its own scale.", color=FAINT),
    ]
    for index, name in enumerate(names):
        is_peer = name in bench.peer_names
        color = FAINT if is_peer else TEXT
        weight = "normal" if is_peer else "bold"
        middle = _row_middle(index)
        x = _MARGIN + _LABEL_WIDTH - 10
        parts.append(text(x, middle + 4, name, anchor="end", color=color, weight=weight))
    for number, at in enumerate(result.rates):
        named = "unshaped link" if at.rate.bits_per_s is None else str(at.rate)
        parts += _panel(
            result,
            number,
            f"s/step, {named}",
            at.rows,
            _seconds,
            lambda row: f"{_seconds(row):.2f}",
        )
    parts += _panel(
        result, num_panels - 1, "sent per step and node", result.rates[0].rows, _sent,
        lambda row: format_bytes(_sent(row)), mark=_predicted,
    )  # fmt: skip
    foot = height - 34
    parts.append(f'<rect x="{_MARGIN}" y="{foot - 11}" width="3" height="14" fill="{MARK}"/>')
    parts.append(text(_MARGIN + 9, foot, "predicted by explain", color=FAINT, size=11))
    remarks = "; ".join(["times are medians of rounds", *result.remarks])
    parts.append(text(_MARGIN, foot + 18, remarks, color=FAINT, size=11))
    return document(width, height, parts)


def _panel(
    result: Result,
    number: int,
    title: str,
    rows: list[Row],
    value: Callable[[Row], float],
    label: Callable[[Row], str],
    mark: Callable[[Row], float | None] = lambda row: None,
) -> list[str]:
    left = _MARGIN + _LABEL_WIDTH + number * (_PANEL_WIDTH + _GAP)
    values = [value(row) for row in rows] + [mark(row) or 0.0 for row in rows]
    scale = (_PANEL_WIDTH - _VALUE_WIDTH) / (max(values) or 1.0)
    bottom = _HEAD_HEIGHT + len(rows) * _ROW_HEIGHT
    parts = [
        text(left, _HEAD_HEIGHT - 10, title, weight="bold"),
        f'<line x1="{left}" y1="{_HEAD_HEIGHT}" x2="{left}" y2="{bottom}" stroke="{RULE}"/>',
    ]
    for index, row in enumerate(rows):
        color = MUTED if row.contender in result.bench.peer_names else ACCENT
        middle = _row_middle(index)
        end = value(row) * scale
        parts.append(
            f'<rect x="{left}" y="{middle - _BAR_HEIGHT / 2:g}" width="{end:.1f}" '
            f'height="{_BAR_HEIGHT}" fill="{color}"/>'
        )
        if (predicted := mark(row)) is not None:
            parts.append(
                f'<rect x="{left + predicted * scale - 1.5:.1f}" '
                f'y="{middle - _BAR_HEIGHT / 2 - 3:g}" width="3" height="{_BAR_HEIGHT + 6}" '
                f'fill="{MARK}"/>'
            )
        furthest = max(end, (predicted or 0.0) * scale)
        parts.append(text(left + furthest + 6, middle + 4, label(row), size=12))
    return parts


def _seconds(row: Row) -> float:
    return row.median_s


def _sent(row: Row) -> float:
    return row.most_sent


def _predicted(row: Row) -> float | None:
    return row.predicted_bytes


def _row_middle(index: int) -> float:
    return _HEAD_HEIGHT + (index + 0.5) * _ROW_HEIGHT
