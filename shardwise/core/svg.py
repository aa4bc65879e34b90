"""The colours, fonts and shapes of all charts, as SVG text."""

from html import escape

ACCENT, MUTED, MARK = "#2f6db5", "#a9b0b8", "#d1495b"
TEXT, FAINT, RULE, GRID = "#22272e", "#69717a", "#d0d5da", "#eef0f2"
LINES = (ACCENT, MARK, "#3c8d5a", "#b7791f", "#7b5ea7", "#2a8c99", FAINT)
"""Distinct colours for lines, in the order in which they are used."""

FONTS = "Helvetica, Arial, DejaVu Sans, Liberation Sans, Noto Sans, sans-serif"
"""Includes fonts of every system, because the PNG renderer has no default font."""


def document(width: float, height: float, parts: list[str]) -> str:
    """A whole SVG file with a white background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="{FONTS}">',
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(
    x: float, y: float, words: str, *, size: int = 13, color: str = TEXT, weight: str = "normal",
    anchor: str = "start", turned: bool = False,
) -> str:  # fmt: skip
    """Words at a point; ``turned``: vertical, reading upwards."""
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="{anchor}"{turn}>{escape(words)}</text>'
    )


def line(
    x1: float, y1: float, x2: float, y2: float, *, color: str = RULE, dashed: bool = False
) -> str:
    """A thin straight line."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dash}/>'


def path(points: list[tuple[float, float]], *, color: str = ACCENT) -> str:
    """A line through points."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>'


def dot(x: float, y: float, *, radius: float = 4, color: str = ACCENT) -> str:
    """A marker, with a white rim so that it stands out from lines."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{color}" stroke="white" '
        'stroke-width="1.5"/>'
    )
