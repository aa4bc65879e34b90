"""Input and output of a search: requests, candidates, results, and whether a plan fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.core.cluster import Cluster
from shardwise.cost.simulate import Estimate, simulate
from shardwise.planner.space import Batch, Loss, batches
from shardwise.plans.facts import Facts
from shardwise.plans.memory import Memory
from shardwise.plans.plan import Plan, Precision

NEAR = 0.01
"""Plans whose steps differ by less count as equally fast: then lossless ones win, then those that
need less memory."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be trained, and where."""

    facts: Facts
    cluster: Cluster
    global_batch: int
    seq: int
    precision: Precision = field(default_factory=Precision)
    loss: Loss = Loss.SAFE
    path: str = ""
    """A folder on the nodes' disks; empty: no disk is used."""
    memory_bytes: int | None = None
    """Device memory per rank; None: that of the cluster's device."""
    batch: Batch | None = None
    """How the global batch is divided; None: the search decides."""

    @property
    def cuts(self) -> list[Batch]:
        """The ways to divide the global batch."""
        every = batches(self.global_batch, self.cluster.world)
        return every if self.batch is None else [self.batch]

    @property
    def limit(self) -> int:
        given = self.memory_bytes
        return given if given is not None else self.cluster.device.memory_bytes


@dataclass(frozen=True)
class Candidate:
    """A plan with its batch and the estimate of its step."""

    plan: Plan
    batch: Batch
    estimate: Estimate

    @property
    def step_s(self) -> float:
        return self.estimate.step_s

    def fits(self, request: Request) -> bool:
        return not list(overflows(self.estimate.memory, request))


@dataclass(frozen=True)
class Result:
    """The result of a search."""

    ranked: tuple[Candidate, ...]
    """The fastest plan of each partitioning that came close, best first; empty: nothing fits."""
    smallest: Candidate | None
    """If nothing fits: the plan that comes nearest, on the tier that it exceeds most."""
    num_plans: int
    """Number of legal plans in the space."""
    num_simulated: int
    proven: bool
    """Whether no family left out can be faster than the best by more than TOLERANCE. Of the other
    families only the likely wirings were simulated."""

    @property
    def best(self) -> Candidate | None:
        return self.ranked[0] if self.ranked else None


@dataclass(frozen=True, order=True)
class Overflow:
    """A tier that has too little memory."""

    tier: str
    needed: int
    available: int

    @property
    def times(self) -> float:
        """Needed over available memory."""
        return self.needed / max(1, self.available)


def overflows(needed: Memory, request: Request, limit: int | None = None) -> Iterator[Overflow]:
    """The tiers of a rank that are too small for what is needed."""
    cluster = request.cluster
    share = cluster.ranks_per_node
    device = request.limit if limit is None else limit
    if needed.total > device:
        yield Overflow("device", needed.total, device)
    if cluster.host is not None and needed.cpu > cluster.host.memory_bytes // share:
        yield Overflow("cpu", needed.cpu, cluster.host.memory_bytes // share)
    if needed.nvme and cluster.disk is not None and needed.nvme > cluster.disk.size_bytes // share:
        yield Overflow("nvme", needed.nvme, cluster.disk.size_bytes // share)


def lacks(request: Request, result: Result) -> str:
    """If nothing fits: on which tiers the nearest plan is too large, as a clause."""
    smallest = result.smallest
    found = overflows(smallest.estimate.memory, request) if smallest else ()
    told = [
        f"the nearest one needs {lack.needed:,} bytes per rank on tier {lack.tier}, which has "
        f"{lack.available:,}"
        for lack in found
    ]
    return "; ".join(told) or "none can be simulated"


def evaluate(request: Request, plan: Plan, batch: Batch) -> Candidate:
    """One plan, simulated in full, whether it fits or not."""
    topology = request.cluster.topology
    work = request.facts.work(batch.micro, request.seq, plan, topology)
    estimate = simulate(
        plan,
        request.facts.spec(plan, topology),
        work,
        request.cluster,
        accumulate=batch.accumulate,
    )
    return Candidate(plan, batch, estimate)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first: by time; among equally fast plans, lossless ones, then by memory."""
    left = sorted(candidates, key=lambda candidate: candidate.step_s)
    ranked = []
    while left:
        near = [c for c in left if c.step_s <= (1 + NEAR) * left[0].step_s]
        chosen = min(near, key=lambda c: (c.plan.is_lossy(), c.estimate.memory.total, c.step_s))
        left.remove(chosen)
        ranked.append(chosen)
    return ranked
