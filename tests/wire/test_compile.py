"""The Triton kernels compile for GPUs that are not here, to the loads and stores they should."""

import importlib.util
from pathlib import Path

import pytest

from tests.wire.processes import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton; a Linux wheel that needs no GPU)",
)


def test_kernels_compile_for_gpus_and_move_vectors(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("compiling.py"))
    done = run(script, folder=tmp_path)
    assert [line.split(":")[0] for line in done.splitlines()] == ["80", "90", "75", "100", "gfx942"]
