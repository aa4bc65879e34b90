"""Where matrices are cut into tiles."""

from dataclasses import replace

from shardwise.core.topology import Topology
from shardwise.plans.placed import travels
from shardwise.plans.plan import Plan, StatePlan, resolve
from shardwise.plans.validate import violations

TWO_RANKS = Topology.parse("world=2")


def tile_rows(rows: int, width: int, numel: int) -> list[range]:
    """The rows of a matrix in tiles of about equal height, none of more than ``numel`` elements.

    >>> tile_rows(10, 4, 16)
    [range(0, 4), range(4, 8), range(8, 10)]
    """
    count = -(-rows // max(1, numel // width))
    height = -(-rows // count)
    return [range(start, min(start + height, rows)) for start in range(0, rows, height)]


def may_cut(plan: Plan, topology: Topology) -> bool:
    """Whether a plan has tiles at all; an illegal one is refused elsewhere, in more words."""
    return bool(plan.tiling.numel) and not violations(plan, topology)


def cuts(plan: Plan, topology: Topology, unit: str) -> bool:
    """Whether a unit's matrices may be cut: only what comes and goes gains by it."""
    return travels(resolve(plan, topology, unit), plan.for_unit(unit))


def on_two_ranks(plan: Plan) -> Plan:
    """The plan as it is on two ranks, which tell what is spread from what is not, and no more."""

    def on_two(params: StatePlan) -> StatePlan:
        spread = "none" if params.spread == "none" else "world"
        return StatePlan(spread=spread, tier=params.tier)

    overrides = [
        replace(o, params=o.params and on_two(o.params), grads=None, optim=None, keep=None)
        for o in plan.overrides
    ]
    return replace(
        plan,
        params=on_two(plan.params),
        grads=StatePlan(),
        optim=StatePlan(spread="world"),
        keep="none",
        overrides=tuple(overrides),
    )
