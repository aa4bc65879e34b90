"""Fixtures: what FSDP2 saved, once a session."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import fsdp2
from tests.harness import Workers


@pytest.fixture(scope="session")
def saved_by_fsdp2(
    two: Workers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The folder with each layout, and what the run had."""
    folder = tmp_path_factory.mktemp("fsdp2")
    return folder, two.run(fsdp2.run, str(folder))[0]
