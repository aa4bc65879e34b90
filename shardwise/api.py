"""shard() and its companions: the one place that wires the packages together."""

import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import auto
from shardwise.checkpoint.export import DEFAULT_SHARD_BYTES, Options, export_model
from shardwise.checkpoint.pretrained import Loaded, load_model
from shardwise.comm.grid import Grid, find_place
from shardwise.comm.limits import Limits
from shardwise.core.errors import UsageError
from shardwise.core.sizes import parse_bytes
from shardwise.core.topology import Topology
from shardwise.device.abilities import separate_memory
from shardwise.device.choice import Asked
from shardwise.model.units import find_units, spec_of
from shardwise.plans.auto import Auto
from shardwise.plans.file import load_plan
from shardwise.plans.plan import Plan
from shardwise.plans.validate import check
from shardwise.runtime import build, hooks, tiles
from shardwise.runtime.activations import recompute
from shardwise.runtime.optimizer.kinds import check_elementwise
from shardwise.runtime.optimizer.takeover import OptimizerTakeover, watch
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import access, norms
from shardwise.runtime.target import say_target, target_device

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_runtimes: MutableMapping[nn.Module, weakref.ref[Runtime]] = WeakIdKeyDictionary()
"""Weak on both sides: the model's hooks hold its runtime, which holds the model."""


@overload
def shard(
    model: AnyModule,
    optimizer: None = None,
    plan: Plan | Auto | str | PathLike[str] = ...,
    *,
    levels: str | Topology | None = ...,
    elementwise: bool = ...,
    timeout_s: float | None = ...,
    patience_s: float | None = ...,
    run: str | PathLike[str] | None = ...,
    device: Asked = ...,
) -> AnyModule: ...


@overload
def shard(
    model: AnyModule,
    optimizer: AnyOptimizer,
    plan: Plan | Auto | str | PathLike[str] = ...,
    *,
    levels: str | Topology | None = ...,
    elementwise: bool = ...,
    timeout_s: float | None = ...,
    patience_s: float | None = ...,
    run: str | PathLike[str] | None = ...,
    device: Asked = ...,
) -> tuple[AnyModule, AnyOptimizer]: ...


def shard(
    model: AnyModule,
    optimizer: AnyOptimizer | None = None,
    plan: Plan | Auto | str | PathLike[str] = "zero3",
    *,
    levels: str | Topology | None = None,
    elementwise: bool = False,
    timeout_s: float | None = None,
    patience_s: float | None = None,
    run: str | PathLike[str] | None = None,
    device: Asked = None,
) -> AnyModule | tuple[AnyModule, AnyOptimizer]:
    """Shards a model (and its optimizer) in place over all ranks; collective.

    The model and the optimizer come back as the same objects. A model built in ``deferred_init`` is
    materialised unit by unit, straight into shards; otherwise rank 0's values win. An optimizer
    that is built later is taken over at its first step.

    - ``plan``: a preset's name, a plan file, a Plan, or an Auto, which probes the ranks and takes
      the fastest plan that fits (``"auto"`` is short for ``Auto()``).
    - ``levels``: the grid of ranks, innermost level first (``node=2,world=2``); by default
      torchrun's ranks per node, and nodes.
    - ``elementwise``: vouches that an optimizer class unknown to shardwise updates every element
      on its own.
    - ``timeout_s``: all ranks end within so long, with one report, when a rank was killed or
      stopped or cannot be reached; 60 by default.
    - ``patience_s``: a rank that waits longer than this for one that lives raises a SyncError that
      names the unit and the ranks; ``timeout_s`` by default, and 600 without it.
    - ``run``: the folder for reports of failures; by default ``shardwise-failures`` here.
    - ``device``: where the model trains; by default the accelerator that it is on, else the
      accelerator of this rank (LOCAL_RANK), to which it moves, else the CPU.

    >>> import torch, shardwise as sw
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = sw.shard(model, optimizer, plan="zero3")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """
    _require_unsharded(model)
    if optimizer is not None:
        check_elementwise(optimizer, elementwise)
    candidate = None
    if plan == "auto":
        plan = Auto()
    if isinstance(plan, Auto):
        candidate = auto.choose(model, plan, levels=levels, device=device)
        plan = candidate.plan
    limits = Limits.of(timeout_s, patience_s, run)
    runtime = _build(model, load_plan(plan), levels, limits, target_device(model, device))
    _install(runtime, optimizer, elementwise)
    if candidate is not None:
        auto.compare_soon(runtime, candidate)
    _remember(model, runtime)
    return model if optimizer is None else (model, optimizer)


