"""Values from outside, on their way into a flat's shard of P and its master."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from shardwise.core.layout import Slot
from shardwise.core.topology import Interval
from shardwise.runtime.flat import Flat
from shardwise.tier.rest import PartOf, Rest


def make_master(flat: Flat, *, empty: bool = False) -> None:
    """Gives a trained flat its master; ``empty``: before P has any values."""
    params = flat.params
    if not flat.has_master:
        params.master = PartOf(params.shard, flat.own)
        return
    numel, dtype = flat.optim_at.numel, flat.dtypes.master
    params.master = flat.make_rest(flat.optim_tier, "master weights", numel, dtype)
    if not empty:
        with params.shard.use() as shard, params.master.use(reads=False, writes=True) as master:
            master.copy_(shard[flat.own])


@contextmanager
def writing(flat: Flat) -> Iterator[Callable[[Slot, torch.Tensor], None]]:
    """Gives a function that takes this rank's elements of a value, into shard and master."""
    with ExitStack() as stack:
        targets = [
            (stack.enter_context(rest.use(writes=True)), place) for rest, place in _targets(flat)
        ]

        def write(slot: Slot, value: torch.Tensor) -> None:
            flat_value = value.reshape(-1)
            for buffer, place in targets:
                common = slot.interval.intersect(place)
                if common.numel:
                    source = flat_value[common.relative_to(slot.interval.start)]
                    buffer[common.relative_to(place.start)].copy_(source)

        yield write


def write(flat: Flat, slot: Slot, value: torch.Tensor) -> None:
    """Takes this rank's elements of one parameter's full value; nothing else is read."""
    for rest, place in _targets(flat):
        common = slot.interval.intersect(place)
        if common.numel:
            at = common.relative_to(place.start)
            loan = rest.lend(at.start, at.stop, reads=False)
            loan.wait().copy_(value.reshape(-1)[common.relative_to(slot.interval.start)])
            loan.give_back(changed=True)


def _targets(flat: Flat) -> list[tuple[Rest, Interval]]:
    """Where values from outside go."""
    found = [(flat.params.shard, flat.part_at)]
    if flat.params.master is not None and flat.has_master:
        found.append((flat.params.master, flat.optim_at))
    return found
