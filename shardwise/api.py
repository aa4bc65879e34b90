"""shard() and its companions: the one place that wires the packages together."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.checkpoint.export import DEFAULT_SHARD_BYTES, Options, export_model
from shardwise.checkpoint.pretrained import Loaded, load_model
from shardwise.comm.grid import DEFAULT_LIMIT_S, Grid, find_place
from shardwise.core.errors import UsageError
from shardwise.core.sizes import parse_bytes
from shardwise.core.topology import Topology
from shardwise.core.trace import Trace, recording
from shardwise.model.units import find_units, spec_of
from shardwise.plans.facts import Run
from shardwise.plans.file import load_plan
from shardwise.plans.plan import Plan
from shardwise.plans.validate import check
from shardwise.runtime import build, hooks, tiles
from shardwise.runtime.activations import recompute
from shardwise.runtime.optimizer.takeover import OptimizerTakeover, check_elementwise, watch
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import access

_runtimes: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weak on both sides: the model's hooks hold its runtime, which holds the model."""


@overload
def shard(
    model: nn.Module,
    optimizer: None = None,
    plan: Plan | str | PathLike[str] = ...,
    *,
    levels: str | Topology | None = ...,
    elementwise: bool = ...,
    timeout_s: float = ...,
    micro_batch: int = ...,
    accumulate: int = ...,
    seq: int | None = ...,
    lossless: bool = ...,
    path: str | PathLike[str] | None = ...,
    run: Run | None = ...,
) -> nn.Module: ...


@overload
def shard(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan | str | PathLike[str] = ...,
    *,
    levels: str | Topology | None = ...,
    elementwise: bool = ...,
    timeout_s: float = ...,
    micro_batch: int = ...,
    accumulate: int = ...,
    seq: int | None = ...,
    lossless: bool = ...,
    path: str | PathLike[str] | None = ...,
    run: Run | None = ...,
) -> tuple[nn.Module, Optimizer]: ...


def shard(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    plan: Plan | str | PathLike[str] = "zero3",
    *,
    levels: str | Topology | None = None,
    elementwise: bool = False,
    timeout_s: float = DEFAULT_LIMIT_S,
    micro_batch: int = 1,
    accumulate: int = 1,
    seq: int | None = None,
    lossless: bool = False,
    path: str | PathLike[str] | None = None,
    run: Run | None = None,
) -> Any:
    """Shards a model (and its optimizer) in place over all ranks; collective.

    ``plan`` is a preset's name, a plan file, a Plan, or ``auto``: the fastest that fits, for
    ``accumulate`` micro-batches a step of ``micro_batch`` sequences of ``seq`` tokens on each rank;
    ``lossless`` allows it no hop in fewer bits, ``path`` is a folder on a disk where states may
    rest, and ``run(model, micro_batch, seq)`` runs a forward with its loss, for models that do not
    take ``(input_ids, labels)``. ``levels`` describes the grid, innermost first
    (``node=2,world=2``); by default it comes from torchrun. The model and the optimizer come back
    as the same objects. Values: a model built in ``deferred_init`` is materialised unit by unit,
    straight into parts; otherwise rank 0's values win. An optimizer that is built later is taken
    over when it first steps. ``elementwise`` vouches for optimizer classes that shardwise does not
    know. A rank that waits for another for more than ``timeout_s`` seconds raises a SyncError that
    names the unit and the ranks.

        >>> import torch, shardwise as sw
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = sw.shard(model, optimizer, plan="zero3")
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """
    if model in _runtimes:
        raise UsageError(
            f"This {type(model).__name__} is sharded already; shardwise.unshard(model) first."
        )
    nested = [name for name, module in model.named_modules() if name and module in _runtimes]
    if nested:
        raise UsageError(
            f"Module '{nested[0]}' of this {type(model).__name__} is sharded already; shard the "
            "whole model once, and use per-unit overrides for other spreads."
        )
    if optimizer is not None:
        check_elementwise(optimizer, elementwise)
    candidate = None
    if plan == "auto":
        from shardwise import auto

        candidate = auto.choose(
            model,
            levels=levels,
            micro_batch=micro_batch,
            accumulate=accumulate,
            seq=seq,
            path=str(path or ""),
            loss=auto.Loss.NONE if lossless else auto.Loss.SAFE,
            run=run,
        )
        plan = candidate.plan
    else:
        _check_unplanned(lossless=lossless, path=path, run=run)
    chosen = load_plan(plan)
    device = build.target_device(model)
    if device.type == "cpu":
        chosen = chosen.without_accelerator()
    place = find_place(levels, device)
    members = find_units(model, chosen, place.topology)
    spec = spec_of(members, place.world)
    check(chosen, place.topology, spec)
    grid = Grid.build(place, device, timeout_s)
    runtime = build.build_runtime(model, chosen, grid, members, spec)
    hooks.install(runtime)
    tiles.install(runtime)
    disk = runtime.homes.disk
    recompute.install(runtime, disk and disk.store, disk and disk.pool)
    if optimizer is not None:
        try:
            OptimizerTakeover(runtime, optimizer)
        except BaseException:
            runtime.homes.close()
            raise
    watch(runtime, elementwise)
    if candidate is not None:
        auto.compare_soon(runtime, candidate)
    _runtimes[model] = weakref.ref(runtime)
    weakref.finalize(model, grid.end_lanes)
    weakref.finalize(model, runtime.homes.close)
    return model if optimizer is None else (model, optimizer)


