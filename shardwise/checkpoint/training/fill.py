"""Fills this rank's shards from a checkpoint, window by window, on whatever tier they rest."""

from collections.abc import Callable
from functools import partial

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
from shardwise.tier.rest import Homes, Rest
from shardwise.tier.staging import Staging

Name = Callable[[ParamSlot], str]
"""The saved tensor of a slot's parameter, or what it is called in the model."""
Target = tuple[Rest, Interval]
"""A shard, and the elements of the flat that it has."""
Values = dict[str, dict[str, object]]
Keys = dict[str, set[str]]
_PAUSE_BYTES = 1 << 24
"""How much may be on its way to a disk at once."""


class Filler:
    """Fills the shards of a model; ``name_of``: what a parameter is called in the checkpoint."""

    def __init__(self, reader: Reader, homes: Homes, name_of: Name) -> None:
        self._reader, self._homes, self._name_of = reader, homes, name_of
        self._written_bytes = 0

    def weights(self, flat: Flat) -> None:
        """P's shard and the master weights of one flat.

        P is read if it was saved, and otherwise computed from the master weights, which are then
        read once for both.
        """
        params, find = flat.params, self._reader.index.find
        slots = [slot for slot in flat.slots if find(self._model(slot)) is not None]
        shard: Target = (params.shard, flat.part_at)
        separate = params.master is not None and flat.has_master and not flat.rests_in_master
        if not separate:
            self._fill(flat, [shard], slots, self._model)
            return
        assert params.master is not None
        master: Target = (params.master, flat.optim_at)
        if all(self._compute(slot) == self._model(slot) for slot in slots):
            self._fill(flat, [shard, master], slots, self._model)
        else:
            self._fill(flat, [shard], slots, self._compute)
            self._fill(flat, [master], slots, self._model)

    def states(self, unit: Unit, states: States, numbers: Values, keys: Keys) -> None:
        """The optimizer's states of a unit. ``numbers``: those that are no tensors, by parameter;
        ``keys``: the names of those that are, by parameter."""
        for flat in unit.trained:
            found: dict[str, dict[ParamSlot, Rest]] = {}
            for slot in flat.slots:
                for key, rest in self._make(states, slot, numbers, keys).items():
                    found.setdefault(key, {})[slot] = rest
            for key, rests in found.items():
                state_of = partial(self._state, key)
                whole = states.whole(flat, key)
                if whole is not None:  # in windows that begin on pages
                    self._fill(flat, [(whole, flat.optim_at)], list(rests), state_of)
                    continue
                for slot, rest in rests.items():
                    self._fill(flat, [(rest, slot.segment)], [slot], state_of)

    def _make(
        self, states: States, slot: ParamSlot, numbers: Values, keys: Keys
    ) -> dict[str, Rest]:
        """Replaces a parameter's state, and returns the shards that are to be filled."""
        parameter = self._name_of(slot)
        known = parameter in numbers or parameter in keys
        if not slot.segment.numel or not known:
            return states.replace(slot, None, {})
        own = dict(numbers.get(parameter, {}))
        dtypes: dict[str, torch.dtype] = {}
        for key in sorted(keys.get(parameter, ())):
            name = self._state(key, slot)
            tensor = self._reader.index.find(name)
            assert tensor is not None
            if tensor.shape == () or tensor.shape != tuple(slot.face.parameter.shape):
                own[key] = self._reader.whole(name)
            else:
                dtypes[key] = getattr(torch, tensor.dtype)
        return states.replace(slot, own, dtypes)

    def _compute(self, slot: ParamSlot) -> str:
        own = f"{COMPUTE}.{self._name_of(slot)}"
        return own if self._reader.index.find(own) is not None else self._model(slot)

    def _model(self, slot: ParamSlot) -> str:
        return f"{MODEL}.{self._name_of(slot)}"

    def _state(self, key: str, slot: ParamSlot) -> str:
        return f"{OPTIM}.{self._name_of(slot)}.{key}"

    def _fill(
        self, flat: Flat, targets: list[Target], slots: list[ParamSlot], name_of: Name
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
                self._fill_window(flat.staging, targets, slots, name_of, window)

    def _fill_window(
        self,
        staging: Staging,
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
                _read(self._reader, staging, slot, name_of(slot), common, buffers)
        finally:
            for buffer in buffers:
                buffer.end()
        self._pause(sum(buffer.tensor.nbytes for buffer in buffers))

    def _pause(self, written_bytes: int) -> None:
        """Wait for a disk now and then, so that memory stays that of a few windows."""
        self._written_bytes += written_bytes
        if self._written_bytes >= _PAUSE_BYTES:
            self._written_bytes = 0
            self._homes.settle()
            self._homes.trim()


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
