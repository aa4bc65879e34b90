"""The folder that a store makes under a path: who owns it, and how it is removed.

A folder has a lock file, locked as long as its owner lives, and a note for people. The data file
has no name, so the system frees it however the owner ends. A killed process leaves only the almost
empty folder; the next store on the path removes it.

Only our folders are removed: a real folder (no link) of this user with our kind of name, with
nothing in it but our note and lock, whose lock is free. A folder made on another host stays,
because a shared file system may not share its locks.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import socket
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.core.errors import UsageError
from shardwise.tier.store import TierError

KIND = "shardwise run folder"
"""Stands in the note, to distinguish it from files of other programs."""
LOCK, NOTE, NEW_NOTE, DATA = "owner.lock", "owner.json", "owner.json.new", "data"
_NAME = re.compile(r"shardwise-\d+-[0-9a-f]{8}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems in memory; newer versions accept O_DIRECT, but ignore it."""

IN_USE, LEFT_BEHIND, OTHER_HOST, UNKNOWN = "in use", "left behind", "another host's", "not ours"


class RunFolder:
    """A folder of this run under ``path``, locked until it is removed or the process ends."""

    def __init__(self, path: Path, rank: int) -> None:
        self._note = {
            "kind": KIND,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rank": rank,
            "started": time.time(),
            "bytes": 0,
        }
        try:
            self.path, self._lock = _make_locked(path)
            try:
                self.note_bytes(0)
            except OSError:
                self.remove()
                raise
        except OSError as error:
            raise TierError(
                f"The nvme tier cannot make and lock a folder in {path}: "
                f"{error.strerror or error}; set tiers.path to a folder on a local disk that this "
                "user may write to."
            ) from error

    def note_bytes(self, nbytes: int) -> None:
        """Write the size of the data file into the note."""
        self._note["bytes"] = nbytes
        new = self.path / NEW_NOTE
        new.write_text(json.dumps(self._note, indent=1) + "\n", encoding="utf-8")
        new.rename(self.path / NOTE)

    def open_data(self, flags: int) -> int:
        """A new file without a name, which only this user can read and write."""
        return _open_nameless(self.path, DATA, flags)

    def remove(self) -> None:
        _remove(self.path)
        os.close(self._lock)

    def leave(self) -> None:
        """In a forked child: close the lock, which the parent keeps."""
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Found:
    """A folder with our kind of name, and the contents of its note."""

    path: Path
    state: str
    pid: int | None = None
    host: str | None = None
    rank: int | None = None
    started: float | None = None
    nbytes: int | None = None


def find_folders(path: Path) -> list[Found]:
    """The run folders under a path."""
    return [_examine(path / name) for name in _names(path)]


def remove_left_behind(path: Path) -> list[Found]:
    """Remove the run folders whose owners have ended, and return them."""
    return [found for name in _names(path) if (found := _clean(path / name)) is not None]


def file_system(path: Path) -> str:
    """The kind of file system at a path, such as ext4; empty if unknown."""
    found, deepest = "", -1
    here = os.path.realpath(path)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, kind = line.split()[:3]
            mount = mount.replace("\\040", " ").rstrip("/")
            if (here == mount or here.startswith(mount + "/")) and len(mount) >= deepest:
                found, deepest = kind, len(mount)
    return found


def try_direct(path: Path) -> str:
    """Write and read a page with direct I/O; returns why that is impossible, or an empty text."""
    kind = file_system(path)
    if kind in IN_MEMORY:
        return f"{kind} is in memory"
    page, again = mmap.mmap(-1, mmap.PAGESIZE), mmap.mmap(-1, mmap.PAGESIZE)
    page.write(secrets.token_bytes(mmap.PAGESIZE))
    try:
        file = _open_nameless(path, f".shardwise-{secrets.token_hex(8)}", os.O_DIRECT)
        try:
            os.pwritev(file, [page], 0)
            os.preadv(file, [again], 0)
        finally:
            os.close(file)
    except OSError as error:
        return error.strerror or str(error)
    return "" if page[:] == again[:] else "the bytes read differ from those written"


def check_folder(path: Path) -> None:
    """Raise unless stores can be made under a path."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; set tiers.path to one on a local disk.")


def _make_locked(path: Path) -> tuple[Path, int]:
    """A new folder and its lock. Until its note is written, others do not take it for ours."""
    folder = path / f"shardwise-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        folder.rmdir()
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        _remove(folder)
        raise
    return folder, lock


def _open_nameless(folder: Path, name: str, flags: int) -> int:
    """A file that is removed when closed; it has ``name`` briefly if it needs one."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:  # in two steps: a file created with unsupported flags would stay
        return os.open(folder / name, flags | os.O_NOFOLLOW)
    finally:
        os.unlink(folder / name)


def _names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if _NAME.fullmatch(name))


def _examine(folder: Path) -> Found:
    """The state of a folder, without changing it."""
    with contextlib.ExitStack() as stack:
        return _inspect(folder, stack) or Found(folder, UNKNOWN)


def _clean(folder: Path) -> Found | None:
    """Remove a folder whose owner has ended; None: there is nothing to remove."""
    with contextlib.ExitStack() as stack:  # holds the lock until the folder is removed
        found = _inspect(folder, stack)
        if found is None or found.state != LEFT_BEHIND:
            return None
        return found if _remove(folder) else None


def _inspect(folder: Path, stack: contextlib.ExitStack) -> Found | None:
    """Read the note and try the lock, held until ``stack`` ends; None: the folder is not ours."""
    try:
        directory = os.open(folder, _DIRECTORY)  # fails for a link
        stack.callback(os.close, directory)
        if os.fstat(directory).st_uid != os.geteuid():
            return None
        if not set(os.listdir(directory)) <= {LOCK, NOTE, NEW_NOTE, DATA}:
            return None
        note = json.loads(_read(NOTE, directory))
        if note["kind"] != KIND:
            return None
        found = Found(
            folder, LEFT_BEHIND, note["pid"], note["host"], note["rank"], note["started"],
            note["bytes"],
        )  # fmt: skip
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        stack.callback(os.close, lock)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return replace(found, state=IN_USE)
    return found if found.host == socket.gethostname() else replace(found, state=OTHER_HOST)


def _read(name: str, directory: int) -> str:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(file, encoding="utf-8") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "no file")
        return opened.read(1 << 16)


def _remove(folder: Path) -> bool:
    """Remove the files that we make, and the folder if it has nothing else."""
    try:
        directory = os.open(folder, _DIRECTORY)
    except OSError:
        return False
    try:
        for name in (NEW_NOTE, DATA, NOTE, LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
        folder.rmdir()
    except OSError:
        return False
    finally:
        os.close(directory)
    return True
