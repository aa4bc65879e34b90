"""Charts of plans as SVG, without a plotting library: what memory buys, and how a plan scales."""

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import UsageError
from shardwise.core.svg import (
    ACCENT,
    FAINT,
    GRID,
    LINES,
    MARK,
    MUTED,
    RULE,
    TEXT,
    document,
    dot,
    line,
    path,
    text,
)  # fmt: skip

Point = tuple[float, float]
FrontPoint = tuple[str, float, float, bool]
"""Label, bytes of memory per rank, seconds per step, whether it is the chosen plan."""

_WIDTH, _HEIGHT = 760, 440
_LEFT, _TOP, _BOTTOM = 76, 66, 58
_LABEL_SIZE, _LABEL_HEIGHT = 12, 16
_CHAR_WIDTH = 6.6
"""Approximate width of a character: SVG cannot measure text before it is drawn."""


def draw_front(points: Sequence[FrontPoint], title: str, limit_bytes: float) -> str:
    """Step time against memory per rank; the line joins plans that no other beats in both."""
    unit, name = _byte_unit(max([limit_bytes, *(memory for _, memory, _, _ in points)]))
    at = [(memory / unit, step_s) for _, memory, step_s, _ in points]
    limit = limit_bytes / unit
    plot = _Plot(
        x=_Axis.around([x for x, _ in at] + [limit]),
        y=_Axis.around([y for _, y in at]),
        right=40,
    )
    parts = plot.frame(title, f"memory per rank, {name}", "seconds per step")
    x = plot.px(limit)
    parts.append(line(x, _TOP, x, plot.bottom, color=MARK, dashed=True))
    words = f"limit {limit:.3g} {name}"
    parts.append(text(x, _TOP - 6, words, size=_LABEL_SIZE, color=MARK, anchor="middle"))
    front = _front(at)
    parts.append(path([plot.at(point) for point in _stairs(front)]))
    labels = _Labels(right=_WIDTH - 4, bottom=plot.bottom)
    labels.taken += [_Box(x - 2, _TOP, x + 2, plot.bottom)]
    labels.taken += [_around(plot.at(point), 6) for point in at]
    labels.taken += _boxes_of([plot.at(point) for point in _stairs(front)])
    # The chosen plan's label is placed first, then those of the front.
    order = sorted(range(len(at)), key=lambda i: (not points[i][3], at[i] not in front, at[i][0]))
    for index in reversed(order):
        chosen = points[index][3]
        color = MARK if chosen else ACCENT if at[index] in front else MUTED
        parts.append(dot(*plot.at(at[index]), radius=6.5 if chosen else 4.5, color=color))
    for index in order:
        label, _, _, chosen = points[index]
        color = TEXT if chosen or at[index] in front else FAINT
        parts.append(labels.place(plot.at(at[index]), label, color=color, bold=chosen))
    return document(_WIDTH, _HEIGHT, parts)


def draw_lines(
    series: Sequence[tuple[str, Sequence[Point]]],
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
) -> str:
    """Lines with markers; each line's name stands at its end."""
    series = [(name, sorted(points)) for name, points in series if points]
    xs = [x for _, points in series for x, _ in points]
    plot = _Plot(
        x=_Axis.log(xs) if log_x else _Axis.from_zero(xs),
        y=_Axis.from_zero([y for _, points in series for _, y in points]),
        right=32 + max((_label_width(name) for name, _ in series), default=0.0),
    )
    parts = plot.frame(title, x_label, y_label)
    ends = []
    for index, (name, points) in enumerate(series):
        color = LINES[index % len(LINES)]
        spots = [plot.at(point) for point in points]
        parts.append(path(spots, color=color))
        parts += [dot(*spot, color=color) for spot in spots]
        ends.append((spots[-1], name, color))
    heights = _apart([y for (_, y), _, _ in ends], _LABEL_HEIGHT, plot.bottom)
    start = max((x for (x, _), _, _ in ends), default=0.0) + 22
    for ((x, y), name, color), height in zip(ends, heights, strict=True):
        # Connects the line to its label where it ends early or the label had to move.
        if abs(height - y) > 3 or x < start - 23:
            parts.append(line(x + 6, y, start - 3, height, color=color, dashed=True))
        parts.append(text(start, height + 4, name, size=_LABEL_SIZE, color=color, weight="bold"))
    return document(_WIDTH, _HEIGHT, parts)


