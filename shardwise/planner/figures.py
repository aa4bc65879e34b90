"""Figures of single plans, each computed once: work, memory, and step time on short models."""

from dataclasses import replace

from shardwise.core.work import Work
from shardwise.cost.simulate import Estimate
from shardwise.cost.units import backward_times
from shardwise.planner.alike import SHORT, Alike
from shardwise.planner.request import Request
from shardwise.planner.space import Batch
from shardwise.plans.memory import Memory, with_activations
from shardwise.plans.plan import Plan, resolve, untiled


class Figures:
    """The figures of plans for one request, each computed once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._topology = request.cluster.topology
        self._works: dict[tuple[int, str, bool], Work] = {}
        self._models: dict[bool, Alike] = {}
        self._backwards: dict[bool, dict[str, float]] = {}
        self._memories: dict[tuple[Plan, bool], Memory] = {}
        self._estimates: dict[tuple[Plan, Batch], Estimate] = {}

    def follow(self, other: "Figures") -> None:
        """Share with another object all figures that do not depend on speeds."""
        self._works, self._models = other._works, other._models
        self._backwards, self._memories = other._backwards, other._memories

    @property
    def num_simulated(self) -> int:
        return len(self._estimates)

    def is_simulated(self, plan: Plan, batch: Batch) -> bool:
        return (plan, batch) in self._estimates

    def memory(self, plan: Plan, batch: Batch) -> Memory:
        """What a plan needs: activations, plus a part that does not depend on the batch."""
        accumulates = batch.accumulate > 1
        key = (without_activations(plan), accumulates)
        found = self._memories.get(key)
        if found is None:
            found = self._memories[key] = self.model(plan).memory(
                plan, self._request.cluster, accumulates=accumulates, saved=None
            )
        return with_activations(found, self.work(plan, batch).saved, plan.activations)

    def estimate(self, plan: Plan, batch: Batch) -> Estimate:
        """A step, simulated on a short model; see ``alike.py``."""
        found = self._estimates.get((plan, batch))
        if found is None:
            found = self._estimates[plan, batch] = self.model(plan).estimate(
                plan,
                self.work(plan, batch),
                self._request.cluster,
                accumulate=batch.accumulate,
                length=SHORT,  # good enough to order plans; the best are run in full
            )
        return found

    def work(self, plan: Plan, batch: Batch) -> Work:
        """What a micro-batch computes, and what autograd saves for it."""
        key = (batch.micro, plan.precision.compute or "", self.is_tiled(plan))
        if key not in self._works:
            self._works[key] = self._request.facts.work(
                batch.micro, self._request.seq, plan, self._topology
            )
        return self._works[key]

    def model(self, plan: Plan) -> Alike:
        """The model's units."""
        tiled = self.is_tiled(plan)
        if tiled not in self._models:
            self._models[tiled] = Alike(self._request.facts.spec(plan, self._topology))
        return self._models[tiled]

    def backward(self, plan: Plan) -> dict[str, float]:
        """By unit, without tiles: operations of backward relative to forward."""
        tiled = self.is_tiled(plan)
        if tiled not in self._backwards:
            found: dict[str, float] = {}
            for name, times in backward_times(self.model(plan).model).items():
                found[untiled(name)] = min(times, found.get(untiled(name), times))
            self._backwards[tiled] = found
        return self._backwards[tiled]

    def is_tiled(self, plan: Plan) -> bool:
        """Whether layers are cut into tiles, which only exist where parameters are gathered."""
        if not plan.tiling.numel:
            return False
        return resolve(plan, self._topology, "").params > 0 or plan.params.tier != "device"


def without_activations(plan: Plan) -> Plan:
    """The plan with default activations, as a key for figures that do not depend on them."""
    return replace(plan, activations="keep")
