"""One worker process, started by `launch`: join the process group, run the job, leave the group.

Importing this module does not import torch: a worker first makes sure that it cannot outlive its
launcher.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from shardwise.core.errors import ShardwiseError
from shardwise.train.launch import ANSWER_FILE, ERROR_FILE, USER_MISTAKES, Watching

_PR_SET_PDEATHSIG = 1
"""From the kernel's prctl.h."""


def main() -> NoReturn:
    """Run the job in the directory given as argument, write the answer or error there, and exit."""
    job_dir = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    job = json.loads((job_dir / "job.json").read_text(encoding="utf-8"))
    _die_with(job["launcher_pid"])
    try:
        answer = call(job["entry"], job["arguments"], Watching(**job["watching"]))
        if rank == 0:
            _write(job_dir / ANSWER_FILE, answer)
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except Exception as error:  # of any kind: the launcher reports it
        _write(job_dir / ERROR_FILE.format(rank=rank), _describe(error, rank))
        _die_of(error)
        code = 1
    leave(code)


def call(entry: str, arguments: dict[str, Any], watching: Watching) -> Any:
    """Call `entry` ("module:function") as a member of the process group."""
    module, _, function = entry.partition(":")
    with process_group(watching):
        return getattr(importlib.import_module(module), function)(**arguments)


@contextmanager
def process_group(watching: Watching) -> Iterator[None]:
    """Join the process group that torchrun's environment describes; leave it with the others."""
    import torch.distributed as dist

    from shardwise.comm import alive, watch
    from shardwise.comm.control import Control
    from shardwise.device.choice import local_device, make_current, process_group_options

    dist.init_process_group(**process_group_options(make_current(local_device())))
    control = Control(dist.get_world_size(), dist.get_rank(), watching.patience_s)
    folder = control.broadcast_object(watching.folder or "", "choice of the run's folder")
    watch.start(control, watching.timeout_s, str(folder) or None, prints=watching.prints)
    # No `finally`: after an error, destroying a group can wait for peers that will never answer.
    yield
    dist.barrier()
    alive.leave()
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process without running C++ destructors.

    gloo's threads sometimes abort the interpreter's regular exit after all work is done. By now the
    result is on disk, so skipping the destructors hides no failure.
    """
    if "shardwise.comm.alive" in sys.modules:
        from shardwise.comm import alive

        alive.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_of(error: Exception) -> None:
    """Say it to the other ranks, and end with them when all know."""
    if "torch.distributed" in sys.modules:
        from shardwise.comm import alive

        alive.die_of(error)


def _describe(error: BaseException, rank: int) -> dict[str, Any]:
    text = str(error).strip()
    if isinstance(error, ShardwiseError):
        sentence = text
    else:
        first_line = text.splitlines()[0] if text else ""
        sentence = f"{type(error).__name__}: {first_line}" if text else type(error).__name__
    return {
        "rank": rank,
        "time_ns": time.time_ns(),
        "is_mistake": isinstance(error, USER_MISTAKES),
        "is_ours": isinstance(error, ShardwiseError),
        "is_final": getattr(error, "is_final", False),
        "sentence": sentence,
        "traceback": "".join(traceback.format_exception(error)),
    }


def _write(path: Path, content: Any) -> None:
    """Write JSON so that the launcher sees either the whole file or none."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def _die_with(launcher_pid: int) -> None:
    """Ask the kernel to kill this worker when its launcher ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher_pid:  # it ended before prctl
            os._exit(1)


if __name__ == "__main__":
    main()
