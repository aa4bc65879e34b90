"""The folder of a checkpoint: it appears as a whole, and the last whole one can always be found.

Everything is written to a hidden folder beside the target. Its rename is the moment at which the
checkpoint exists. Folders with a number at their end (``run/step-100``) are a series: a file
``latest`` beside them names the last one. Imports no torch.
"""

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.folder import exchange, sync
from shardwise.checkpoint.training.index import INDEX_FILE, METADATA_FILE, read_index
from shardwise.core.errors import UsageError

LATEST = "latest"
_NUMBERED = re.compile(r"(?P<series>(?:.*[-_.])?)(?P<number>\d+)")


class Target:
    """Where a checkpoint is written; used by one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if not self.path.name or self.path.name == LATEST:
            raise UsageError(
                f"'{path}' cannot be the name of a checkpoint; give one such as 'run/step-100'."
            )
        self.staging = self.path.with_name(f".{self.path.name}.partial")

    def check(self) -> None:
        """Raise if something that is no checkpoint would be replaced."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"'{self.path}' is a file; save to a folder.")
        if self._entries() and not is_checkpoint(self.path):
            raise UsageError(
                f"Folder '{self.path}' is not empty and has no checkpoint; save to another one."
            )
        others = [e.name for e in self._entries() if not (e.is_file() and _is_part(e.name))]
        if others:
            raise UsageError(
                f"Folder '{self.path}' has '{min(others)}' beside its checkpoint, which would be "
                "removed with it; move that away, or save to another folder."
            )

    def _entries(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else []

    def open(self, num_bytes: int) -> None:
        """Make the hidden folder, without what a killed process left there."""
        self.check()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._recover()
        for left in self.path.parent.glob(".*.partial"):
            if left == self.staging or _same_series(left.name[1:-8], self.path.name):
                shutil.rmtree(left)
        free = shutil.disk_usage(self.path.parent).free
        if num_bytes > free:
            raise OSError(
                errno.ENOSPC, f"{num_bytes} bytes are needed and {free} are free",
                str(self.path.parent),
            )  # fmt: skip
        self.staging.mkdir()

    def publish(self) -> None:
        """Make the hidden folder the checkpoint, and let ``latest`` name it."""
        sync(self.staging)
        if not self.path.is_dir() or not any(self.path.iterdir()):
            os.rename(self.staging, self.path)
            sync(self.path.parent)
        else:
            replaced = self.staging
            if not exchange(self.staging, self.path):
                replaced = _aside(self.path)  # where ``find`` looks if this is not completed
                os.rename(self.path, replaced)
                try:
                    os.rename(self.staging, self.path)
                except OSError:
                    os.rename(replaced, self.path)
                    raise
            sync(self.path.parent)
            shutil.rmtree(replaced)
        if _NUMBERED.fullmatch(self.path.name):
            point(self.path)

    def _recover(self) -> None:
        """Complete what a process that was killed while it replaced this checkpoint left."""
        replaced = _aside(self.path)
        if replaced.is_dir():
            if self.path.exists():
                shutil.rmtree(replaced)
            else:
                os.rename(replaced, self.path)

    def discard(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self.staging)


def _is_part(name: str) -> bool:
    """Whether a file of this name is of a checkpoint; NFS renames what it cannot remove yet."""
    return name in (INDEX_FILE, METADATA_FILE) or name.endswith(".distcp") or name[:4] == ".nfs"


def _aside(path: Path) -> Path:
    """Where a checkpoint is while another takes its place, if names cannot be exchanged."""
    return path.with_name(f".{path.name}.replaced.partial")


def point(path: Path) -> None:
    """Let ``latest`` beside a checkpoint name it."""
    new, file = path.with_name(f".{LATEST}.new"), path.with_name(LATEST)
    with new.open("w", encoding="utf-8") as written:
        written.write(path.name + "\n")
        written.flush()
        os.fsync(written.fileno())
    os.replace(new, file)
    sync(path.parent)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a whole checkpoint; its contents may be damaged."""
    return (path / INDEX_FILE).is_file() or (path / METADATA_FILE).is_file()


def find(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the last one of a folder's series."""
    if path.is_dir() and is_checkpoint(path):
        return path
    if not path.exists() and is_checkpoint(_aside(path)):
        return _aside(path)
    folder = path.parent if path.name == LATEST else path
    if not folder.is_dir():
        raise UsageError(f"There is no checkpoint '{path}': give the folder that sw.save wrote.")
    if (latest := _latest(folder)) is not None:
        return latest
    found = series(folder)
    if not found:
        raise UsageError(
            f"There is no whole checkpoint in '{folder}'; of folders of DeepSpeed and accelerate "
            "'shardwise import' makes one."
        )
    return found[-1]


def _latest(folder: Path) -> Path | None:
    """What ``latest`` names, if it is there."""
    with suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
        if name and "/" not in name and is_checkpoint(folder / name):
            return folder / name
    return None


def series(folder: Path) -> list[Path]:
    """The numbered checkpoints in a folder, the oldest first."""
    found = [
        (int(match["number"]), entry.name, entry)
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NUMBERED.fullmatch(entry.name))
        and not entry.name.startswith(".")
        and is_checkpoint(entry)
    ]
    return [entry for _, _, entry in sorted(found)]


def before(path: Path) -> Path | None:
    """The checkpoint before one of a series, if there is one."""
    path = path.resolve()
    match = _NUMBERED.fullmatch(path.name)
    if match is None:
        return None
    earlier = [
        other
        for other in series(path.parent)
        if _same_series(other.name, path.name)
        and int(_NUMBERED.fullmatch(other.name)["number"]) < int(match["number"])  # type: ignore[index]
    ]
    return earlier[-1] if earlier else None


def _same_series(one: str, other: str) -> bool:
    matches = [_NUMBERED.fullmatch(name) for name in (one, other)]
    return all(matches) and len({match["series"] for match in matches if match}) == 1


def rotate(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest checkpoints of a folder's series, and return what was removed.

    Only whole ones count, so that what is damaged never displaces one that can be loaded; a folder
    disappears at once, whenever the process is killed. The newest is what ``latest`` names: those
    with higher numbers are of a run that went back, and stay until it replaces them.
    """
    every, newest = series(folder), _latest(folder)
    if newest in every:
        every = every[: every.index(newest) + 1]
    removed = [path for path in every if _is_whole(path)][: -max(1, keep)]
    for path in removed:
        aside = path.with_name(f".{path.name}.partial")
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(path, aside)
        shutil.rmtree(aside)
    return removed


def _is_whole(path: Path) -> bool:
    try:
        read_index(path)
    except UsageError:
        return False
    return True
