"""Strategies by name: each a small function that returns a Plan. Nothing else knows a 'stage'.

>>> zero3(keep="node").keep
'node'
>>> hsdp(precision=Precision(compute="bfloat16")).optim.spread
'node'
"""

from collections.abc import Callable
from dataclasses import replace

from shardwise.plans.plan import Plan, Precision, StatePlan, Tiers, Tiling

__all__ = [
    "PRESETS",
    "amsp",
    "ddp",
    "fsdp",
    "hsdp",
    "infinity",
    "lean",
    "mics",
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
]


def _plan(
    name: str, params: str, grads: str, optim: str, keep: str, precision: Precision | None
) -> Plan:
    return Plan(
        name=name,
        params=StatePlan(spread=params),
        grads=StatePlan(spread=grads),
        optim=StatePlan(spread=optim),
        keep=keep,
        precision=precision or Precision(),
    )


def ddp(*, precision: Precision | None = None) -> Plan:
    """DDP: everything replicated, gradients all-reduced."""
    return _plan("ddp", "none", "none", "none", "none", precision)


def zero1(*, precision: Precision | None = None) -> Plan:
    """ZeRO-1: optimizer states sharded over all ranks."""
    return _plan("zero1", "none", "none", "world", "none", precision)


def zero2(*, precision: Precision | None = None) -> Plan:
    """ZeRO-2: optimizer states and gradients sharded over all ranks."""
    return _plan("zero2", "none", "world", "world", "none", precision)


def zero3(*, keep: str = "none", precision: Precision | None = None) -> Plan:
    """ZeRO-3: all three states sharded over all ranks.

    ``keep="node"`` keeps ZeRO++'s secondary partition (hpZ) between forward and backward.
    """
    return _plan("zero3", "world", "world", "world", keep, precision)


def fsdp(*, reshard_after_forward: bool = True, precision: Precision | None = None) -> Plan:
    """PyTorch's ``fully_shard``: zero3.

    ``reshard_after_forward=False`` keeps gathered parameters from forward to backward.
    """
    keep = "none" if reshard_after_forward else "full"
    return _plan("fsdp", "world", "world", "world", keep, precision)


def hsdp(*, keep: str = "none", precision: Precision | None = None) -> Plan:
    """HSDP: all three states sharded inside a node and replicated between nodes."""
    return _plan("hsdp", "node", "node", "node", keep, precision)


def mics(group: str = "node", *, precision: Precision | None = None) -> Plan:
    """MiCS: all three states sharded over a group, such as ``node``, ``node:4`` or ``world:2``."""
    return _plan("mics", group, group, group, "none", precision)


def amsp(*, precision: Precision | None = None) -> Plan:
    """AMSP: parameters and gradients sharded inside a node, optimizer states over all ranks."""
    return _plan("amsp", "node", "node", "world", "none", precision)


def zeropp(*, precision: Precision | None = None) -> Plan:
    """ZeRO++: zero3 with int8 all-gathers, a secondary partition in the node, quantised gradients.

    Gradients travel as int8 inside a node and as int4 between nodes: SDP4Bit reports a loss of
    quality for int4 on both hops. docs/wires.md has our measurements.
    """
    plan = zero3(keep="node", precision=precision)
    return replace(
        plan,
        name="zeropp",
        params=replace(plan.params, wire="int8"),
        grads=replace(plan.grads, wire="int4,node=int8"),
    )


def lean(*, precision: Precision | None = None) -> Plan:
    """amsp with the fewest bytes between nodes: gradients and weight updates leave a node as int4.

    The refresh sends the difference to the weights that the node still has. Inside a node
    gradients travel as bfloat16: more exact than int8, and fast links gain nothing from fewer bits.
    """
    plan = amsp(precision=precision)
    return replace(
        plan,
        name="lean",
        grads=replace(plan.grads, wire="int4,node=bf16"),
        optim=replace(plan.optim, wire="int4/delta"),
    )


def infinity(path: str = "", *, precision: Precision | None = None) -> Plan:
    """ZeRO-Infinity: zero3 with every state on the disk at ``path``.

    Activations are recomputed, and layers of more than 67 million elements are computed in tiles.
    ``path`` is a folder; it may be left empty here and set in ``tiers`` later.
    """
    plan = zero3(precision=precision)
    return replace(
        plan,
        name="infinity",
        params=replace(plan.params, tier="nvme"),
        grads=replace(plan.grads, tier="nvme"),
        optim=replace(plan.optim, tier="nvme"),
        activations="recompute",
        tiers=Tiers(path=path),
        tiling=Tiling(numel=1 << 26),
    )


PRESETS: dict[str, Callable[[], Plan]] = {
    preset.__name__: preset
    for preset in (ddp, zero1, zero2, zero3, fsdp, hsdp, mics, amsp, zeropp, lean, infinity)
}
"""Presets by name, as the command line and plan files know them."""
