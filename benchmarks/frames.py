"""How many of our Python frames one backward passes, and how often they change file.

    python benchmarks/frames.py [--fsdp2]

Two ranks, a model of three blocks, fully sharded, after its first steps: every call of one of our
functions during one ``backward()`` counts, in the thread that runs it. That is what a newcomer
passes who follows a gradient with a debugger.
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, 128, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counter:
    """The files of the frames passed, of functions in files below some folders."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._folders):
            self.files.append(frame.f_code.co_filename)

    def report(self, what: str) -> None:
        changes = sum(one != other for one, other in pairwise(self.files))
        print(
            f"{what}: {len(self.files)} frames in {len(set(self.files))} files with {changes} "
            "changes of file"
        )


def count(rank: int, port: str, fsdp2: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Model()
    shard: Callable[[Model], tuple[str, ...]] = _fsdp2 if fsdp2 else _ours
    counter = Counter(shard(model))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        if step == 3:
            sys.setprofile(counter)
        loss.backward()
        sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        counter.report("FSDP2" if fsdp2 else "shardwise, zero3")
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts in its own teardown


def _ours(model: Model) -> tuple[str, ...]:
    from dataclasses import replace

    import shardwise as sw

    sw.shard(model, plan=replace(sw.presets.zero3(), min_unit_numel=1000), levels="world=2")
    return (os.path.dirname(sw.__file__),)


def _fsdp2(model: Model) -> tuple[str, ...]:
    from torch.distributed.fsdp import _fully_shard as package
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return (os.path.dirname(package.__file__),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fsdp2", action="store_true", help="count FSDP2's frames instead")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mp.spawn(count, (port, args.fsdp2), nprocs=2)


if __name__ == "__main__":
    main()
