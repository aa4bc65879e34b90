"""Planning without the cluster at hand: ``sw.plan`` searches, ``sw.simulate`` prices one plan."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.core.cluster import Cluster
from shardwise.core.errors import PlanError, UsageError
from shardwise.core.sizes import parse_bytes
from shardwise.cost.file import load_cluster
from shardwise.cost.habits import Habits
from shardwise.cost.simulate import Estimate
from shardwise.cost.simulate import simulate as simulate_step
from shardwise.model.named import facts_of
from shardwise.planner.request import Candidate, Request, lacks
from shardwise.planner.search import search
from shardwise.planner.space import Loss, mixed
from shardwise.planner.units import refine
from shardwise.plans.facts import Facts, Run
from shardwise.plans.file import load_plan
from shardwise.plans.plan import Plan, Precision
from shardwise.plans.validate import check

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of compute, the preferred first."""


def plan(
    model: "Facts | str | os.PathLike[str] | nn.Module",
    cluster: Cluster | str | os.PathLike[str],
    *,
    seq: int,
    global_batch: int | None = None,
    ranks: int | None = None,
    memory: str | int | None = None,
    path: str | os.PathLike[str] = "",
    dtype: str | None = None,
    lossless: bool = False,
    run: Run | None = None,
) -> Candidate:
    """The fastest plan that fits, with its batch and the estimate of its step.

    ``model`` is a name such as ``llama3-8b``, ``transformers:gpt2`` or a config.json, or a module;
    ``run`` runs the forward of a module that does not take (input_ids, labels). ``cluster`` is a
    name in the catalogue, a file, or the result of ``sw.probe``. ``memory`` is the device memory
    per rank (default: all of it), ``path`` a folder on the nodes' disks (default: no disk is used).
    Compute is in ``dtype``, by default bfloat16 if the device has it. With ``lossless`` no hop
    carries fewer bits than ``dtype`` has. `shardwise plan` reports more.

    >>> best = plan("gpt-mini", "4090-10g", seq=512)
    >>> best.step_s < simulate("zero3", "gpt-mini", "4090-10g", seq=512).step_s
    True
    """
    asked = request(
        model,
        cluster,
        seq=seq,
        global_batch=global_batch,
        ranks=ranks,
        memory=memory,
        path=path,
        dtype=dtype,
        lossless=lossless,
        run=run,
    )
    found = search(asked)
    if found.best is None:
        raise PlanError(
            f"No plan for {asked.facts.name} fits cluster '{asked.cluster.name}': "
            f"{lacks(asked, found)}. Use more ranks, shorter sequences or a disk; `shardwise plan` "
            "shows which of them would be enough."
        )
    return refine(asked, found.best)


def request(
    model: "Facts | str | os.PathLike[str] | nn.Module",
    cluster: Cluster | str | os.PathLike[str],
    *,
    seq: int,
    global_batch: int | None = None,
    ranks: int | None = None,
    memory: str | int | None = None,
    path: str | os.PathLike[str] = "",
    dtype: str | None = None,
    lossless: bool = False,
    run: Run | None = None,
) -> Request:
    """The checked request of ``plan``."""
    _check_counts(seq=seq, global_batch=global_batch, ranks=ranks)
    described = load_cluster(cluster)
    if ranks is not None:
        described = described.with_world(ranks)
    if path and described.disk is None:
        raise UsageError(
            f"Path {path} cannot be used: the description of cluster '{described.name}' has no "
            "disk; add [disk], or measure one with shardwise probe --path."
        )
    if path and described.device.is_accelerator and described.host is None:
        raise UsageError(
            f"Path {path} cannot be used: a disk is read and written through host memory, and the "
            f"description of cluster '{described.name}' has no host; add [host]."
        )
    return Request(
        facts=_facts(model, run),
        cluster=described,
        global_batch=global_batch or described.world,
        seq=seq,
        precision=with_precision(Plan(), described, dtype).precision,
        loss=Loss.NONE if lossless else Loss.SAFE,
        path=os.fspath(path),
        memory_bytes=_limit(memory),
    )


def simulate(
    plan: Plan | str | os.PathLike[str],
    model: "Facts | str | os.PathLike[str] | nn.Module",
    cluster: Cluster | str | os.PathLike[str],
    *,
    micro_batch: int = 1,
    accumulate: int = 1,
    seq: int,
    dtype: str | None = None,
    flat: bool = False,
    spans: bool = False,
    run: Run | None = None,
) -> Estimate:
    """Simulate a step of a plan on all ranks of a cluster: its time, its breakdown, its memory.

    ``plan`` is a preset's name or a plan; ``model``, ``cluster`` and ``run`` are as in ``plan``. A
    plan without a precision computes in ``dtype``, by default bfloat16 if the device has it.
    ``flat`` prices each collective as other systems run it, as one ring over all ranks. ``spans``
    adds the timeline.

    >>> estimate = simulate("zero3", "llama-7b", "dgx-a100", seq=2048)
    >>> estimate.exposed["compute"] < estimate.step_s
    True
    """
    _check_counts(micro_batch=micro_batch, accumulate=accumulate, seq=seq)
    facts, described = _facts(model, run), load_cluster(cluster)
    chosen = with_precision(load_plan(plan), described, dtype)
    accelerated = described.device.is_accelerator
    chosen = chosen.on_accelerator() if accelerated else chosen.without_accelerator()
    topology = described.topology
    check(chosen, topology)
    spec = facts.spec(chosen, topology)
    check(chosen, topology, spec)
    return simulate_step(
        chosen,
        spec,
        facts.work(micro_batch, seq, chosen, topology),
        described,
        accumulate=accumulate,
        habits=Habits(flat=flat),
        spans=spans,
    )


def with_precision(plan: Plan, cluster: Cluster, dtype: str | None) -> Plan:
    """The plan with a precision: its own, or mixed precision."""
    if plan.precision != Precision():
        if dtype is not None:
            raise PlanError(
                f"Plan '{plan.name}' has its own precision, so dtype {dtype} cannot be set as "
                "well; remove one of the two."
            )
        return plan
    known = cluster.device.forward
    preferred = dtype or next((name for name in DTYPES if name in known), DTYPES[-1])
    cluster.device.compute(preferred, 0)  # raises if the device has no such rate
    return replace(plan, precision=mixed(preferred))


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise PlanError(f"{name} is {value}; use 1 or more.")


def _limit(memory: str | int | None) -> int | None:
    if memory is None:
        return None
    limit = memory if isinstance(memory, int) else parse_bytes(memory, "memory")
    if limit <= 0:
        raise UsageError(f"A memory of {memory} leaves nothing; give for example '20 GiB'.")
    return limit


def _facts(model: "Facts | str | os.PathLike[str] | nn.Module", run: Run | None) -> Facts:
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if not isinstance(model, str | Facts):
        # Modules need torch, names may work without it.
        from shardwise.model.facts import facts_of_module

        return facts_of_module(model, run)
    if run is not None:
        raise UsageError("run= tells how to run a module; omit it when the model is a name.")
    return facts_of(model) if isinstance(model, str) else model
