"""The Triton kernels compile for GPUs that are not here, to the loads and stores they should."""

import importlib.util
from pathlib import Path

import pytest

from tests.wire.compiling import TARGETS
from tests.wire.processes import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton; a Linux wheel that needs no GPU)",
)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_for_gpus_and_move_vectors(tmp_path: Path, target: str) -> None:
    script = str(Path(__file__).with_name("compiling.py"))
    assert run(script, target, folder=tmp_path).startswith(f"{target}: 74 compiled")
