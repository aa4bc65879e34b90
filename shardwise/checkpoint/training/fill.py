"""Fills this rank's shards from a checkpoint, window by window, on whatever tier they rest."""

from collections.abc import Callable

import torch

from shardwise.checkpoint.training.contents import COMPUTE, MODEL, OPTIM, WINDOW_BYTES
from shardwise.checkpoint.training.read import Reader
from shardwise.core.topology import Interval
from shardwise.device.abilities import separate_memory
from shardwise.runtime.flat import Flat
from shardwise.runtime.optimizer.states import States
from shardwise.runtime.slot import ParamSlot
from shardwise.runtime.unit import Unit
from shardwise.tier.memory import tensor_on
from shardwise.tier.rest import Rest
from shardwise.tier.staging import Staging

Name = Callable[[ParamSlot], str]
"""The saved tensor of a slot's parameter, or what it is called in the model."""
Target = tuple[Rest, Interval]
"""A shard, and the elements of the flat that it has."""


def fill_weights(flat: Flat, reader: Reader, name_of: Callable[[ParamSlot], str]) -> None:
    """P's shard and the master weights of one flat.

    P is read if it was saved, and otherwise computed from the master weights, which are then read
    once for both.
    """
    params, find = flat.params, reader.index.find

    def compute(slot: ParamSlot) -> str:
        own = f"{COMPUTE}.{name_of(slot)}"
        return own if find(own) is not None else model(slot)

    def model(slot: ParamSlot) -> str:
        return f"{MODEL}.{name_of(slot)}"

    slots = [slot for slot in flat.slots if find(model(slot)) is not None]
    shard: Target = (params.shard, flat.part_at)
    separate = params.master is not None and flat.has_master and not flat.rests_in_master
    if not separate:
        fill(flat, reader, [shard], slots, model)
        return
    assert params.master is not None
    master: Target = (params.master, flat.optim_at)
    if all(compute(slot) == model(slot) for slot in slots):
        fill(flat, reader, [shard, master], slots, model)
    else:
        fill(flat, reader, [shard], slots, compute)
        fill(flat, reader, [master], slots, model)


def fill_states(
    unit: Unit,
    states: States,
    reader: Reader,
    name_of: Callable[[ParamSlot], str],
    numbers: dict[str, dict[str, object]],
    keys: dict[str, set[str]],
) -> None:
    """The optimizer's states of a unit. ``numbers``: those that are no tensors, by parameter;
    ``keys``: the names of those that are, by parameter."""
    for flat in unit.trained:
        targets: dict[str, list[tuple[ParamSlot, Rest]]] = {}
        for slot in flat.slots:
            parameter = name_of(slot)
            known = parameter in numbers or parameter in keys
            if not slot.segment.numel or not known:
                states.replace(slot, None, {})
                continue
            own = dict(numbers.get(parameter, {}))
            dtypes: dict[str, torch.dtype] = {}
            for key in sorted(keys.get(parameter, ())):
                name = f"{OPTIM}.{parameter}.{key}"
                tensor = reader.index.find(name)
                assert tensor is not None
                if tensor.shape == () or tensor.shape != tuple(slot.face.parameter.shape):
                    own[key] = reader.whole(name)
                else:
                    dtypes[key] = getattr(torch, tensor.dtype)
            for key, rest in states.replace(slot, own, dtypes).items():
                targets.setdefault(key, []).append((slot, rest))
        for key, found in targets.items():
            for slot, rest in found:
                name = f"{OPTIM}.{name_of(slot)}.{key}"
                fill(flat, reader, [(rest, slot.segment)], [slot], lambda _, name=name: name)


def fill(
    flat: Flat, reader: Reader, targets: list[Target], slots: list[ParamSlot], name_of: Name
) -> None:
    """Fill shards of a flat, reading once; all targets lie inside the first one."""
    _, place = targets[0]
    places = [place]
    if len(slots) < len(flat.slots):  # the others keep what they have
        places = [slot.spec.interval.intersect(place) for slot in slots]
    step = max(1, WINDOW_BYTES // max(rest.dtype.itemsize for rest, _ in targets))
    for at in places:
        for start in range(at.start, at.stop, step):
            window = Interval(start, min(start + step, at.stop))
            _fill_window(flat.staging, reader, targets, slots, name_of, window)


def _fill_window(
    staging: Staging,
    reader: Reader,
    targets: list[Target],
    slots: list[ParamSlot],
    name_of: Name,
    window: Interval,
) -> None:
    inside = [slot for slot in slots if slot.spec.interval.intersect(window).numel]
    buffers = [
        _Buffer(staging, rest, at.start, window.intersect(at))
        for rest, at in targets
        if window.intersect(at).numel
    ]
    try:
        if sum(slot.spec.interval.intersect(window).numel for slot in inside) < window.numel:
            for buffer in buffers:
                buffer.tensor.zero_()  # padding
        for slot in inside:
            common = slot.spec.interval.intersect(window)
            _read(reader, staging, slot, name_of(slot), common, buffers)
    finally:
        for buffer in buffers:
            buffer.end()


def _read(
    reader: Reader,
    staging: Staging,
    slot: ParamSlot,
    name: str,
    common: Interval,
    buffers: "list[_Buffer]",
) -> None:
    tensor = reader.index.find(name)
    assert tensor is not None
    dtype, first = getattr(torch, tensor.dtype), slot.start - slot.spec.interval.start
    buffer, *others = buffers
    values = buffer.tensor[common.relative_to(buffer.at.start)]
    storage = None
    if values.dtype == dtype:
        source = values
    else:
        storage = staging.on_host.take(common.numel * dtype.itemsize)
        source = tensor_on(storage, common.numel, dtype)
    reader.read(name, common.start + first, source)
    for other in others:
        shared = common.intersect(other.at)
        if shared.numel:
            part = source[shared.relative_to(common.start)]
            other.tensor[shared.relative_to(other.at.start)].copy_(part)
    if storage is not None:
        values.copy_(source)
        staging.on_host.give(storage)


class _Buffer:
    """A window of a shard on the host: the shard's own memory, or a buffer that is sent there."""

    def __init__(self, staging: Staging, rest: Rest, origin: int, at: Interval) -> None:
        self._staging, self.at = staging, at
        self._loan = rest.lend(at.start - origin, at.stop - origin, reads=False)
        self._storage: torch.UntypedStorage | None = None
        if separate_memory(self._loan.tensor.device):
            self._storage = staging.on_host.take(self._loan.tensor.nbytes)
            self.tensor = tensor_on(self._storage, at.numel, rest.dtype)
        else:
            self.tensor = self._loan.arrived()

    def end(self) -> None:
        if self._storage is None:
            self._loan.give_back(changed=True)
        else:
            self._staging.send(self.tensor, self._loan)
            self._staging.on_host.give(self._storage)