def write_chart(path: Path, svg: str) -> None:
    """Write a chart as .svg, or as .png if resvg_py is installed."""
    check_chart(path)
    try:
        if path.suffix == ".svg":
            path.write_text(svg, encoding="utf-8")
        else:
            drawn = importlib.import_module("resvg_py").svg_to_bytes(svg_string=svg, zoom=2)
            path.write_bytes(bytes(drawn))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def check_chart(path: Path) -> None:
    """Raise if a chart of this name cannot be written, before it is drawn."""
    if path.suffix == ".png":
        try:
            importlib.import_module("resvg_py")
        except ImportError:
            raise UsageError(
                f"{path} needs resvg_py, which is not installed; use "
                f"{path.with_suffix('.svg').name}, or pip install resvg_py."
            ) from None
    elif path.suffix != ".svg":
        raise UsageError(f"{path} is not a chart's file name; use one that ends in .svg or .png.")


# --- axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """A range of values with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    @classmethod
    def around(cls, values: Sequence[float]) -> "_Axis":
        """An axis from zero if that wastes little room, otherwise just around the values."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if 0 <= low <= 0.25 * high or low == high:
            return cls.from_zero(values)
        step = _nice((high - low) / 4)
        first, last = math.floor(low / step - 0.1), math.ceil(high / step + 0.1)
        ticks = tuple(step * i for i in range(first, last + 1))
        return cls(ticks[0], ticks[-1], ticks)

    @classmethod
    def from_zero(cls, values: Sequence[float]) -> "_Axis":
        high = max(values, default=0.0) or 1.0
        step = _nice(high / 4)
        count = math.ceil(high / step - 1e-9)
        ticks = tuple(step * i for i in range(count + 1))
        return cls(0.0, ticks[-1], ticks)

    @classmethod
    def log(cls, values: Sequence[float]) -> "_Axis":
        """A logarithmic axis whose ticks are the values."""
        ticks = tuple(sorted(set(values))) or (1.0,)
        low, high = ticks[0], ticks[-1]
        margin = (high / low) ** 0.04 if high > low else 2.0
        return cls(low / margin, high if high > low else 2 * high, ticks, logarithmic=True)

    def share(self, value: float) -> float:
        """The position of a value: 0 at the low end, 1 at the high end."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class _Plot:
    """The area of a chart inside its axes."""

    x: _Axis
    y: _Axis
    right: float
    """Room to the right of it."""

    @property
    def right_edge(self) -> float:
        return _WIDTH - self.right

    @property
    def bottom(self) -> float:
        return _HEIGHT - _BOTTOM

    def px(self, x: float) -> float:
        return _LEFT + self.x.share(x) * (self.right_edge - _LEFT)

    def py(self, y: float) -> float:
        return self.bottom - self.y.share(y) * (self.bottom - _TOP)

    def at(self, point: Point) -> Point:
        return self.px(point[0]), self.py(point[1])

    def frame(self, title: str, x_label: str, y_label: str) -> list[str]:
        """Title, axes, ticks and their names."""
        parts = [text(20, 30, title, size=16, weight="bold")]
        for tick in self.y.ticks:
            y = self.py(tick)
            parts.append(line(_LEFT, y, self.right_edge, y, color=GRID if tick else RULE))
            words = _number(tick)
            parts.append(text(_LEFT - 8, y + 4, words, size=11, color=FAINT, anchor="end"))
        parts.append(line(_LEFT, self.bottom, self.right_edge, self.bottom))
        free = 0.0
        for tick in self.x.ticks:
            x, words = self.px(tick), _number(tick)
            parts.append(line(x, self.bottom, x, self.bottom + 4))
            half = len(words) * 3.2
            if x - half > free:
                parts.append(
                    text(x, self.bottom + 18, words, size=11, color=FAINT, anchor="middle")
                )
                free = x + half + 4
        middle = (_LEFT + self.right_edge) / 2
        parts.append(text(middle, _HEIGHT - 16, x_label, size=12, color=FAINT, anchor="middle"))
        middle = (_TOP + self.bottom) / 2
        parts.append(text(24, middle, y_label, size=12, color=FAINT, anchor="middle", turned=True))
        return parts


