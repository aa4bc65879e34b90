"""A rank without torch: a heart, and a main thread that communicates, so to speak, until it fails.

``python beating.py FOLDER RANK WORLD TIMEOUT HOW [FAILING]``: rank FAILING does HOW after a moment.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

from shardwise.comm import alive
from shardwise.comm.alarm import Member
from shardwise.comm.courier import Courier
from shardwise.comm.heart import Heart
from shardwise.core.errors import SyncError
from shardwise.core.flight import RECORDER
from shardwise.core.processes import process_id

TOKEN = b"0123456789abcdef"
MOMENT_S = 0.3
LIMIT_S = 30.0
HANDLING_S = 2.0


def everyone(folder: Path, world: int, name: str) -> list[str]:
    """What all ranks have written under a name."""
    while True:
        files = [folder / f"{name}-{rank}" for rank in range(world)]
        if all(file.exists() for file in files):
            return [file.read_text() for file in files]
        time.sleep(0.01)


def say(folder: Path, rank: int, name: str, text: str = "") -> None:
    (folder / f".{name}-{rank}").write_text(text)
    (folder / f".{name}-{rank}").rename(folder / f"{name}-{rank}")


def join(folder: Path, rank: int, world: int, timeout_s: float) -> Heart:
    """What ``alive.start`` does, with files for a control group. Every rank is on this host, except
    where the test says otherwise (a rank's host is in HOST)."""
    host = os.environ.get("HOST", "here")
    courier = Courier(rank, TOKEN, one_host="HOST" not in os.environ)
    ring = RECORDER.share(rank)
    say(folder, rank, "member", repr((host, os.getpid(), ring, courier.addresses)))
    members = []
    for other, text in enumerate(everyone(folder, world, "member")):
        where, pid, path, addresses = eval(text)
        courier.introduce(other, addresses)
        members.append(Member(other, where, process_id(pid), path))
    heart = Heart(members[rank], members, courier, timeout_s, alive.publish)
    say(folder, rank, "mapped")
    everyone(folder, world, "mapped")
    os.unlink(ring)
    alive.report_to(folder / "run")
    alive.adopt(heart, "now")
    heart.start()
    assert not heart.meet(), "whoever was never heard of is not watched"
    return heart


def fail(how: str, rank: int) -> None:
    everyone(Path(sys.argv[1]), int(sys.argv[3]), "beating")
    say(Path(sys.argv[1]), rank, "failed", str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ZeroDivisionError("divided by nothing")
    elif how == "leave":
        sys.exit(0)
    elif how == "vanish":
        os._exit(0)
    elif how == "sync":
        raise SyncError("rank 0 waited for rank 1")
    elif how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "handle":  # the program's own handler takes its time
        signal.signal(signal.SIGTERM, lambda *_: say(Path(sys.argv[1]), rank, "handled"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HANDLING_S)
        sys.exit(0)
    elif how == "hold":  # Python's lock, so that the heart cannot beat
        sys.setswitchinterval(1000)
        ctypes.PyDLL(None).usleep(int(1.5 * float(sys.argv[4]) * 1e6))
        sys.exit(0)


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    how = sys.argv[5]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = int(os.environ.get("FILES", "0"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(min(files, most - 50)):
        os.open("/dev/null", os.O_RDONLY)
    failing = {int(text) for text in sys.argv[6].split(",")}
    join(folder, rank, world, float(sys.argv[4]))
    RECORDER.stepped(7)
    RECORDER.point(f"forward blocks.{rank}")
    time.sleep(MOMENT_S)
    RECORDER.begin("gather", f"blocks.{rank}")
    say(folder, rank, "beating")
    if rank in failing:
        fail(how, rank)
    harmless = how in ("leave", "hold", "handle")
    time.sleep(2.5 * float(sys.argv[4]) if harmless else LIMIT_S)
    if harmless:
        sys.exit(0)
    sys.exit("nobody noticed")


if __name__ == "__main__":
    if "FORKED" in os.environ:
        child = multiprocessing.get_context("fork").Process(target=main)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    main()
