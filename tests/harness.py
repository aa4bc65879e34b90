"""Real processes for distributed tests: one spawn a test class, one function a case.

A ``Workers`` pool forks ``world`` gloo processes once, from a server that has imported what takes
long; ``pool.run(function, *args)`` calls the
function on every rank and returns the results in rank order, or raises what a rank raised. A pool
whose rank failed in a way that may have left the others out of step is started anew.
"""

import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

LIMIT_S = 120.0
PRELOAD = ["torch._dynamo", "shardwise.api", "pytest"]
"""What ranks find imported (the first optimizer asks for Dynamo). Test modules add what theirs need
while they are collected: the server starts with the first pool."""


class WorkerError(AssertionError):
    """What a rank raised, with its traceback."""


def peak_rss_bytes() -> int:
    """The largest resident size that this process has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Prepare = Callable[[int, int], dict[str, Any]]
"""Called on each rank before anything else, with its rank and the world: loads what the rank needs,
and returns what ``init_process_group`` gets besides rank and world."""


def gloo_ranks(rank: int, world: int) -> dict[str, Any]:
    return {"backend": "gloo"}


def _serve(rank: int, world: int, port: int, pipe: Any, prepare: Prepare) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
    )
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(rank=rank, world_size=world, **prepare(rank, world))
    except BaseException as error:  # sent to the test
        pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
        os._exit(1)
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, args, kwargs = job
        try:
            pipe.send(("ok", function(*args, **kwargs)))
        except BaseException as error:  # sent to the test
            pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
    if "shardwise.comm.alive" in sys.modules:  # the others need not wonder
        sys.modules["shardwise.comm.alive"].leave()
    # gloo sometimes aborts in its own teardown; the results are delivered, so leave at once.
    os._exit(0)


class Workers:
    """A pool of ranks; ``prepare`` makes them more than gloo processes."""

    def __init__(self, world: int, prepare: Prepare = gloo_ranks) -> None:
        self.world = world
        self._prepare = prepare
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, port, there, self._prepare), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for rank in range(self.world):
            outcome, what = self._receive(rank, time.monotonic() + LIMIT_S)
            if outcome == "error":
                self.stop()
                raise WorkerError(f"rank {rank} did not start:\n{what[2]}")

    def run(
        self, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S, **kwargs: Any
    ) -> list[Any]:
        """Calls a module-level function on every rank; results in rank order."""
        if not self._processes:
            self.start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + limit_s
        outcomes = []
        for rank in range(self.world):
            try:
                outcomes.append(self._receive(rank, deadline))
                if outcomes[-1][0] == "error":  # the others may wait for this one in vain
                    deadline = min(deadline, time.monotonic() + 10)
            except (TimeoutError, EOFError) as error:
                if any(kind == "error" for kind, _ in outcomes):
                    break
                self.stop()
                raise WorkerError(
                    f"rank {rank} gave no answer to {function.__name__}: {error!r}"
                ) from None
        errors = [(r, out[1]) for r, out in enumerate(outcomes) if out[0] == "error"]
        if errors:
            self.stop()  # ranks may be out of step now
            text = "\n".join(
                f"--- rank {rank}: {name}: {message}\n{trace}"
                for rank, (name, message, trace) in errors
            )
            raise WorkerError(f"{function.__name__} failed:\n{text}")
        return [out[1] for out in outcomes]

    def _receive(self, rank: int, deadline: float) -> tuple[str, Any]:
        if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} is late")
        answer: tuple[str, Any] = self._pipes[rank].recv()
        return answer

    def stop(self) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError, OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes.clear()
        self._processes.clear()
