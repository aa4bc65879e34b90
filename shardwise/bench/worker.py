"""One rank of a benchmark's job: builds contenders and trains on request of the parent.

Started by torchrun in a node of the cluster as `python -m shardwise.bench.worker SOCKET NODE`.
"""

import gc
import importlib
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardwise.bench.cluster import INTERFACE, die_with_parent
from shardwise.bench.messages import (
    Build,
    Call,
    Counted,
    Drop,
    Failed,
    Hello,
    Leave,
    Measured,
    Ready,
    Returned,
    Setting,
    Turn,
)
from shardwise.core.errors import ShardwiseError
from shardwise.train.launch import USER_MISTAKES
from shardwise.train.worker import leave

if TYPE_CHECKING:
    from shardwise.bench.contenders import Contender


@dataclass
class _Entry:
    """A contender of this rank, and how many steps it has trained."""

    contender: "Contender"
    setting: Setting
    num_steps: int = field(default=0)


def main() -> NoReturn:
    """Serve the parent until it sends Leave."""
    die_with_parent()
    parent = Client(sys.argv[1], family="AF_UNIX")
    parent.send(Hello(int(os.environ["RANK"]), int(sys.argv[2]), os.getpid()))
    try:
        _serve(parent)
    except EOFError:
        leave(1)  # the parent has ended
    except Exception as error:  # of any kind: the parent reports it
        parent.send(_describe(error))
        leave(1)
    leave(0)


def _serve(parent: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    entries: dict[str, _Entry] = {}
    while not isinstance(message := parent.recv(), Leave):
        if isinstance(message, Build):
            entries[message.contender] = _build(message)
            parent.send(Ready())
        elif isinstance(message, Drop):
            dist.barrier()
            entries.pop(message.contender).contender.close()
            gc.collect()
            parent.send(Ready())
        elif isinstance(message, Turn):
            parent.send(_train(entries[message.contender], message))
        elif isinstance(message, Call):
            parent.send(_call(message))
    dist.barrier()


def _build(message: Build) -> _Entry:
    from shardwise.bench.contenders import build
    from shardwise.probing.matmul import compute_in_float32

    if message.setting.in_float32:
        compute_in_float32()
    return _Entry(build(message.contender, message.setting), message.setting)


def _train(entry: _Entry, turn: Turn) -> Measured:
    import torch.distributed as dist

    if turn.warmup:
        _run(entry, turn.warmup, drained=turn.drained)
    # Counters of all nodes are read between two barriers: if drained, while no node sends.
    dist.barrier()
    sent, received = _count("tx"), _count("rx")
    dist.barrier()
    begin = time.perf_counter()
    loss, ends = _run(entry, turn.steps, drained=turn.drained)
    dist.barrier()
    seconds = time.perf_counter() - begin
    entry.contender.drain()  # this turn's messages must not be on the link in the next one
    steps_s = tuple(end - before for before, end in pairwise([begin, *ends]))
    return Measured(seconds, steps_s, loss, _count("tx") - sent, _count("rx") - received)


def _call(message: Call) -> Returned:
    module, _, function = message.entry.partition(":")
    return Returned(getattr(importlib.import_module(module), function)(**message.arguments))


def _run(entry: _Entry, steps: int, *, drained: bool) -> tuple[float, list[float]]:
    """The loss of the last step, and when each step ended."""
    from shardwise.bench.contenders import batch

    loss, ends = float("nan"), []
    for _ in range(steps):
        loss = entry.contender.step(batch(entry.setting, entry.num_steps))
        ends.append(time.perf_counter())
        entry.num_steps += 1
    if drained:
        entry.contender.drain()
    return loss, ends


def _count(direction: str, root: Path = Path("/sys/class/net")) -> Counted:
    """This node's counter; torchrun was started with the /sys of its namespace."""
    folder = root / INTERFACE / "statistics"
    num_bytes, num_packets = (
        int((folder / f"{direction}_{what}").read_text()) for what in ("bytes", "packets")
    )
    return Counted(num_bytes, num_packets)


def _describe(error: Exception) -> Failed:
    text = str(error).strip()
    if not isinstance(error, ShardwiseError):
        first_line = text.splitlines()[0] if text else ""
        text = f"{type(error).__name__}: {first_line}" if text else type(error).__name__
    trace = "".join(traceback.format_exception(error))
    return Failed(text, trace, isinstance(error, USER_MISTAKES))


if __name__ == "__main__":
    main()
