"""The state of another process of this host, as the kernel tells it."""

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Life(StrEnum):
    """What a process does."""

    RUNS = "runs"
    STOPPED = "stopped"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this host; when it was started tells it from a later one of the same number."""

    pid: int
    started: int
    """In the kernel's ticks since the machine was booted; 0: not known."""

    def life(self) -> Life:
        """What it does now.

        >>> import os
        >>> process_id(os.getpid()).life()
        <Life.RUNS: 'runs'>
        """
        if not Path("/proc/self/stat").exists():
            return Life.UNKNOWN
        try:
            fields = _stat(self.pid)
        except OSError:  # of this process, which has no file descriptors left, for example
            return Life.UNKNOWN
        if fields is None or int(fields[19]) != self.started or fields[0] in "ZX":
            return Life.ENDED
        return Life.STOPPED if fields[0] in "Tt" else Life.RUNS


def process_id(pid: int) -> ProcessId:
    fields = None
    with suppress(OSError):
        fields = _stat(pid)
    return ProcessId(pid, int(fields[19]) if fields else 0)


def _stat(pid: int) -> list[str] | None:
    """The fields of a process after its name, beginning with its state; None: it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
