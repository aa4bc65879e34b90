"""The optimizer's update of a unit, and the refresh of P with the new values."""

from collections.abc import Iterable

from shardwise.core.layout import FlatSpec
from shardwise.plans.ops import Kind, Lane, Move, Op, Place, moves
from shardwise.plans.placed import Placed, updates_in_windows
from shardwise.plans.plan import has_master, rests_in_master

OPTIM_WORDS = 2
"""How many words the optimizer is assumed to store per element; Adam stores two."""


def update_ops(unit: Placed, optim_words: int) -> Iterable[Op]:
    """See ``UnitOps.update``."""
    if not unit.trained:
        return
    found = [move for flat in unit.trained for move in _moves(unit, flat, optim_words)]
    streams = unit.plan.moving_tier is not None
    yield unit.op(
        Kind.UPDATE, Lane.UPDATE if unit.updates_early else Lane.COMPUTE,
        Place.SUMS, Place.MASTER, moves=moves(*found),
        copies=sum(_copied_out(unit, flat) for flat in unit.trained) if streams else 0,
        after=(Kind.REDUCE, Kind.REPLICATE, Kind.STORE),
    )  # fmt: skip
    refresh = _refresh(unit)
    if refresh is not None:
        yield refresh


def _copied_out(unit: Placed, flat: FlatSpec) -> int:
    """Bytes of new parameters that the update itself copies from the master to P."""
    plan, rungs = unit.plan, unit.rungs
    separate = has_master(plan, rungs, flat.dtype) and not rests_in_master(plan, rungs, flat.dtype)
    if separate and updates_in_windows(plan, rungs, flat.dtype) and not unit.sends_differences:
        return unit.bytes([flat], "compute", rungs.optim)
    return 0


def _moves(unit: Placed, flat: FlatSpec, optim_words: int) -> Iterable[Move]:
    """What the update of a flat moves. It works where the optimizer's states are: on the device,
    or in host memory, where those of a disk go too."""
    plan, rungs = unit.plan, unit.rungs
    params, grads, optim = plan.params.tier, plan.grads.tier, plan.optim.tier
    separate = has_master(plan, rungs, flat.dtype)
    word = unit.bytes([flat], "master", rungs.optim)
    own = unit.bytes([flat], "compute", rungs.optim)
    copied_out = _copied_out(unit, flat)
    if optim == "nvme":
        states = (optim_words + separate) * word
        yield Move("nvme", states, states)
    if optim == "device":
        yield Move(grads, reads=word)
        # Without a master P itself is updated.
        yield Move(params, reads=0 if separate else own, writes=own if not separate else copied_out)
        return
    yield Move("cpu", writes=word if grads == "device" else 0)
    yield Move("nvme", reads=word if grads == "nvme" else 0)
    written = own if not separate else copied_out
    if params == "device":
        yield Move("cpu", reads=written)
    elif params == "nvme":
        yield Move("nvme", reads=0 if separate else own, writes=written)


def _refresh(unit: Placed) -> Op | None:
    plan, rungs, hops = unit.plan, unit.rungs, unit.climb()
    by_difference = unit.sends_differences
    found: list[Move] = []
    copies = 0
    works = masters = False
    for flat in unit.trained:
        separate = has_master(plan, rungs, flat.dtype)
        if rests_in_master(plan, rungs, flat.dtype):
            continue  # the update itself has written P
        windowed = updates_in_windows(plan, rungs, flat.dtype)
        own_is_new = windowed and not by_difference
        if not hops and (own_is_new or not separate):
            continue  # the update itself has written P
        works = True
        shard = unit.bytes([flat], "compute", rungs.params)
        reads = by_difference or own_is_new or not separate
        found.append(Move(plan.params.tier, shard if reads else 0, shard))
        if by_difference or (separate and not own_is_new):
            masters = True
            copies += unit.bytes([flat], "compute", rungs.optim)
            found.append(Move(plan.optim.tier, unit.bytes([flat], "master", rungs.optim)))
    if not works:
        return None
    return unit.op(
        Kind.REFRESH, Lane.OUTER if hops else Lane.COMPUTE,
        Place.MASTER if masters else Place.SHARD, Place.SHARD if unit.travels else Place.FULL,
        hops=hops, moves=moves(*found), copies=copies, after=(Kind.UPDATE,),
    )  # fmt: skip
