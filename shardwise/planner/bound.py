"""The least time that a step of a plan can take: nothing overlaps better than perfectly.

The bound counts the bytes of the leanest wires and no codec, and takes the busiest resource.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwise.core.layout import DTYPE_BYTES, FlatSpec, UnitSpec
from shardwise.cost.engine import Stage
from shardwise.cost.price import Prices
from shardwise.planner.figures import Figures, without_activations
from shardwise.planner.request import Request
from shardwise.planner.space import Batch, leanest
from shardwise.plans.ops import Hop, Kind, Op, Phase
from shardwise.plans.placed import trained_flats
from shardwise.plans.plan import Plan, resolve, untiled
from shardwise.plans.schedule import UnitOps
from shardwise.plans.traffic import step_phases

ROOT = "root"
LINK = "link "
Seconds = defaultdict[str, float]
"""By resource."""


class Bound:
    """The bounds of plans for one request; what does not depend on the batch is computed once."""

    def __init__(self, request: Request, figures: Figures) -> None:
        self._request, self._figures = request, figures
        self._topology = request.cluster.topology
        self._prices = Prices(request.cluster)
        self._links: dict[tuple[Plan, Phase], Seconds] = {}
        self._leanest: dict[Plan, Plan] = {}
        self._exposed: dict[Plan, float] = {}

    def follow(self, other: "Bound") -> None:
        """Shares with another one what does not depend on speeds."""
        self._leanest = other._leanest

    def busy(self, plan: Plan, batch: Batch) -> list[float]:
        """Seconds of each resource; no step of any wiring of a plan is shorter than the longest."""
        work = self._figures.work(plan, batch)
        busy: Seconds = defaultdict(float)
        for phase, times in step_phases(batch.accumulate).items():
            for resource, seconds in self._transfers(plan, phase).items():
                busy[resource] += times * seconds
        forwards = 1 if plan.activations == "keep" else 2
        alone = self._update(plan) + self._ends(plan)
        busy["compute"] = alone + batch.accumulate * (
            self._collecting(plan)
            + sum(
                times * self._compute(work.dtype, flops, backward, forwards)
                for (flops, backward), times in Counter(
                    (flops, self._figures.backward(plan)[name])
                    for name, flops in work.forward_flops.items()
                    if name != ROOT
                ).items()
            )
        )
        return list(busy.values())

    def _compute(self, dtype: str, flops: float, backward: float, forwards: int) -> float:
        """Seconds of a unit's passes; a forward is repeated only where backward comes."""
        forward_s = self._prices.compute(dtype, flops, backward=False).seconds
        if not backward:
            return forward_s
        backward_s = self._prices.compute(dtype, backward * flops, backward=True).seconds
        return forwards * forward_s + backward_s

    def _update(self, plan: Plan) -> float:
        """Seconds of the optimizer's own work where its states are on the device."""
        if plan.optim.tier != "device":
            return 0.0
        parts = self._topology.factor(plan.optim.spread)
        numel = sum(
            times * (flat.numel // parts)
            for unit, times in self._figures.model(plan).classes
            for flat in trained_flats(unit)
        )
        return self._prices.update(numel, "device").seconds  # all at once, as in a step

    def _collecting(self, plan: Plan) -> float:
        """Seconds in which a pass brings its gradients together."""
        dtype_of = plan.precision.reduce_dtype
        return self._of_trained(
            plan,
            lambda flat: self._prices.copy(flat.numel * DTYPE_BYTES[dtype_of(flat.dtype)]).seconds,
        )

    def _of_trained(self, plan: Plan, price: Callable[[FlatSpec], float]) -> float:
        """The sum over what is trained: at least the time of one call for all of a unit's flats."""
        return sum(
            times * max((price(flat) for flat in trained_flats(unit)), default=0.0)
            for unit, times in self._figures.model(plan).classes
        )

    def _ends(self, plan: Plan) -> float:
        """Seconds that nothing can hide: the first gather, and the last unit's reduction."""
        key = without_activations(plan)
        if key not in self._exposed:
            self._exposed[key] = self._first_and_last(plan)
        return self._exposed[key]

    def _first_and_last(self, plan: Plan) -> float:
        lean = self._lean(plan)
        units = self._figures.model(plan).model.units
        first = self._unit_ops(lean, units[min(1, len(units) - 1)])
        gathers, reduces = (
            [[self._hop_seconds(op, hop) for hop in op.hops] for op in ops if op.hops]
            for ops in (first.gather() if first.travels else (), first.ready())
        )
        # Hops of a reduction may overlap, chunk by chunk.
        return sum(map(sum, gathers)) + sum(map(max, reduces))

    def _lean(self, plan: Plan) -> Plan:
        key = without_activations(plan)
        if key not in self._leanest:
            self._leanest[key] = leanest(plan, self._topology, self._request.loss)
        return self._leanest[key]

    def _hop_seconds(self, op: Op, hop: Hop) -> float:
        """A hop with nothing encoded or summed."""
        direct = op.kind is Kind.REDUCE and hop.format is not None
        return self._prices.hop("", hop, reduces=False, direct=direct).seconds

    def _transfers(self, plan: Plan, phase: Phase) -> Seconds:
        """Seconds on each link and tier in one pass, for the leanest wires and nothing encoded.

        A refresh by differences sends least, but reads the master weights from their tier again.
        """
        key = (without_activations(plan), phase)
        if key not in self._links:
            wirings = [self._lean(plan)]
            if plan.moving_tier is not None:
                wirings.append(replace(plan, optim=replace(plan.optim, wire="")))
            every = [self._busy_in_pass(wired, phase) for wired in wirings]
            lean = every[0]
            self._links[key] = defaultdict(float, {
                resource: seconds
                if resource.startswith(LINK)
                else min(busy[resource] for busy in every)
                for resource, seconds in lean.items()
            })  # fmt: skip
        return self._links[key]

    def _busy_in_pass(self, plan: Plan, phase: Phase) -> Seconds:
        total: Seconds = defaultdict(float)
        for unit, times in self._figures.model(plan).classes:
            comes_back = bool(self._figures.backward(plan)[untiled(unit.name)])
            for op in _pass_ops(self._unit_ops(plan, unit), phase, comes_back=comes_back):
                for hop in op.hops:
                    total[LINK + hop.level] += times * self._hop_seconds(op, hop)
                for stage in self._moves(plan, op):
                    for resource, share in stage.needs:
                        total[resource] += times * share * stage.seconds
        return total

    def _unit_ops(self, plan: Plan, unit: UnitSpec) -> UnitOps:
        rungs = resolve(plan, self._topology, unit.name)
        return UnitOps(unit, rungs, plan, encloses=unit.name == ROOT)

    def _moves(self, plan: Plan, op: Op) -> Iterator[Stage]:
        """Bytes to and from tiers, as the simulator moves them."""
        to_host = op.kind is Kind.UPDATE and plan.optim.tier != "device"
        for move in op.moves:
            for nbytes, writes in ((move.reads, False), (move.writes, True)):
                if nbytes:
                    yield self._prices.move(move.tier, nbytes, writes=writes, to_host=to_host)


def _pass_ops(ops: UnitOps, phase: Phase, *, comes_back: bool) -> Iterator[Op]:
    """What a pass does at least for a unit that it uses once; ``comes_back``: in backward, too."""
    follows = phase in (Phase.MIDDLE, Phase.LAST)  # and finds what the passes before have left
    if ops.travels:
        keeps = ops.plan.keep_until == "step" and follows and not ops.encloses
        yield from ops.gather(ops.kept_rung if keeps else None)
        if comes_back:
            yield from ops.gather(ops.kept_rung)
    rests = (follows,) * len(ops.trained)
    at_bottom = ops.rungs.grads == ops.rungs.bottom
    yield from ops.ready(
        synchronises=phase.synchronises,
        held=None if at_bottom else rests,
        summed=rests if at_bottom else None,
    )
    if phase.synchronises:
        yield from ops.update()
