"""The moments of an expected pass, in order: what hooks would see, and the uses that they make.

Every unit is called once for each time that the forward's order names it. Backward goes through the
calls in reverse. The gradient that reaches one call has just left the one after it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.core.layout import ModelSpec
from shardwise.plans.ops import Trigger
from shardwise.plans.plan import untiled
from shardwise.plans.schedule import UnitOps

Moment = tuple[Trigger, int]
"""A trigger, and a unit's index."""


class Call(NamedTuple):
    """A call of a unit, and the tiles that it computes with."""

    unit: int
    tiles: list[int]


def calls_of(model: ModelSpec, order: Sequence[str]) -> list[Call]:
    """The calls inside a forward of the root: tiles of a layer in a block belong to the block's."""
    index = {unit.name: i for i, unit in enumerate(model.units)}
    inside = {unit.name for unit in model.units if unit.inside}
    calls: list[Call] = []
    for name in order:
        if calls and name in inside and untiled(name) == model.units[calls[-1].unit].name:
            calls[-1].tiles.append(index[name])
        elif index[name]:
            calls.append(Call(index[name], []))
    return calls


def forward_moments(calls: Sequence[Call]) -> Iterator[Moment]:
    yield Trigger.BEFORE_FORWARD, 0
    for unit, tiles in calls:
        yield Trigger.BEFORE_FORWARD, unit
        for tile in tiles:
            yield Trigger.BEFORE_FORWARD, tile
            yield Trigger.AFTER_FORWARD, tile
        yield Trigger.AFTER_FORWARD, unit
    yield Trigger.AFTER_FORWARD, 0


def backward_moments(
    calls: Sequence[Call], units: Sequence[UnitOps], *, recomputes: bool
) -> Iterator[Moment]:
    """``calls`` are those that backward reaches; ``GRADS_READY`` is for units that are trained."""
    yield Trigger.BEFORE_BACKWARD, 0
    last: int | None = None
    """The block whose inputs' gradients begin the next one's backward."""
    for call in reversed(calls):
        unit, is_tile = call.unit, units[call.unit].is_tile
        yield Trigger.BEFORE_BACKWARD, unit
        if last is not None:
            yield Trigger.AFTER_BACKWARD, last
        again = list(_recompute(call)) if recomputes and not is_tile else []
        # The first gradient that needs what is computed again: of a block, its last tile's.
        for tile in reversed(call.tiles):
            yield Trigger.BEFORE_BACKWARD, tile
            yield from again
            again = []
            yield Trigger.GRADS_READY, tile
            yield Trigger.AFTER_BACKWARD, tile
        yield from again
        yield Trigger.GRADS_READY, unit
        last = None if is_tile else unit
        if is_tile:
            yield Trigger.AFTER_BACKWARD, unit
    if last is not None:
        yield Trigger.AFTER_BACKWARD, last
    yield Trigger.GRADS_READY, 0


def _recompute(call: Call) -> Iterator[Moment]:
    """A call's forward once more."""
    yield Trigger.BEFORE_RECOMPUTE, call.unit
    for tile in call.tiles:
        yield Trigger.BEFORE_RECOMPUTE, tile
        yield Trigger.AFTER_RECOMPUTE, tile
    yield Trigger.AFTER_RECOMPUTE, call.unit


def uses(moments: Sequence[Moment], units: Sequence[UnitOps]) -> list[int]:
    """The order that a first pass would record: a unit is used where it is not held yet."""
    backward = any(trigger is Trigger.BEFORE_BACKWARD for trigger, _ in moments)
    found: list[int] = []
    held: set[int] = set()
    for trigger, unit in moments:
        ops = units[unit]
        if not ops.travels or ops.encloses or (backward and ops.kept_rung == 0):
            continue
        if trigger in _BEGINS and unit not in held:
            found.append(unit)
        if trigger is Trigger.BEFORE_BACKWARD:
            held.add(unit)  # also while it is recomputed
        elif trigger is Trigger.AFTER_BACKWARD:
            held.discard(unit)
    return found


_BEGINS = (Trigger.BEFORE_FORWARD, Trigger.BEFORE_BACKWARD, Trigger.BEFORE_RECOMPUTE)
