"""The memory wall in small: under a limit of the kernel's, states on a disk train and others die."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.bench.limit import MemoryLimit
from shardwise.core.errors import UsageError
from shardwise.plans import presets
from shardwise.plans.file import dump_plan

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "wall.py"
SMALL = ["--ranks", "1", "--layers", "8", "--width", "1024", "--seq", "32", "--steps", "2"]
"""100M parameters, 1.6 GB of states."""


def can_limit() -> bool:
    try:
        with MemoryLimit(f"shardwise-test-probe-{os.getpid()}", 1 << 30):
            return True
    except UsageError:
        return False


def run(*options: str) -> dict:
    command = [sys.executable, str(SCRIPT), *SMALL, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(not can_limit(), reason="control groups cannot be made here")
class TestWall:
    def test_a_model_twice_its_limit_trains(self, tmp_path):
        result = run("--limit", "1 GiB", "--disk", str(tmp_path))
        assert result["outcome"] == "trains"
        assert result["state_bytes"] > 1.4 * 2**30
        first, last = result["steps"][0]["loss"], result["steps"][-1]["loss"]
        assert last < first
        assert result["charged_peak_bytes"] <= 2**30
        assert result["peak_bytes"] == pytest.approx(result["predicted_bytes"], rel=0.25)
        assert not list(tmp_path.iterdir())

    def test_the_same_model_in_memory_is_killed(self, tmp_path):
        plan = tmp_path / "plan.toml"
        plan.write_text(dump_plan(presets.zero3()))
        result = run("--limit", "1 GiB", "--plan", str(plan))
        assert result["outcome"] == "killed by the limit"


@pytest.mark.skipif(not can_limit(), reason="control groups cannot be made here")
class TestOneLayer:
    """A layer of 67M parameters: 268 MB, and its gradient as much."""

    OPTIONS = ("--layers", "1", "--width", "256", "--vocab", "262144", "--limit", "800 MiB")

    def test_it_trains_in_tiles(self, tmp_path):
        result = run(*self.OPTIONS, "--disk", str(tmp_path), "--tile", str(1 << 20))
        assert result["outcome"] == "trains"
        assert result["steps"][-1]["loss"] < result["steps"][0]["loss"]
        assert result["peak_bytes"] < 4 * 256 * 262144  # less than the layer alone
        assert not list(tmp_path.iterdir())

    def test_as_a_whole_it_is_killed(self, tmp_path):
        result = run(*self.OPTIONS, "--disk", str(tmp_path), "--tile", "0")
        assert result["outcome"] == "killed by the limit"


def test_no_memory_controller_is_told(tmp_path):
    with pytest.raises(UsageError, match="has no memory controller"):
        MemoryLimit("name", 1, root=tmp_path)
