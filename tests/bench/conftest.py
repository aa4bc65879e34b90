"""What tests of the emulated cluster need, and what they must leave behind: nothing."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.bench.cluster import is_abandoned, list_namespaces, sweep


def why_not() -> str | None:
    """What keeps this machine from emulating a cluster."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "there is no `ip` or `tc` (apt-get install iproute2)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "the kernel refuses a network namespace here"
    return None


@pytest.fixture
def real_network() -> Iterator[None]:
    """Skips where no cluster can be emulated; afterwards nothing of it may be left.

    One test at a time, whatever process runs it: some abandon clusters on purpose.
    """
    if reason := why_not():
        pytest.skip(reason)
    with (Path(tempfile.gettempdir()) / "shardwise-tests-network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep()
        yield
        mine = f"swbench-{os.getpid()}-"  # other runs may be under way: theirs are not abandoned
        named = [*list_namespaces(), *(path.name for path in Path("/etc/netns").glob("*"))]
        assert not [name for name in named if name.startswith(mine) or is_abandoned(name)]
