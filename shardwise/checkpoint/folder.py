"""Folders of safetensors files: reading their contents, and replacing one only as a whole.

File names are those of Hugging Face. Imports no torch.
"""

import ctypes
import errno
import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shardwise.checkpoint.format import Header, TensorInfo, read_header
from shardwise.core.errors import UsageError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
_WEIGHTS = (SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors")
"""Files that an export always replaces; others stay unless the export has one of the same name."""
_EXCHANGE = 2
"""Linux' RENAME_EXCHANGE."""
_HERE = -100
"""Linux' AT_FDCWD."""


def shard_name(index: int, count: int) -> str:
    """The name of one of ``count`` files.

    >>> shard_name(0, 1), shard_name(1, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    return SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One tensor and the file that has it."""

    info: TensorInfo
    file: Path


@dataclass(frozen=True)
class Source:
    """All tensors of a file or folder."""

    files: dict[Path, Header]
    tensors: dict[str, Stored]


def read_source(path: Path) -> Source:
    """All tensors of a safetensors file or a folder with one or an index; reads headers only."""
    files, weight_map = _find_files(path)
    headers = {file: read_header(file) for file in files}
    tensors: dict[str, Stored] = {}
    for file, header in headers.items():
        for info in header.tensors:
            if weight_map is None or weight_map.get(info.name) == file:
                tensors[info.name] = Stored(info, file)
    lost = sorted((weight_map or {}).keys() - tensors.keys())
    if lost:
        raise UsageError(
            f"'{path / INDEX_FILE}' lists tensors that its files do not have "
            f"({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}); write or copy the folder "
            "again."
        )
    return Source(headers, tensors)


def _find_files(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The files to read, and, if there is an index, the file of each tensor."""
    if path.is_file():
        return [path], None
    if not path.is_dir():
        raise UsageError(f"There is no file or folder '{path}'; give one with safetensors files.")
    if (path / INDEX_FILE).is_file():
        weight_map = _read_index(path / INDEX_FILE)
        return sorted(set(weight_map.values())), weight_map
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE], None
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UsageError(f"Folder '{path}' has no checkpoint and no safetensors files.")
    if len(found) != 1:
        raise UsageError(
            f"Folder '{path}' has {len(found)} safetensors files, but neither '{INDEX_FILE}' nor "
            f"'{SINGLE_FILE}', so it is not clear which to read; give the path of one file."
        )
    return found, None


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {name: path.parent / file for name, file in weight_map.items()}
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"'{path}' is not an index of safetensors files ({error!r}); write or copy it again."
        ) from error


# --- writing ----------------------------------------------------------------------------------


class Staging:
    """A hidden folder beside the target that becomes the target once it is completely on disk.

    Its name depends on the target alone, so the next export finds and removes what a killed process
    left.
    """

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        self.target = target.resolve()  # a link to a folder stays a link
        self.path = self.target.with_name(f".{self.target.name}.partial")
        self._overwrite = overwrite
        self._kept: list[str] = []
        self._made: list[Path] = []
        """Folders that this export created, innermost first."""

    def open(self, num_bytes: int) -> None:
        """Create the folder; raises if the target cannot be written."""
        self._check_target()
        self._make_parents()
        self._remove_stale()
        self._check_space(num_bytes)
        self.path.mkdir()
        self._made.insert(0, self.path)

    def publish(self) -> None:
        """Make the folder the target, atomically for readers."""
        for name in (n for n in self._kept if not (self.path / n).exists()):
            os.link(self.target / name, self.path / name, follow_symlinks=False)
        for file in self.path.iterdir():
            if not file.is_symlink():
                sync(file)
        sync(self.path)
        if not self._kept and not _has_entries(self.target):
            os.rename(self.path, self.target)  # also replaces an empty folder
        elif exchange(self.path, self.target):
            shutil.rmtree(self.path)
        else:
            self._replace_in_two_steps()
        sync(self.target.parent)

    def discard(self) -> None:
        """Remove everything that this export created."""
        if self.path in self._made:
            shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._made:
            with suppress(OSError):  # others may use it by now
                folder.rmdir()
        self._made.clear()

    def _check_target(self) -> None:
        if self.target.exists() and not self.target.is_dir():
            raise UsageError(f"'{self.target}' is a file; export to a folder.")
        if not _has_entries(self.target):
            return
        if not self._overwrite:
            raise UsageError(
                f"Folder '{self.target}' is not empty; export to another one, or pass "
                "overwrite=True (--overwrite) to replace the weights in it."
            )
        for entry in sorted(self.target.iterdir()):
            if any(fnmatchcase(entry.name, pattern) for pattern in _WEIGHTS):
                continue
            if entry.is_dir() and not entry.is_symlink():
                raise UsageError(
                    f"Folder '{self.target}' has a folder '{entry.name}', which is not from an "
                    "export; move it away, or export to another folder."
                )
            self._kept.append(entry.name)  # a tokenizer's files, a model card, ...

    def _make_parents(self) -> None:
        missing = [folder for folder in self.target.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.insert(0, folder)

    def _remove_stale(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)

    def _check_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.target.parent).free
        if num_bytes > free:
            raise OSError(errno.ENOSPC, f"{num_bytes} bytes are needed and {free} are free")

    def _replace_in_two_steps(self) -> None:
        # For file systems that cannot exchange: if killed in between, the old folder is kept aside.
        aside = self.target.with_name(f".{self.target.name}.replaced")
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(self.target, aside)
        try:
            os.rename(self.path, self.target)
        except OSError:
            os.rename(aside, self.target)
            raise
        shutil.rmtree(aside)


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(left: Path, right: Path) -> bool:
    """Swap two folders' names atomically; False if the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if swap(_HERE, os.fsencode(left), _HERE, os.fsencode(right), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(right))


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
