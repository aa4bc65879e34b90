"""What users ask when numbers go wrong, or when a scheduler wants the job to end."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.api import runtime_of
from shardwise.comm import alive
from shardwise.runtime.surface import nonfinite
from shardwise.runtime.surface.nonfinite import Nonfinite


def find_nonfinite(model: nn.Module, forward: Callable[[], Any] | None = None) -> Nonfinite | None:
    """The first place with a NaN or an Inf, or None; collective, and equal on all ranks.

    Call it between backward and the step, when the norm from ``clip_grad_norm_`` (or the mean loss)
    is not finite: that is the same on all ranks. It looks at parameters, then at the outputs of all
    modules while ``forward`` runs again (without gradients), then at gradients, in the order of
    backward. Before there is a NaN it costs nothing.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()))
    >>> batch = torch.full((1, 4), torch.inf)
    >>> model(batch).sum().backward()
    >>> if not sw.clip_grad_norm_(model, 1.0).isfinite():
    ...     print(sw.find_nonfinite(model, lambda: model(batch)).name)
    0
    """
    return nonfinite.find_nonfinite(runtime_of(model), forward)


_asked = threading.Event()
"""Whether this process was asked to end."""


def preempted(model: nn.Module) -> bool:
    """Whether a scheduler has asked any rank to end (SIGTERM); collective, equal on all ranks.

    From the first call on a SIGTERM does not end the process, unless another rank has failed. Call
    it after each step; when it is true save a checkpoint, and end. If the program has a handler
    of its own for SIGTERM, that is called instead, and this stays false.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> sw.preempted(model)
    False
    """
    alive.on_sigterm(_asked.set)
    asked = torch.tensor([int(_asked.is_set())])
    control = runtime_of(model).grid.control
    return bool(control.highest(asked, "question whether the job shall end")[0])
