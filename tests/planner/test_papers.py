"""A short version of ``benchmarks/papers.py``: its rows make sense, and say what papers say."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from math import isfinite
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "papers.py"


@pytest.fixture(scope="module")
def papers() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("papers")


def speed_ups(papers: ModuleType, prefetch: int) -> list[float]:
    cases = [(links, 2048) for links in (8, 4, 2, 1)]
    rows = list(papers.zeropp.zeropp_rows(prefetch, cases, ["18B"]))
    return [row.predicted for row in rows if row.what.endswith("speed-up")]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_zeropp_gains_more_on_slower_links(papers, prefetch):
    found = speed_ups(papers, prefetch)
    assert len(found) == 4
    assert all(slower > faster for faster, slower in pairwise(found)), found
    assert found[-1] > 1.5


def test_speed_ups_of_zeropp_are_near_the_published_ones(papers):
    rows = [row for row in papers.zeropp.zeropp_rows(0, models=["18B"]) if row.unit == "x"]
    assert len(rows) == len(papers.zeropp.ZEROPP)
    assert all(0.8 < row.ratio < 1.25 for row in rows), rows


def test_every_figure_is_finite_and_positive(papers):
    rows = [
        *papers.zeropp.tutorial_rows(),
        *papers.amsp.mfu_rows(),
        *papers.amsp.internevo_rows(),
        *papers.infinity.infinity_rows(["0.5T", "20T"]),
        *papers.infinity.scaling_rows(),
        *papers.infinity.prefetch_rows(),
    ]
    for row in rows:
        assert isfinite(row.predicted), row
        assert row.predicted > 0, row
        assert row.ratio is None or row.ratio > 0, row
    assert all(row.predicted < 1 for row in rows if row.unit == "MFU")


def test_more_nodes_are_more_than_linear(papers):
    """Where states rest on disks, as ZeRO-Infinity found."""
    *_, over_linear = papers.infinity.scaling_rows()
    assert over_linear.predicted > 1


def test_models_grow_with_what_is_moved_off_the_device(papers):
    sizes = [row.predicted for row in papers.infinity.size_rows()]
    assert sizes == sorted(sizes)


def test_ratios_of_a_group(papers):
    rows = [papers.Row(what="", predicted=p, published=1.0) for p in (0.5, 2.0)]
    assert papers.mean_ratio(rows) == pytest.approx(1)
    assert papers.mean_ratio([papers.Row(what="", predicted=1.0)]) is None


def test_the_command_needs_no_torch():
    code = (
        f"import runpy, sys; sys.modules['torch'] = None; sys.path[0] = {str(SCRIPT.parent)!r}; "
        f"sys.argv = ['papers.py', '--groups', 'A3', '--json']; runpy.run_path({str(SCRIPT)!r}, "
        "run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=SCRIPT.parents[1],
    )
    rows = json.loads(done.stdout)
    assert {row["group"] for row in rows} == {"A3"}
    assert all(row["predicted"] > 0 for row in rows)
