"""Plans for clusters that nobody has to have: ``sw.plan`` searches, ``sw.simulate`` prices one."""

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
"""Of compute, the preferred first."""


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
    """The fastest plan that fits, with the batch that it goes with and what a step of it takes.

    ``model`` is a name such as ``llama3-8b``, ``transformers:gpt2`` or a config.json, or a module,
    whose forward ``run`` runs where it does not take (input_ids, labels); ``cluster`` a name in the
    catalogue, a file, or what ``sw.probe`` returned. ``memory`` is what one rank's device has
    (default: all of it) and ``path`` a folder on the nodes' disks, without which nothing is put
    there. Compute is in ``dtype``, by default bfloat16 where the device has it. ``lossless``: no
    hop in fewer bits than that has. `shardwise plan` says more.

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
            "says which of them would do."
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
    """What ``plan`` is asked for, checked."""
    _check_counts(seq=seq, global_batch=global_batch, ranks=ranks)
    described = load_cluster(cluster)
    if ranks is not None:
        described = described.with_world(ranks)
    if path and described.disk is None:
        raise UsageError(
            f"Path {path} has no use: cluster '{described.name}' has no disk in its description; "
            "add [disk], or probe it with shardwise probe --path."
        )
    if path and described.device.is_accelerator and described.host is None:
        raise UsageError(
            f"Path {path} has no use: what a disk has goes through host memory, and cluster "
            f"'{described.name}' has no host in its description; add [host]."
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
    """A step of a plan on all ranks of a cluster: how long it takes, what of it, in what memory.

    ``plan`` is a preset's name or a plan; ``model``, ``cluster`` and ``run`` are as in ``plan``. A
    plan without a precision computes in ``dtype``, by default bfloat16 where the device has it.
    ``flat`` prices collectives as other systems run them, one ring over all ranks; ``spans`` adds
    what happens when.

    >>> estimate = simulate("zero3", "llama-7b", "dgx-a100", seq=2048)
    >>> estimate.exposed["compute"] < estimate.step_s
    True
    """
    _check_counts(micro_batch=micro_batch, accumulate=accumulate, seq=seq)
    facts, described = _facts(model, run), load_cluster(cluster)
    chosen = with_precision(load_plan(plan), described, dtype)
    if not described.device.is_accelerator:
        chosen = chosen.without_accelerator()
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
    """A plan that says in which dtypes it runs: its own ones, or mixed ones."""
    if plan.precision != Precision():
        if dtype is not None:
            raise PlanError(
                f"Plan '{plan.name}' has a precision of its own, so that dtype {dtype} has no "
                "place; remove one of both."
            )
        return plan
    known = cluster.device.forward
    preferred = dtype or next((name for name in DTYPES if name in known), DTYPES[-1])
    cluster.device.compute(preferred, 0)  # which says so where the device has no such speed
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
        # Modules need torch, names may do without.
        from shardwise.model.facts import facts_of_module

        return facts_of_module(model, run)
    if run is not None:
        raise UsageError("run= says how a module is run; leave it away where the model is a name.")
    return facts_of(model) if isinstance(model, str) else model