def _require_unsharded(model: nn.Module) -> None:
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


def _build(
    model: nn.Module,
    plan: Plan,
    levels: str | Topology | None,
    limits: Limits,
    device: torch.device,
) -> Runtime:
    """Checks the plan on this grid and moves the model's values into shards; collective."""
    plan = plan.on_accelerator() if separate_memory(device) else plan.without_accelerator()
    place = find_place(levels, device)
    members = find_units(model, plan, place.topology)
    spec = spec_of(members, place.world)
    check(plan, place.topology, spec)
    grid = Grid.build(place, device, limits)
    say_target(model, device)
    return build.build_runtime(model, plan, grid, members, spec)


def _install(runtime: Runtime, optimizer: Optimizer | None, elementwise: bool) -> None:
    """Puts the runtime between the model, autograd and the optimizer."""
    hooks.install(runtime)
    tiles.install(runtime)
    homes = runtime.homes
    # Buffers of inputs are of the same pool as those of states, so that one budget holds for both.
    recompute.install(runtime, None if homes.disk is None else homes.disk.store, homes.host)
    if optimizer is not None:
        try:
            OptimizerTakeover(runtime, optimizer)
        except BaseException:
            runtime.homes.close()
            raise
    watch(runtime, elementwise)


def _remember(model: nn.Module, runtime: Runtime) -> None:
    """Keeps the runtime for the other functions, and frees its resources with the model."""
    _runtimes[model] = weakref.ref(runtime)
    weakref.finalize(model, runtime.grid.end_lanes)
    weakref.finalize(model, runtime.homes.close)


