"""The optimizer's update of a unit, and the refresh of P with the new values."""

from collections.abc import Iterable

from shardwise.core.layout import FlatSpec
from shardwise.plans.ops import Kind, Lane, Op, Place
from shardwise.plans.placed import Placed, updates_in_windows
from shardwise.plans.plan import has_master

OPTIM_WORDS = 2
"""How many words the optimizer is assumed to store per element; Adam stores two."""


def update_ops(unit: Placed, optim_words: int) -> Iterable[Op]:
    """See ``UnitOps.update``."""
    if not unit.trained:
        return
    moves = _UpdateMoves()
    for flat in unit.trained:
        _move(unit, flat, moves, optim_words)
    streams = unit.plan.moving_tier is not None
    yield unit.op(
        Kind.UPDATE, Lane.UPDATE if unit.updates_early else Lane.COMPUTE,
        Place.SUMS, Place.MASTER, reads=moves.reads, writes=moves.writes,
        tier=unit.plan.moving_tier or "device", crossing=(moves.out, moves.back),
        copies=moves.copies if streams else 0,
        after=(Kind.REDUCE, Kind.REPLICATE, Kind.STORE),
    )  # fmt: skip
    refresh = _refresh(unit)
    if refresh is not None:
        yield refresh


def _move(unit: Placed, flat: FlatSpec, moves: "_UpdateMoves", optim_words: int) -> None:
    """Adds the bytes that the update of a flat reads from tiers and writes to them.

    States in host memory are updated in place: only gradients come in, and the new P goes out.
    States on a disk are updated in host memory as well, where gradients and P may already be.
    """
    plan, rungs = unit.plan, unit.rungs
    params, grads, optim = plan.params.tier, plan.grads.tier, plan.optim.tier
    separate = has_master(plan, rungs, flat.dtype)
    word = unit.bytes([flat], "master", rungs.optim)
    own = unit.bytes([flat], "compute", rungs.optim)
    windowed = updates_in_windows(plan, rungs, flat.dtype)
    copies_out = separate and windowed and not unit.sends_differences
    moves.copies += own if copies_out else 0
    if optim == "cpu":
        moves.writes += word if grads == "device" else 0
        moves.reads += own if params == "device" else 0
        return
    if optim == "nvme":
        moves.reads += (optim_words + separate) * word
        moves.writes += (optim_words + separate) * word
        moves.out += word if grads == "device" else 0
        moves.back += own if params == "device" else 0
    here = {"device", "cpu"} if optim == "nvme" else {"device"}
    moves.reads += word if grads not in here else 0
    if params not in here:
        moves.reads += own if not separate else 0  # then P itself is the master
        moves.writes += own if not separate or copies_out else 0


def _refresh(unit: Placed) -> Op | None:
    plan, rungs, hops = unit.plan, unit.rungs, unit.climb()
    away, by_difference = plan.params.tier != "device", unit.sends_differences
    reads = writes = copies = 0
    works = masters = False
    for flat in unit.trained:
        separate = has_master(plan, rungs, flat.dtype)
        windowed = updates_in_windows(plan, rungs, flat.dtype)
        own_is_new = windowed and not by_difference
        if not hops and (own_is_new or not separate):
            continue  # the update itself has written P
        works = True
        shard = unit.bytes([flat], "compute", rungs.params)
        from_master = by_difference or (separate and not own_is_new)
        if away:
            reads += shard if by_difference or own_is_new or not separate else 0
            writes += shard
        if from_master:
            masters = True
            copies += unit.bytes([flat], "compute", rungs.optim)
            if plan.optim.tier != "device":
                reads += unit.bytes([flat], "master", rungs.optim)
    if not works:
        return None
    return unit.op(
        Kind.REFRESH, Lane.OUTER if hops else Lane.COMPUTE,
        Place.MASTER if masters else Place.SHARD, Place.SHARD if unit.travels else Place.FULL,
        hops=hops, reads=reads, writes=writes, copies=copies,
        tier=plan.params.tier if away else plan.optim.tier, after=(Kind.UPDATE,),
    )  # fmt: skip


class _UpdateMoves:
    """Bytes of an update, summed over flats."""

    def __init__(self) -> None:
        self.reads = self.writes = self.out = self.back = self.copies = 0
