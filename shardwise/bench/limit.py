"""A memory limit that the kernel enforces: one control group per process, removed afterwards.

Supports both versions of the controller. A process that exceeds its limit is killed (SIGKILL).
"""

import os
import time
from pathlib import Path
from types import TracebackType

from shardwise.core.errors import UsageError

_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A control group with a limit; processes should join it before they allocate anything."""

    def __init__(self, name: str, limit_bytes: int, root: Path = _ROOT) -> None:
        self._is_v1 = (root / "memory" / "memory.limit_in_bytes").exists()
        if not self._is_v1 and not (root / "cgroup.controllers").exists():
            raise UsageError(f"{root} has no memory controller; use a Linux kernel that has one.")
        self._group = (root / "memory" if self._is_v1 else root) / name
        self._limit_bytes = limit_bytes

    def __enter__(self) -> "MemoryLimit":
        try:
            self._group.mkdir()
            if self._is_v1:
                (self._group / "memory.limit_in_bytes").write_text(str(self._limit_bytes))
                # Otherwise the excess goes to a swap device, if there is one.
                self._set_if_there("memory.memsw.limit_in_bytes", str(self._limit_bytes))
            else:
                (self._group / "memory.max").write_text(str(self._limit_bytes))
                self._set_if_there("memory.swap.max", "0")
        except OSError as error:
            raise UsageError(
                f"The control group {self._group} cannot be created ({error.strerror}); run as "
                "root on a machine where root may create control groups."
            ) from None
        return self

    def _set_if_there(self, file: str, value: str) -> None:
        if (self._group / file).exists():
            (self._group / file).write_text(value)

    def join(self, pid: int | None = None) -> None:
        """Put a process under the limit; by default this one."""
        (self._group / "cgroup.procs").write_text(str(pid or os.getpid()))

    @property
    def peak_bytes(self) -> int:
        """The peak of charged memory, including page cache."""
        file = "memory.max_usage_in_bytes" if self._is_v1 else "memory.peak"
        return int((self._group / file).read_text())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _ in range(50):  # a process that has just ended may still be in it
            try:
                self._group.rmdir()
                return
            except OSError:
                time.sleep(0.1)