def _nice(step: float) -> float:
    """The next round number: 1, 2 or 5 times a power of ten.

    >>> [_nice(step) for step in (0.9, 1.2, 30)]
    [1.0, 2.0, 50.0]
    """
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def _number(value: float) -> str:
    """A tick's text, with thousands separators.

    >>> [_number(value) for value in (0.30000000000000004, 2.0, 12500)]
    ['0.3', '2', '12,500']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _byte_unit(most: float) -> tuple[float, str]:
    return next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if most >= u),
                (1e3, "kB"))  # fmt: skip


# --- the front ------------------------------------------------------------------------------------


def _front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both coordinates, from the left.

    >>> _front([(3, 1), (1, 5), (2, 6), (2, 2)])
    [(1, 5), (2, 2), (3, 1)]
    """
    found: list[Point] = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def _stairs(front: Sequence[Point]) -> list[Point]:
    """The front as stairs: more memory gains nothing until it is enough for the next plan."""
    corners = []
    for index, (x, y) in enumerate(front):
        if index:
            corners.append((x, front[index - 1][1]))
        corners.append((x, y))
    return corners


# --- labels ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "_Box") -> float:
        """The area that both boxes cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


class _Labels:
    """Places each label near its point where it covers least."""

    def __init__(self, right: float, bottom: float) -> None:
        self.taken: list[_Box] = []
        self._right, self._bottom = right, bottom

    def place(self, at: Point, words: str, *, color: str, bold: bool) -> str:
        width = _label_width(words)
        best = min(self._places(at, width), key=lambda box: self._covered(box))
        self.taken.append(best)
        weight = "bold" if bold else "normal"
        left, base = best.left, best.bottom - 4
        return text(left, base, words, size=_LABEL_SIZE, color=color, weight=weight)

    def _places(self, at: Point, width: float) -> list[_Box]:
        x, y = at
        half = _LABEL_HEIGHT / 2
        lefts = (x + 9, x - 9 - width, x - width / 2)
        found = [
            _Box(left, y + shift - half, left + width, y + shift + half)
            for shift in (-14, 14, 0, -26, 26)
            for left in (lefts if shift else lefts[:2])
        ]
        inside = [
            box
            for box in found
            if box.left > _LEFT and box.right < self._right
            and box.top > _TOP and box.bottom < self._bottom
        ]  # fmt: skip
        return inside or found

    def _covered(self, box: _Box) -> float:
        return sum(box.overlap(other) for other in self.taken)


def _label_width(words: str) -> float:
    return _CHAR_WIDTH * len(words)


def _around(at: Point, radius: float) -> _Box:
    return _Box(at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius)


def _boxes_of(corners: Sequence[Point]) -> list[_Box]:
    """The straight pieces of a line of stairs."""
    return [
        _Box(min(a, c) - 1, min(b, d) - 1, max(a, c) + 1, max(b, d) + 1)
        for (a, b), (c, d) in itertools.pairwise(corners)
    ]


def _apart(heights: Sequence[float], least: float, bottom: float) -> list[float]:
    """Move heights as little as needed to be ``least`` apart and above the bottom.

    >>> _apart([50, 52, 10], 16, 100)
    [50, 66, 10]
    >>> _apart([99, 99], 16, 100)
    [84, 100]
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    moved = list(heights)
    for before, index in itertools.pairwise(order):
        moved[index] = max(moved[index], moved[before] + least)
    limit = bottom
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - least
    return moved
