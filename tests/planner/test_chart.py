"""Charts: well-formed, everything named in them, values where they belong, labels apart."""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.planner import chart
from shardwise.planner.chart import draw_front, draw_lines, write_chart

SVG = "{http://www.w3.org/2000/svg}"
GB = 10**9
POINTS = [
    ("zero3", 30 * GB, 2.0, False),
    ("lean <int4> & more", 45 * GB, 1.0, True),
    ("beaten", 60 * GB, 1.5, False),
    ("ddp", 120 * GB, 0.8, False),
]
SERIES = [
    ("zero3", [(8, 160.0), (64, 150.0), (512, 90.0)]),
    ("amsp", [(8, 165.0), (64, 158.0), (512, 150.0)]),
    ("lean", [(8, 166.0), (64, 160.0), (512, 150.5)]),
]


def texts(svg: str) -> dict[str, ET.Element]:
    return {element.text or "": element for element in ET.fromstring(svg).iter(f"{SVG}text")}


def circles(svg: str) -> list[tuple[float, float, float]]:
    found = ET.fromstring(svg).iter(f"{SVG}circle")
    return [(float(c.get("cx")), float(c.get("cy")), float(c.get("r"))) for c in found]


def line_points(svg: str) -> list[list[tuple[float, float]]]:
    found = ET.fromstring(svg).iter(f"{SVG}polyline")
    return [[tuple(map(float, p.split(","))) for p in e.get("points").split()] for e in found]


def test_the_front_names_everything() -> None:
    words = texts(draw_front(POINTS, "a <title>", 80 * GB))
    assert {"a <title>", "memory per rank, GB", "seconds per step", "limit 80 GB"} <= set(words)
    assert {label for label, *_ in POINTS} <= set(words)


def test_the_chosen_one_stands_out() -> None:
    svg = draw_front(POINTS, "", 80 * GB)
    assert sorted(radius for *_, radius in circles(svg)) == [4.5, 4.5, 4.5, 6.5]
    words = texts(svg)
    bold = [label for label, *_ in POINTS if words[label].get("font-weight") == "bold"]
    assert bold == ["lean <int4> & more"]


def test_the_front_is_a_staircase_of_what_nothing_beats() -> None:
    svg = draw_front(POINTS, "", 80 * GB)
    (stairs,) = line_points(svg)
    assert len(stairs) == 5  # three points and the corners between them
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(stairs))
    dots = {(x, y) for x, y, _ in circles(svg)}
    assert {stairs[0], stairs[2], stairs[4]} <= dots
    assert len(dots - set(stairs)) == 1  # the beaten one


def test_the_limit_lies_between_what_fits_and_what_does_not() -> None:
    svg = draw_front(POINTS, "", 80 * GB)
    (dashed,) = (e for e in ET.fromstring(svg).iter(f"{SVG}line") if e.get("stroke-dasharray"))
    x = float(dashed.get("x1"))
    assert x == float(dashed.get("x2"))
    right = sorted(cx for cx, _, _ in circles(svg))
    assert right[2] < x < right[3]


def test_positions_are_proportional() -> None:
    svg = draw_lines([("a", [(0, 0.0), (1, 10.0), (3, 30.0)])], "", "x", "y")
    (points,) = line_points(svg)
    (x0, y0), (x1, y1), (x3, y3) = points
    assert (x3 - x0) == pytest.approx(3 * (x1 - x0), abs=0.3)
    assert (y0 - y3) == pytest.approx(3 * (y0 - y1), abs=0.3)
    assert y3 < y1 < y0  # more is higher


def test_factors_are_equal_distances_on_a_log_axis() -> None:
    (points, *_) = line_points(draw_lines(SERIES, "", "x", "y", log_x=True))
    (a, _), (b, _), (c, _) = points
    assert c - b == pytest.approx(b - a, abs=0.3)
    assert {"8", "64", "512"} <= set(texts(draw_lines(SERIES, "", "x", "y", log_x=True)))


@pytest.mark.parametrize("log_x", [False, True])
def test_labels_of_lines_do_not_overlap(log_x: bool) -> None:
    svg = draw_lines(SERIES, "title", "GPUs", "TFLOP/s", log_x)
    words = texts(svg)
    assert {"title", "GPUs", "TFLOP/s"} <= set(words)
    heights = sorted(float(words[name].get("y")) for name, _ in SERIES)
    assert all(b - a >= 15 for a, b in itertools.pairwise(heights))
    assert float(words["lean"].get("y")) < float(words["amsp"].get("y"))  # as the lines end
    ends = max(x for line in line_points(svg) for x, _ in line)
    assert all(float(words[name].get("x")) > ends for name, _ in SERIES)


def test_labels_of_points_do_not_overlap() -> None:
    near = [(f"plan {i}", (40 + i) * GB, 1.0 + 0.01 * (i % 3), False) for i in range(5)]
    words = texts(draw_front(near, "", 80 * GB))
    boxes = []
    for label, *_ in near:
        x, y = float(words[label].get("x")), float(words[label].get("y"))
        boxes.append((x, x + 6.6 * len(label), y - 12, y + 4))
    for i, (a, b, c, d) in enumerate(boxes):
        for e, f, g, h in boxes[:i]:
            assert b <= e or f <= a or d <= g or h <= c


@pytest.mark.parametrize(
    "points",
    [[("one", GB, 1.0, True)], [("a", GB, 1.0, True), ("b", GB, 1.0, False)]],
)
def test_few_points_are_no_trouble(points: list) -> None:
    assert "nan" not in draw_front(points, "", GB)
    assert "nan" not in draw_lines([("a", [(1, 0.0)])], "", "", "", log_x=True)


def test_everything_is_inside_the_picture() -> None:
    for svg in (draw_front(POINTS, "", 80 * GB), draw_lines(SERIES, "", "", "", log_x=True)):
        root = ET.fromstring(svg)
        width, height = float(root.get("width")), float(root.get("height"))
        assert all(0 < x < width and 0 < y < height for x, y, _ in circles(svg))
        for words, element in texts(svg).items():
            wide = len(words) * 6 if element.get("text-anchor") == "start" else 0
            assert float(element.get("x")) + wide <= width


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    svg = draw_lines(SERIES, "", "", "")
    write_chart(tmp_path / "a.svg", svg)
    assert (tmp_path / "a.svg").read_text() == svg
    write_chart(tmp_path / "a.png", svg)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"ends in \.svg or \.png"):
        write_chart(tmp_path / "a.pdf", svg)
    with pytest.raises(UsageError, match="cannot be written"):
        write_chart(tmp_path / "none" / "a.svg", svg)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(chart.importlib, "import_module", missing)
    with pytest.raises(UsageError, match=r"needs resvg_py.*use a\.svg"):
        write_chart(tmp_path / "a.png", svg)
