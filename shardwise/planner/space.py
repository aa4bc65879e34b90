"""The space of plans: partitionings, wires, tiers, activations, and divisions of the batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import product

from shardwise.core.cluster import Cluster
from shardwise.core.errors import PlanError
from shardwise.core.topology import Topology, divisors
from shardwise.plans.plan import Plan, Precision, Tiers, resolve
from shardwise.plans.validate import legal_plans, violations

STATES = ("params", "grads", "optim")


class Loss(StrEnum):
    """What wires may lose."""

    NONE = "lossless"
    """Nothing: every hop keeps the dtype of the precision."""
    SAFE = "safe"
    """Wires that trained to within 0.3 % of the exact loss in ``benchmarks/quality.py``."""


PARAM_WIRES = ("", "world=int8", "int8")
GRAD_WIRES = ("", "int4,node=bf16", "int4,node=int8")
OPTIM_WIRES = ("", "int4/delta")
"""The formats that lose little enough: each, or one that loses more, was measured in
``benchmarks/quality.py``."""


@dataclass(frozen=True, slots=True)
class Batch:
    """How a rank divides its share of the global batch."""

    micro: int
    """Sequences per micro-batch."""
    accumulate: int
    """Micro-batches per step."""


def batches(global_batch: int, world: int) -> list[Batch]:
    """Every way to divide a global batch, the largest micro-batch first."""
    if global_batch < 1 or global_batch % world:
        raise PlanError(
            f"A global batch of {global_batch} sequences cannot be divided evenly over {world} "
            f"ranks; use a multiple of {world}."
        )
    share = global_batch // world
    return [Batch(micro, share // micro) for micro in reversed(divisors(share))]


@lru_cache(maxsize=8)
def partitionings(topology: Topology, *, accumulates: bool) -> list[Plan]:
    """Every legal (P, G, OS, keep); without accumulation G never rests, so one spread of G does."""
    plans = legal_plans(topology)
    if accumulates:
        return plans
    seen: dict[tuple[str, str, str], Plan] = {}
    for plan in plans:
        key = (plan.params.spread, plan.optim.spread, plan.keep)
        if key not in seen or plan.grads.spread == plan.optim.spread:
            seen[key] = plan
    return list(seen.values())


def wirings(
    plan: Plan, topology: Topology, loss: Loss, *, leanest_first: bool = False
) -> Iterator[Plan]:
    """A partitioning with every combination of formats that makes a difference to it.

    Raw hops come first and the fewest bytes last, or the other way round.
    """
    rungs = resolve(plan, topology, "")
    steps = rungs.ladder.steps

    def crosses(top: int, bottom: int) -> bool:
        return any(step.size > 1 for step in steps[top:bottom])

    lossy = loss is not Loss.NONE
    gathers = PARAM_WIRES if lossy and crosses(0, rungs.params) else ("",)
    reduces = GRAD_WIRES if lossy and crosses(0, rungs.bottom) else ("",)
    refreshes = OPTIM_WIRES if lossy and crosses(rungs.params, rungs.optim) else ("",)
    inner_only = not any(step.size > 1 and step.stride > 1 for step in steps)
    for params, grads, optim in list(product(gathers, reduces, refreshes))[
        :: -1 if leanest_first else 1
    ]:
        if inner_only and params == "world=int8":
            continue  # the plan has no such hop
        wired = replace(
            plan,
            params=replace(plan.params, wire=params),
            grads=replace(plan.grads, wire=grads),
            optim=replace(plan.optim, wire=optim),
        )
        if not violations(wired, topology):
            yield wired


def leanest(plan: Plan, topology: Topology, loss: Loss) -> Plan:
    """The wiring that sends least: no other of the partitioning is faster on any link."""
    return next(wirings(plan, topology, loss, leanest_first=True))


Placement = tuple[str, str, str]
"""The tiers of P, G and OS."""


def placements(cluster: Cluster, path: str) -> list[Placement]:
    """Where states may rest, beginning with the least that leaves the device."""
    tiers = ["device", *_tiers_beside(cluster, path)]
    # If the host's update rate is unknown, OS stays on the device: an unknown is not zero.
    host = cluster.host
    updates = not cluster.device.is_accelerator or (host is not None and host.update is not None)
    depth = {tier: index for index, tier in enumerate(("device", "cpu", "nvme"))}
    found = [
        (params, grads, optim)
        for params in tiers
        for grads in tiers
        for optim in (tiers if updates else tiers[:1])
        # OS is the largest and is used once per step, P is used twice per micro-batch: it leaves
        # the device last, unless OS must stay.
        if not updates or depth[params] <= depth[grads] <= depth[optim]
    ]
    return sorted(found, key=lambda place: sum(depth[tier] for tier in place))


def moved_further(one: Placement, other: Placement) -> bool:
    """Whether a placement moves everything that another moves, and more."""
    depth = {"device": 0, "cpu": 1, "nvme": 2}
    pairs = [(depth[a], depth[b]) for a, b in zip(one, other, strict=True)]
    return one != other and all(a >= b for a, b in pairs)


def placed(plan: Plan, placement: Placement, path: str) -> Plan:
    """A plan with its states on tiers."""
    states = {
        name: replace(getattr(plan, name), tier=tier)
        for name, tier in zip(STATES, placement, strict=True)
    }
    tiers = Tiers(path=path) if "nvme" in placement or plan.activations == "nvme" else plan.tiers
    return replace(plan, **states, tiers=tiers)


def activation_settings(cluster: Cluster, path: str) -> list[str]:
    """The possible settings of activations, the fastest first."""
    return ["keep", "recompute", *_tiers_beside(cluster, path)]


def _tiers_beside(cluster: Cluster, path: str) -> list[str]:
    """The tiers of a cluster besides its devices' memory, the nearest first: separate host memory,
    and a disk if there is a path to it."""
    accelerated = cluster.device.is_accelerator
    if accelerated and cluster.host is None:
        return []  # disks are read and written through host memory
    found = ["cpu"] if accelerated else []
    return [*found, "nvme"] if cluster.disk is not None and path else found


def mixed(dtype: str) -> Precision:
    """A precision that computes and reduces in a dtype and updates in float32."""
    return Precision(compute=dtype, reduce=dtype, master="float32")
