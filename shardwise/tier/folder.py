"""The folder that a store makes under a path: who owns it, and how it goes away.

A folder holds a lock file, locked as long as its owner lives, and a note for people. The data file
has no name, so that the system frees it however the owner ends. What a killed process leaves is
the almost empty folder; the next store on the path removes it.

Only what we made is removed: a real folder (no link) of our user with our kind of name, with our
note in it and nothing else, whose lock is free. A folder made on another host stays, because a
shared file system may not share its locks.
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
"""In the note, so that no other program's file is taken for it."""
LOCK, NOTE, NEW_NOTE, DATA = "owner.lock", "owner.json", "owner.json.new", "data"
_NAME = re.compile(r"shardwise-\d+-[0-9a-f]{8}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that are memory; newer ones of them accept O_DIRECT, and ignore it."""

IN_USE, LEFT_BEHIND, OTHER_HOST, UNKNOWN = "in use", "left behind", "another host's", "not ours"


class RunFolder:
    """A folder of our own under ``path``, locked until it is removed or the process ends."""

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
                f"No folder of the nvme tier could be made and locked in {path}: "
                f"{error.strerror or error}; set tiers.path to a folder on a local disk that this "
                "user may write to."
            ) from error

    def note_bytes(self, nbytes: int) -> None:
        """Says in the note how large the data file is."""
        self._note["bytes"] = nbytes
        new = self.path / NEW_NOTE
        new.write_text(json.dumps(self._note, indent=1) + "\n", encoding="utf-8")
        new.rename(self.path / NOTE)

    def open_data(self, flags: int) -> int:
        """A new file without a name, for reading and writing by this user only."""
        return _open_nameless(self.path, DATA, flags)

    def remove(self) -> None:
        _remove(self.path)
        os.close(self._lock)

    def leave(self) -> None:
        """In a forked child: lets go of the lock, which the parent keeps."""
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Found:
    """A folder with our kind of name, and what its note says."""

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
    """Removes the run folders whose owners are gone, and returns them."""
    return [found for name in _names(path) if (found := _clean(path / name)) is not None]


def file_system(path: Path) -> str:
    """The kind of file system at a path, such as ext4; an empty text where nobody says."""
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
    """Writes and reads a page past the page cache; why that is not possible, or an empty text."""
    kind = file_system(path)
    if kind in IN_MEMORY:
        return f"{kind} is memory"
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
    return "" if page[:] == again[:] else "other bytes are read than were written"


def check_folder(path: Path) -> None:
    """Raises unless stores can be made under a path."""
    if not path.is_dir():
        raise UsageError(f"{path} is no folder; set tiers.path to one on a local disk.")


def _make_locked(path: Path) -> tuple[Path, int]:
    """A new folder and its lock. Until its note is written nobody else takes it for ours."""
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
    """A file that goes when it is closed; it has ``name`` for a moment where it needs one."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:  # in two steps: a file that is made with flags that are not known here stays
        return os.open(folder / name, flags | os.O_NOFOLLOW)
    finally:
        os.unlink(folder / name)


def _names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if _NAME.fullmatch(name))


def _examine(folder: Path) -> Found:
    """What a folder is, without a change."""
    with contextlib.ExitStack() as stack:
        return _inspect(folder, stack) or Found(folder, UNKNOWN)


def _clean(folder: Path) -> Found | None:
    """Removes a folder whose owner is gone; None where there is nothing to remove."""
    with contextlib.ExitStack() as stack:  # keeps the lock until the folder is gone
        found = _inspect(folder, stack)
        if found is None or found.state != LEFT_BEHIND:
            return None
        return found if _remove(folder) else None


def _inspect(folder: Path, stack: contextlib.ExitStack) -> Found | None:
    """Reads the note and tries the lock, held until ``stack`` ends; None where it is not ours."""
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
    """Removes the files that we make, and the folder if nothing else is in it."""
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
