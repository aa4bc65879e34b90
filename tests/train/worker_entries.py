"""What the workers of the launch tests run."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from shardwise.core.errors import PlanError


def report(word: str) -> dict[str, object]:
    """Sum over the ranks, and how this worker was set up."""
    total = torch.ones(())
    dist.all_reduce(total)
    return {"word": word, "sum": total.item(), "threads": os.environ["OMP_NUM_THREADS"]}


def fail(rank: int, how: str) -> None:
    """One rank fails while the others wait for it."""
    if dist.get_rank() == rank:
        if how == "mistake":
            raise PlanError("this plan does not fit")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("the loss was divided by nothing\nand more")
    dist.barrier()


def wait() -> None:
    """Tell that this worker runs, then wait to be ended."""
    os.write(sys.stdout.fileno(), f"{os.getpid()}\n".encode())  # one write: lines stay whole
    time.sleep(600)


if __name__ == "__main__":
    from shardwise.train import launch

    launch.run("worker_entries:wait", {}, workers=int(sys.argv[1]))
