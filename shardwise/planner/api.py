"""What a plan would do on a cluster that nobody has to have: ``sw.simulate``."""

import os
from dataclasses import replace

from shardwise.core.cluster import Cluster
from shardwise.core.errors import PlanError
from shardwise.cost.file import load_cluster
from shardwise.cost.habits import Habits
from shardwise.cost.simulate import Estimate
from shardwise.cost.simulate import simulate as simulate_step
from shardwise.plan.facts import Facts
from shardwise.plan.file import load_plan
from shardwise.plan.plan import Plan, Precision
from shardwise.plan.validate import check
from shardwise.planner.space import mixed

DTYPES = ("bfloat16", "float16", "float32")
"""Of compute, the preferred first."""


def simulate(
    plan: Plan | str | os.PathLike[str],
    model: Facts | str,
    cluster: Cluster | str | os.PathLike[str],
    *,
    micro_batch: int = 1,
    accumulate: int = 1,
    seq: int,
    dtype: str | None = None,
    flat: bool = False,
    spans: bool = False,
) -> Estimate:
    """A step of a plan on all ranks of a cluster: how long it takes, what of it, in what memory.

    ``plan`` is a preset's name or a plan, ``model`` a name such as ``llama3-8b`` or
    ``transformers:gpt2``, ``cluster`` a name in the catalogue or a file of ``shardwise probe``. A
    plan without a precision computes in ``dtype``, by default bfloat16 where the device has it.
    ``flat`` prices collectives as other systems run them, one ring over all ranks; ``spans`` adds
    what happens when.

    >>> estimate = simulate("zero3", "llama-7b", "dgx-a100", seq=2048)
    >>> estimate.exposed["compute"] < estimate.step_s
    True
    """
    for name, value in (("micro_batch", micro_batch), ("accumulate", accumulate), ("seq", seq)):
        if value < 1:
            raise PlanError(f"{name} is {value}; use 1 or more.")
    facts, described = _facts(model), load_cluster(cluster)
    chosen = with_precision(load_plan(plan), described, dtype)
    if described.device.kind == "cpu":
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


def _facts(model: Facts | str) -> Facts:
    if not isinstance(model, str):
        return model
    # The trainer knows all names; those that stand for modules need torch.
    from shardwise.train.facts import facts_of

    return facts_of(model)
