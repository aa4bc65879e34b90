"""What the units of a model compute: operations of forward, and of backward relative to them."""

from collections import Counter

from shardwise.core.layout import ModelSpec
from shardwise.core.work import Work
from shardwise.plans.placed import trained_flats
from shardwise.plans.plan import untiled


def forward_flops(model: ModelSpec, work: Work) -> dict[str, float]:
    """Of every unit: its share of its untiled unit's operations, by parameters."""
    numels: Counter[str] = Counter()
    members: Counter[str] = Counter()
    for unit in model.units:
        numels[untiled(unit.name)] += unit.numel
        members[untiled(unit.name)] += 1
    found = {}
    for unit in model.units:
        name = untiled(unit.name)
        share = 1.0 if members[name] == 1 else unit.numel / max(1, numels[name])
        found[unit.name] = work.forward_flops.get(name, 0.0) * share
    return found


def backward_times(model: ModelSpec) -> dict[str, float]:
    """Of every unit: operations of its backward over those of its forward.

    As many for the gradients of its inputs, if anything before it is trained (the root is taken to
    be first as a whole) or some of it, and as many for those of its weights as far as they are.
    """
    root, *inner = model.units
    reached = bool(trained_flats(root))
    found = {root.name: 2.0 if reached else 1.0}
    for unit in inner:  # in the order of a forward
        trained = sum(flat.numel for flat in trained_flats(unit))
        total = sum(flat.numel for flat in unit.flats)
        passes = reached or 0 < trained < total  # what is trained may lie behind what is not
        found[unit.name] = float(passes) + trained / max(1, total)
        reached = reached or trained > 0
    return found