def _check_unplanned(**given: object) -> None:
    """Refuses what only ``plan='auto'`` asks for: it would change nothing."""
    for name, value in given.items():
        if value:
            raise UsageError(
                f"{name}={value} is for plan='auto'; this plan has wires and tiers of its own, so "
                f"leave {name} away, or change the plan."
            )


def unshard(model: nn.Module) -> nn.Module:
    """Undoes ``shard``: plain parameters with full values on every rank, no hooks; collective.

    The optimizer keeps working on the same parameters, but its states are dropped.
    """
    runtime = runtime_of(model)
    runtime.require_idle("unshard", before_step=True)
    build.restore(runtime)
    del _runtimes[model]
    return model


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model."""
    found = _runtimes.get(model)
    runtime = found() if found is not None else None
    if runtime is None:
        raise UsageError(
            f"This {type(model).__name__} is not sharded; pass the model that shardwise.shard got."
        )
    assert isinstance(runtime, Runtime)
    return runtime


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Backward passes inside only accumulate: gradients rest on G's rung until the next outside.

    Saves the outer hops of all micro-batches but the last of a step.
    """
    return runtime_of(model).without_sync()


@contextmanager
def full_params(
    model: nn.Module, module: nn.Module | None = None, *, write: bool = False
) -> Iterator[None]:
    """Inside, all parameters (or those of a sub-module) have their full values; collective.

    With ``write=True`` rank 0's changes come back to all shards at the end.
    """
    with access.full_params(runtime_of(model), module or model, write):
        yield


def state_dict(
    model: nn.Module, *, rank0_only: bool = True, master: bool = False
) -> dict[str, torch.Tensor]:
    """Full parameters and buffers by name on rank 0 (or everywhere), streamed; collective.

    ``master=True`` gives the optimizer's master weights where they are kept.
    """
    return access.state_dict(runtime_of(model), rank0_only=rank0_only, master=master)


def export(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | str = DEFAULT_SHARD_BYTES,
    master: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes the model as a folder of safetensors files that transformers loads; collective.

    Units are gathered one after another, and rank 0 writes each parameter to its place at once: no
    rank ever holds more than one unit. ``dtype`` converts all floating-point values; files are cut
    at ``max_shard_bytes`` (a number, or a text such as ``"5 GB"``); ``master=True`` writes the
    optimizer's master weights where they are kept (rank 0 then holds a unit twice). Tied parameters
    are written once, under their first name. A model with a transformers configuration gets its
    ``config.json``.

    The folder appears when it is whole. One that is not empty is an error, unless
    ``overwrite=True`` replaces the weights in it; its other files stay.
    """
    options = Options(dtype, parse_bytes(max_shard_bytes, "max_shard_bytes"), master, overwrite)
    export_model(runtime_of(model), Path(path), options)


def load_pretrained(model: nn.Module, path: str | PathLike[str], *, strict: bool = True) -> Loaded:
    """Reads a safetensors file, or a folder of them, into a sharded model; collective.

    Every rank reads the files itself, one tensor at a time, and keeps its parts; all ranks must see
    the same files. Dtypes are converted, and master weights keep the files' precision. Names and
    shapes that do not fit are listed in one error before anything is written; with
    ``strict=False`` missing and unexpected names are returned instead. The optimizer's states stay
    as they are.
    """
    return load_model(runtime_of(model), Path(path), strict=strict)


def full_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """The reduced gradients in full, by name, on every rank; collective."""
    return access.full_grads(runtime_of(model))


def optim_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's states in full, by parameter name, on every rank; collective."""
    return access.optim_state_dict(runtime_of(model), optimizer)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over the gradients of all ranks; collective.

    ``foreach`` as there: None takes torch's foreach kernels where the device has them, False loops
    over tensors, True insists on them.
    """
    return access.clip_grad_norm_(
        runtime_of(model), max_norm, float(norm_type), error_if_nonfinite, foreach
    )


def set_grad_divisor(model: nn.Module, divisor: float) -> None:
    """What summed gradients are divided by from the next backward on (default: number of ranks).

    For token-weighted losses: make each rank's loss a sum, and divide by the tokens of all ranks.
    Set it before the first backward of a step.
    """
    if not divisor > 0:
        raise UsageError(f"The gradient divisor must be positive, got {divisor}.")
    runtime_of(model).executor.divisor = float(divisor)


@contextmanager
def trace(path: str | PathLike[str]) -> Iterator[None]:
    """Records what this rank does inside, as a file that Chrome's tracing and Perfetto open.

    Tracks: forward and backward of units, gathers and refreshes, reductions, updates of windows,
    and each thread that reads and writes a disk. With several ranks give each its own path.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with recording(Trace()) as recorded:
        yield
    recorded.save(path, rank=rank)


def stats(model: nn.Module) -> dict[str, Any]:
    """What happened beyond the plan, memory of buffers, and how ranks meet.

    The counters are zero when ranks and passes agree. ``links`` says for each level whether its
    ranks read each other's memory, send messages, or use NCCL.
    """
    runtime = runtime_of(model)
    counters = runtime.counters
    return {
        "extra_gathers": counters.extra_gathers,
        "skipped_gathers": counters.skipped_gathers,
        "late_reduces": counters.late_reduces,
        "param_buffers_peak_bytes": runtime.pools.params.peak_bytes,
        "grad_buffers_peak_bytes": runtime.pools.grads.peak_bytes,
        "wire_buffers_bytes": runtime.carriers.held_bytes,
        "links": runtime.grid.link_kinds,
    }
