"""Watching other processes from a test."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until something is so, and fail when it does not happen in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """The processes that `pid` started and that are still there."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def is_alive(pid: int) -> bool:
    """Whether `pid` runs; one that has ended but was not collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