def unshard(model: AnyModule) -> AnyModule:
    """Undoes ``shard``: plain parameters with full values on every rank, no hooks; collective.

    The optimizer keeps working on the same parameters, but its states are dropped.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> sw.unshard(model).weight.sum().isfinite()
    tensor(True)
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
    return runtime


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """For gradient accumulation: backward inside reduces gradients only as far as G's rung.

    The next backward outside runs the remaining hops, so that they run once per step.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> with sw.no_sync(model):
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> sw.full_grads(model)["bias"]
    tensor([2., 2.])
    """
    return runtime_of(model).without_sync()


@contextmanager
def full_params(
    model: nn.Module, module: nn.Module | None = None, *, write: bool = False
) -> Iterator[None]:
    """Inside, all parameters (or those of ``module``) have their full values; collective.

    With ``write=True`` rank 0's changes are written to the shards of all ranks at the end.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> with sw.full_params(model, write=True):
    ...     _ = torch.nn.init.zeros_(model.weight)
    >>> sw.state_dict(model)["weight"].abs().max()
    tensor(0.)
    """
    with access.full_params(runtime_of(model), module or model, write):
        yield


def state_dict(
    model: nn.Module, *, rank0_only: bool = True, master: bool = False
) -> dict[str, torch.Tensor]:
    """Full parameters and buffers by name, gathered unit by unit; collective.

    Only rank 0 gets them (the others get an empty dict) unless ``rank0_only=False``.
    ``master=True`` gives the optimizer's master weights instead, where there are any.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> {name: tuple(value.shape) for name, value in sw.state_dict(model).items()}
    {'weight': (2, 4), 'bias': (2,)}
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

    Units are gathered one after another and rank 0 writes each at once, so that no rank holds more
    than one unit in full (two with ``master=True`` on rank 0). Tied parameters are written once,
    under their first name. A model with a transformers configuration gets its ``config.json``.

    - ``dtype``: converts all floating-point values.
    - ``max_shard_bytes``: the largest file, as a number or as text such as ``"5 GB"``.
    - ``master``: writes the optimizer's master weights, where there are any.
    - ``overwrite``: replaces the weights in a folder that is not empty, which is otherwise an
      error; other files in it stay.

    The folder appears when it is complete.

    >>> import tempfile, torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> folder = tempfile.mkdtemp()
    >>> sw.export(model, f"{folder}/weights", dtype=torch.bfloat16)
    >>> sw.load_pretrained(model, f"{folder}/weights")
    Loaded(missing=(), unexpected=())
    """
    options = Options(dtype, parse_bytes(max_shard_bytes, "max_shard_bytes"), master, overwrite)
    export_model(runtime_of(model), Path(path), options)


def load_pretrained(model: nn.Module, path: str | PathLike[str], *, strict: bool = True) -> Loaded:
    """Reads a safetensors file, or a folder of them, into a sharded model; collective.

    Every rank reads the files itself, one tensor at a time, and keeps its shards; all ranks must
    see the same files. Dtypes are converted, and master weights keep the files' precision. Names
    and shapes that do not fit are listed in one error before anything is written; with
    ``strict=False`` missing and unexpected names are returned instead. The optimizer's states stay
    as they are.

    >>> import tempfile, torch, shardwise as sw
    >>> from safetensors.torch import save_file
    >>> file = f"{tempfile.mkdtemp()}/weights.safetensors"
    >>> save_file({"bias": torch.ones(2)}, file)
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> sw.load_pretrained(model, file, strict=False)
    Loaded(missing=('weight',), unexpected=())
    """
    return load_model(runtime_of(model), Path(path), strict=strict)


def full_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """The reduced gradients in full, by name, on every rank; collective.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> sw.full_grads(model)["bias"]
    tensor([1., 1.])
    """
    return access.full_grads(runtime_of(model))


def optim_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's states in full, by parameter name, on every rank; collective.

    >>> import torch, shardwise as sw
    >>> model = torch.nn.Linear(4, 2)
    >>> model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> sw.optim_state_dict(model, optimizer)["weight"]["exp_avg"].shape
    torch.Size([2, 4])
    """
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

    Returns the norm before clipping. The arguments are torch's.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(3, 1))
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> sw.clip_grad_norm_(model, 1.0)
    tensor(2.)
    """
    return norms.clip_grad_norm_(
        runtime_of(model), max_norm, float(norm_type), error_if_nonfinite, foreach
    )


def set_grad_divisor(model: nn.Module, divisor: float) -> None:
    """Sets what summed gradients are divided by from the next backward on (at first: the ranks).

    For losses weighted by tokens: let each rank's loss be a sum over its tokens, and divide by the
    tokens of all ranks. Call it before the first backward of a step.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> sw.set_grad_divisor(model, 8)
    >>> model(torch.ones(8, 4)).sum().backward()
    >>> sw.full_grads(model)["bias"]
    tensor([1., 1.])
    """
    if not divisor > 0:
        raise UsageError(
            f"The gradient divisor is {divisor}; give a positive number, such as the tokens of all "
            "ranks."
        )
    runtime_of(model).executor.divisor = float(divisor)


def stats(model: nn.Module) -> dict[str, Any]:
    """This rank's counters of communication beyond the plan, memory of buffers, and kinds of links.

    The counters are zero while ranks and passes agree. ``links`` says for each level whether its
    ranks read each other's memory, send messages, or use the device's collectives.

    >>> import torch, shardwise as sw
    >>> model = sw.shard(torch.nn.Linear(4, 2))
    >>> sw.stats(model)["extra_gathers"]
    0
    """
    return runtime_of(model).stats()
