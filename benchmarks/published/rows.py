"""Figures of papers beside those of the simulator, and helpers to compute them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwise.core.cluster import Cluster
from shardwise.cost.habits import OURS, Habits
from shardwise.cost.simulate import Estimate
from shardwise.planner.alike import Alike
from shardwise.planner.request import Request, overflows
from shardwise.planner.space import mixed
from shardwise.plans.facts import Facts
from shardwise.plans.memory import Memory
from shardwise.plans.plan import Plan, StatePlan

TERA = 1e12
FLAT = Habits(flat=True)
"""Collectives as one flat ring, as in other systems."""
RECOMPUTED = 4 / 3
"""These papers count the recomputed forward: 9.96 s at 7.65 TFLOP/s (the tutorial's 18B with 512
tokens) are 76e12 operations, 8 per parameter and token."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of a paper, and the simulator's prediction."""

    what: str
    predicted: float
    published: float | None = None
    unit: str = ""
    exposed: dict[str, float] | None = None
    """The breakdown of the predicted step, as shares of it."""
    main: bool = False
    """Whether docs/papers.md shows it."""

    @property
    def ratio(self) -> float | None:
        return self.predicted / self.published if self.published else None


@dataclass(frozen=True)
class Group:
    """A table of rows."""

    key: str
    title: str
    setup: str
    why: str
    """Why predictions differ from the published figures."""
    rows: Callable[[], Iterator[Row]]


def estimate(
    facts: Facts,
    plan: Plan,
    cluster: Cluster,
    *,
    micro: int,
    seq: int,
    accumulate: int = 1,
    habits: Habits = OURS,
) -> Estimate:
    """A step of a plan."""
    topology = cluster.topology
    work = facts.work(micro, seq, plan, topology)
    return Alike(facts.spec(plan, topology)).estimate(
        plan, work, cluster, accumulate=accumulate, habits=habits
    )


def states(name: str, params: str, grads: str, optim: str, dtype: str) -> Plan:
    """A plan with three spreads."""
    return Plan(
        name=name,
        params=StatePlan(spread=params),
        grads=StatePlan(spread=grads),
        optim=StatePlan(spread=optim),
        precision=mixed(dtype),
    )


def shares(found: Estimate) -> dict[str, float]:
    """The breakdown of a step, as shares of at least one per cent."""
    parts = {use: seconds / found.step_s for use, seconds in found.exposed.items()}
    return {use: round(share, 3) for use, share in parts.items() if share >= 0.01}


def needs(facts: Facts, plan: Plan, cluster: Cluster, *, micro: int, seq: int) -> Memory:
    """What each rank needs with one micro-batch per step."""
    topology = cluster.topology
    work = facts.work(micro, seq, plan, topology)
    return Alike(facts.spec(plan, topology)).memory(
        plan, cluster, accumulates=False, saved=work.saved
    )


def fits(facts: Facts, plan: Plan, cluster: Cluster, *, micro: int, seq: int) -> bool:
    """Whether every tier has what a rank needs."""
    request = Request(facts=facts, cluster=cluster, global_batch=cluster.world, seq=seq)
    return not any(overflows(needs(facts, plan, cluster, micro=micro, seq=seq), request))


def tflops(found: Estimate) -> float:
    """TFLOP/s per GPU, including the recomputed forward."""
    return found.flops_per_s * RECOMPUTED / TERA


def written(plan: Plan) -> str:
    """P/G/OS and the other settings of a plan, in short."""
    spreads = "/".join(state.spread for state in (plan.params, plan.grads, plan.optim))
    tiers = "/".join(state.tier for state in (plan.params, plan.grads, plan.optim))
    wires = "|".join(state.wire or "raw" for state in (plan.params, plan.grads, plan.optim))
    more = [
        f"keep={plan.keep}" if plan.keep != "none" else "",
        wires if wires != "raw|raw|raw" else "",
        tiers if plan.rests_on("cpu") or plan.rests_on("nvme") else "",
        plan.activations if plan.activations != "keep" else "",
    ]
    return " ".join([spreads, *(word for word in more if word)])
