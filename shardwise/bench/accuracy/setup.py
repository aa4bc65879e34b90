"""What is compared: the plans, the model, and the clusters."""

from dataclasses import dataclass, replace

from shardwise.bench.cluster import Rate
from shardwise.plans import presets
from shardwise.plans.plan import Plan, StatePlan

CHOSEN = "auto"
"""The name of the planner's choice."""
FIXED = ("zero1", "zero2", "zero3", "fsdp", "hsdp", "zeropp")
"""Strategies that are often chosen whatever the cluster is."""


def plans() -> dict[str, Plan]:
    """Plans that differ in what they send, where and when.

    With one rank per node eleven of them differ; each of the others equals one of these.
    """
    zero3, zero1, amsp = presets.zero3(), presets.zero1(), presets.amsp()
    few_bits = StatePlan(spread="world", wire="int4,node=int8")
    return {
        "ddp": presets.ddp(),
        "zero1": zero1,
        "zero2": presets.zero2(),
        "zero3": zero3,
        "fsdp": presets.fsdp(reshard_after_forward=False),
        "hsdp": presets.hsdp(),
        "amsp": amsp,
        "zeropp": presets.zeropp(),
        "lean": presets.lean(),
        "zero3 keep=node": presets.zero3(keep="node"),
        "zero3 int8 gathers": replace(zero3, params=replace(zero3.params, wire="int8")),
        "zero3 int4 gradients": replace(zero3, grads=few_bits),
        "zero3 int8 and int4": replace(
            zero3, params=replace(zero3.params, wire="int8"), grads=few_bits
        ),
        "zero3 bf16": replace(
            zero3,
            params=replace(zero3.params, wire="bf16"),
            grads=replace(zero3.grads, wire="bf16"),
        ),
        "OS in the node": replace(zero1, name="os-node", optim=StatePlan(spread="node")),
        "amsp int4 gradients": replace(amsp, grads=replace(amsp.grads, wire="int4,node=bf16")),
    }


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and on which clusters."""

    model: str = "gpt-mini"
    seq: int = 512
    grids: tuple[tuple[int, int], ...] = ((2, 2), (4, 1))
    """Nodes, and ranks on each."""
    rates: tuple[Rate, ...]
    rounds: int = 4
    names: tuple[str, ...] = tuple(plans())
    quick: bool = False
    """For tests: probe quickly; the figures mean little."""
