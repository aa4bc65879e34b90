"""The inputs of units' calls in a forward, what autograd saves in them, and the totals."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.work import Saved

SMALL_BYTES = 1 << 16
"""Smaller inputs of units stay in memory: moving them would cost more than it saves."""


class Input(NamedTuple):
    """A tensor that is an input of a unit's call."""

    num_bytes: int
    storage_bytes: int
    """Bytes of all memory that it keeps alive: more than its own if it is a view."""


@dataclass(frozen=True, slots=True)
class Call:
    """The outermost call of a unit; storages are identified by their keys."""

    inputs: Mapping[Hashable, Input]
    inner: Mapping[Hashable, int]
    """What autograd saves in it."""

    @property
    def moved_bytes(self) -> int:
        return sum(given.num_bytes for given in self.inputs.values() if not _is_small(given))

    @property
    def inner_bytes(self) -> int:
        return sum(size for storage, size in self.inner.items() if storage not in self.inputs)


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward: the calls of units, and what autograd saves outside of them."""

    root: Mapping[Hashable, int]
    calls: tuple[Call, ...]

    @property
    def saved(self) -> Saved:
        total = dict(self.root)
        inputs: dict[Hashable, Input] = {}
        for call in self.calls:
            total |= call.inner
            inputs |= {key: given for key, given in call.inputs.items() if key not in self.root}
        return Saved(
            total=sum(total.values()),
            root=sum(self.root.values()),
            checkpoints=sum(given.storage_bytes for given in inputs.values()),
            small=sum(given.storage_bytes for given in inputs.values() if _is_small(given)),
            largest_unit=max((call.inner_bytes for call in self.calls), default=0),
            largest_input=max((call.moved_bytes for call in self.calls), default=0),
        )


def _is_small(given: Input) -> bool:
    return given.num_bytes < SMALL_BYTES
