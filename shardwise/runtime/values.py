"""Writes values from outside into a flat's shard of P and into its master."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from shardwise.core.layout import Slot
from shardwise.core.topology import Interval
from shardwise.runtime.flat import Flat
from shardwise.tier.rest import PartOf, Rest, use


def make_master(flat: Flat, *, empty: bool = False) -> None:
    """Makes a trained flat's master weights; ``empty``: do not copy P's values into them."""
    params = flat.params
    if not flat.has_master or flat.rests_in_master:
        params.master = PartOf(params.shard, flat.own)
        return
    numel, dtype = flat.optim_at.numel, flat.dtypes.master
    params.master = flat.make_rest(flat.optim_tier, "master weights", numel, dtype)
    if not empty:
        with use(params.shard) as shard, use(params.master, reads=False, writes=True) as master:
            master.copy_(shard[flat.own])


@contextmanager
def writing(flat: Flat) -> Iterator[Callable[[Slot, torch.Tensor], None]]:
    """Yields a function that writes this rank's elements of a value to P's shard and the master."""
    with ExitStack() as stack:
        targets = [
            (stack.enter_context(use(rest, writes=True)), place) for rest, place in _targets(flat)
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
    """Writes this rank's elements of one parameter's full value, without reading the rest."""
    for rest, place in _targets(flat):
        common = slot.interval.intersect(place)
        if common.numel:
            at = common.relative_to(place.start)
            loan = rest.lend(at.start, at.stop, reads=False)
            loan.arrived().copy_(value.reshape(-1)[common.relative_to(slot.interval.start)])
            loan.give_back(changed=True)


def _targets(flat: Flat) -> list[tuple[Rest, Interval]]:
    """The shards that values from outside are written to, with their intervals."""
    found = [(flat.params.shard, flat.part_at)]
    if flat.params.master is not None and flat.has_master and not flat.rests_in_master:
        found.append((flat.params.master, flat.optim_at))
    return found
