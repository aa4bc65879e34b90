"""Which matrices are cut into tiles, and where."""

from dataclasses import replace

from shardwise.core.topology import Topology
from shardwise.plans.placed import travels
from shardwise.plans.plan import Plan, StatePlan, resolve
from shardwise.plans.validate import violations

TWO_RANKS = Topology.parse("world=2")


def tile_rows(rows: int, width: int, numel: int) -> list[range]:
    """The rows of a matrix, cut into tiles of about equal height with at most ``numel`` elements.

    >>> tile_rows(10, 4, 16)
    [range(0, 4), range(4, 8), range(8, 10)]
    """
    count = -(-rows // max(1, numel // width))
    height = -(-rows // count)
    return [range(start, min(start + height, rows)) for start in range(0, rows, height)]


def may_cut(plan: Plan, topology: Topology) -> bool:
    """Whether a plan has tiles at all; illegal plans are refused elsewhere."""
    return bool(plan.tiling.numel) and not violations(plan, topology)


def cuts(plan: Plan, topology: Topology, unit: str) -> bool:
    """Whether a unit's matrices may be cut: only parameters that are gathered gain by it."""
    return travels(resolve(plan, topology, unit), plan.for_unit(unit))


def on_two_ranks(plan: Plan) -> Plan:
    """The plan for two ranks, with each state either replicated or sharded."""

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
