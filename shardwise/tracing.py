"""``sw.trace``: what a rank does, as a file for Perfetto."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

import torch

from shardwise.core.trace import Trace, recording


@contextmanager
def trace(path: str | PathLike[str]) -> Iterator[None]:
    """Records what this rank does inside, in a file that Perfetto and Chrome's tracing open.

    There are tracks for forward and backward of units, gathers and refreshes, reductions, updates,
    and each thread that reads or writes a disk. With several ranks give each a path of its own.

    >>> import tempfile, torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> with sw.trace(f"{tempfile.mkdtemp()}/step.json"):
    ...     model(torch.ones(1, 4)).sum().backward()
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with recording(Trace()) as recorded:
        yield
    recorded.save(path, rank=rank)
