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
        if self.path.is_dir() and any(self.path.iterdir()) and not is_checkpoint(self.path):
            raise UsageError(
                f"Folder '{self.path}' is not empty and has no checkpoint; save to another one."
            )

    def open(self, num_bytes: int) -> None:
        """Make the hidden folder, without what a killed process left there."""
        self.check()
        self.path.parent.mkdir(parents=True, exist_ok=True)
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
                replaced = self.path.with_name(f".{self.path.name}.replaced.partial")
                os.rename(self.path, replaced)
                os.rename(self.staging, self.path)
            sync(self.path.parent)
            shutil.rmtree(replaced)
        if _NUMBERED.fullmatch(self.path.name):
            point(self.path)

    def discard(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self.staging)


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
    folder = path.parent if path.name == LATEST else path
    if not folder.is_dir():
        raise UsageError(f"There is no checkpoint '{path}': give the folder that sw.save wrote.")
    with suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
        if name and "/" not in name and is_checkpoint(folder / name):
            return folder / name
    found = series(folder)
    if not found:
        raise UsageError(
            f"There is no whole checkpoint in '{folder}'; of folders of DeepSpeed and accelerate "
            "'shardwise import' makes one."
        )
    return found[-1]


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
    disappears at once, whenever the process is killed.
    """
    whole = [path for path in series(folder) if _is_whole(path)]
    removed = whole[: -max(1, keep)]
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
