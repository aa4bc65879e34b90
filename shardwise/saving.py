"""``save`` and ``load``: training checkpoints for any plan and any number of ranks."""

import operator
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn
from torch.optim import Optimizer

from shardwise.api import runtime_of
from shardwise.checkpoint.training import load as loading
from shardwise.checkpoint.training import save as writing
from shardwise.checkpoint.training.background import Pending
from shardwise.checkpoint.training.load import Resumed
from shardwise.core.errors import UsageError
from shardwise.runtime.optimizer.kinds import check_elementwise
from shardwise.runtime.optimizer.takeover import OptimizerTakeover
from shardwise.runtime.runtime import Runtime


@overload
def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = ...,
    *,
    scheduler: Any = ...,
    step: int | None = ...,
    extra: Any = ...,
    only: Literal["trained"] | None = ...,
    asynchronous: Literal[False] = ...,
) -> None: ...


@overload
def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = ...,
    *,
    scheduler: Any = ...,
    step: int | None = ...,
    extra: Any = ...,
    only: Literal["trained"] | None = ...,
    asynchronous: Literal[True],
) -> Pending: ...


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    step: int | None = None,
    extra: Any = None,
    only: Literal["trained"] | None = None,
    asynchronous: bool = False,
) -> Pending | None:
    """Saves a training run between two steps, each rank its shards; collective.

    The folder can be loaded under any plan and by any number of ranks. It appears when all of it is
    on the disk and replaces an older checkpoint of the same name; all ranks must see the same file
    system. If its name ends with a number, as in ``run/step-100``, a file ``latest`` beside it
    names it. Random states of all ranks are saved as well. The format is that of torch's
    distributed checkpoints, which FSDP2 and others read.

    - ``scheduler``: anything with a ``state_dict`` of numbers, texts, lists, dicts and tensors.
    - ``step``, ``extra``: come back from ``load``; ``extra`` may have what a scheduler may.
    - ``only``: with ``"trained"`` frozen parameters and buffers are left out.
    - ``asynchronous``: return at once, and write beside the next forward and backward; the
      optimizer's next step waits until all shards were read. An error is raised by the next step or
      save. Call ``wait()`` on what is returned before the program ends.

    >>> import tempfile, torch, shardwise as sw
    >>> model = torch.nn.Linear(4, 2)
    >>> model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()))
    >>> folder = tempfile.mkdtemp()
    >>> sw.save(f"{folder}/step-3", model, optimizer, step=3, extra={"seen": 96})
    >>> sw.load(folder, model, optimizer).extra
    {'seen': 96}
    """
    if only not in (None, "trained"):
        raise UsageError(f"only={only!r} is not known; pass only='trained', or omit it.")
    trained, step = only == "trained", _checked_step(step)
    _check_parts(optimizer, scheduler)
    request = writing.Request(Path(path), optimizer, scheduler, step, extra, trained, asynchronous)
    return writing.save_checkpoint(runtime_of(model), request)


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    strict: bool = True,
    random: bool = True,
) -> Resumed:
    """Restores what ``save`` wrote, under this model's own plan; collective.

    Every rank reads what its shards need, and checks it. Under the plan and world that it was saved
    with, training goes on with the same bits. Everything that does not fit is listed in one error
    before anything is written.

    - ``path``: a checkpoint, or a folder of numbered ones, of which ``latest`` is loaded.
    - ``scheduler``: gets its state back.
    - ``strict``: if False, parameters that only the model or only the checkpoint has are returned
      instead; the optimizer begins anew with those that only the model has.
    - ``random``: whether Python's, numpy's and torch's generators go on where they were saved.

    >>> import tempfile, torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> folder = tempfile.mkdtemp()
    >>> sw.save(f"{folder}/weights", model, step=7)
    >>> sw.load(f"{folder}/weights", model).step
    7
    """
    runtime = runtime_of(model)
    _check_parts(optimizer, scheduler)
    if optimizer is not None and runtime.steps.takeover_of(optimizer) is None:
        _take_over(runtime, optimizer)
    request = loading.Request(Path(path), optimizer, scheduler, strict, random)
    return loading.load_checkpoint(runtime, request)


def _checked_step(step: object) -> int | None:
    """A whole number of any kind (numpy's, a tensor) as Python's."""
    if step is None:
        return None
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"step={step!r} is not a number of steps; pass 0, 1, 2 ..., or omit it.")
    return number


def _check_parts(optimizer: object, scheduler: object) -> None:
    if not isinstance(optimizer, Optimizer | None):
        raise UsageError(
            f"A {type(optimizer).__name__} was given as the optimizer; pass the one that shard "
            "got, and a scheduler as scheduler=."
        )
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise UsageError(
            f"scheduler={scheduler!r} has no state_dict; pass a scheduler, and other values as "
            "extra=."
        )


def _take_over(runtime: Runtime, optimizer: Optimizer) -> None:
    """An optimizer that was built after ``shard`` has not stepped yet."""
    check_elementwise(optimizer, False)
    OptimizerTakeover(runtime, optimizer)
