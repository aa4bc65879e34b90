"""``plan="auto"``: probe the ranks that run, plan for the model as it is, and print the choice."""

import os
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.comm.grid import find_place
from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes
from shardwise.core.topology import Topology
from shardwise.device.choice import Asked
from shardwise.model.facts import facts_of_module, main_dtype
from shardwise.planner.choices import wires
from shardwise.planner.request import Candidate, Request, lacks
from shardwise.planner.search import search
from shardwise.planner.space import Batch, Loss
from shardwise.planner.units import refine
from shardwise.plans.auto import Auto
from shardwise.plans.ops import Kind
from shardwise.plans.plan import Plan
from shardwise.probing.cache import cached_probe
from shardwise.probing.progress import shown
from shardwise.probing.scope import DTYPES
from shardwise.runtime.execute import Done
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.target import target_device


def choose(
    model: nn.Module,
    asked: Auto,
    *,
    levels: str | Topology | None = None,
    quick: bool = False,
    device: Asked = None,
) -> Candidate:
    """The fastest plan that fits, with what is predicted for it; collective, equal on all ranks.

    ``quick`` probes for tests: its figures mean little.
    """
    seq = asked.seq or _longest(model)
    if seq is None:
        raise UsageError(
            f"plan='auto' must know how long sequences are, and {type(model).__name__} does not "
            "say; give plan=shardwise.Auto(seq=...)."
        )
    dtype = main_dtype(model)
    if dtype not in DTYPES:
        raise UsageError(
            f"plan='auto' can plan for models in {', '.join(DTYPES)}, and this "
            f"{type(model).__name__} is in {dtype}; give a preset or a plan."
        )
    facts = facts_of_module(model, asked.run)
    # Raises what makes planning impossible before a minute is spent on probing.
    facts.work(asked.micro_batch, seq, Plan())
    used = target_device(model, device)
    place = find_place(levels, used)
    path = os.fspath(asked.path)
    with shown(place.rank == 0) as progress:
        cluster = cached_probe(
            levels, dtype=dtype, path=path or None, progress=progress, quick=quick, device=used
        )
    request = Request(
        facts=facts,
        cluster=cluster,
        global_batch=asked.micro_batch * asked.accumulate * cluster.world,
        seq=seq,
        path=path,
        loss=Loss.NONE if asked.lossless else Loss.SAFE,
        batch=Batch(asked.micro_batch, asked.accumulate),
    )
    found = search(request)
    if found.best is None:
        raise UsageError(
            f"No plan for {type(model).__name__} fits this machine: {lacks(request, found)}. Use "
            "more ranks, a smaller micro-batch, or a disk: plan=shardwise.Auto(path=...)."
        )
    best = refine(request, found.best)
    if _is_first():
        print(describe(best, found.num_plans), file=sys.stderr)
    return best


def compare_soon(runtime: Runtime, chosen: Candidate) -> None:
    """Has the first rank print, after some steps, their measured time beside the predicted one."""
    trained = next((unit.name for unit in runtime.units if unit.trained), None)
    if trained is not None and _is_first():
        comparison = Comparison(trained, chosen.step_s, chosen.batch.accumulate)
        runtime.observers.append(comparison)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def describe(chosen: Candidate, num_plans: int) -> str:
    """The choice in a few lines."""
    plan, estimate = chosen.plan, chosen.estimate
    states = {"P": plan.params, "G": plan.grads, "OS": plan.optim}
    moved = "".join(f", {name} on {s.tier}" for name, s in states.items() if s.tier != "device")
    shares = {use: seconds / estimate.step_s for use, seconds in estimate.exposed.items()}
    largest = sorted(shares, key=lambda use: -shares[use])[:3]
    overrides = f", overrides: {len(plan.overrides)}" if plan.overrides else ""
    return (
        f"auto: P={plan.params.spread} G={plan.grads.spread} OS={plan.optim.spread} "
        f"keep={plan.keep}, activations {plan.activations}, "
        f"wires {wires(plan)}{overrides}{moved}; best of {num_plans} plans\n"
        f"auto: {estimate.step_s:.3f} s per step predicted ("
        + ", ".join(f"{use} {shares[use]:.0%}" for use in largest)
        + f"), {format_bytes(estimate.memory.total)} per rank"
    )


class Comparison:
    """Prints once, after some steps, how long they took beside what was predicted.

    An observer of a runtime's operations: the updates of one unit show where steps end, its
    reductions how many micro-batches a step has.
    """

    def __init__(self, unit: str, predicted_s: float, accumulate: int = 1) -> None:
        self._unit, self._predicted_s, self._accumulate = unit, predicted_s, accumulate
        self._passes = 0
        self._ended: list[float] = []

    def __call__(self, done: Done) -> None:
        op = done.op
        if op.unit != self._unit or len(self._ended) > WARM_UP + COMPARED:
            return
        if op.kind is Kind.REDUCE:
            self._passes += 1
        elif op.kind is Kind.UPDATE and self._passes:
            self._ended.append(time.perf_counter())
            if len(self._ended) > WARM_UP + COMPARED:
                print(self._found(), file=sys.stderr)
            self._passes = 0

    def _found(self) -> str:
        if self._passes != self._accumulate:
            return (
                f"auto: steps have {self._passes} micro-batches and were predicted for "
                f"{self._accumulate}; predicted and measured times are not compared"
            )
        steps = [end - begin for begin, end in pairwise(self._ended[WARM_UP:])]
        median = statistics.median(steps)
        return (
            f"auto: {median:.3f} s per step measured (median of {len(steps)}), "
            f"{self._predicted_s:.3f} predicted: {self._predicted_s / median - 1:+.0%}"
        )


WARM_UP, COMPARED = 2, 5
"""Steps that are not timed (they record the order and create states), and steps that are."""


def _longest(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "context"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None
