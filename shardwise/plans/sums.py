"""Operations on a unit's complete gradients: collect, reduce, replicate, store."""

from collections.abc import Iterable, Sequence

from shardwise.core.layout import FlatSpec
from shardwise.plans.ops import Kind, Lane, Move, Op, Place, moves
from shardwise.plans.placed import Placed, climbing

Holds = tuple[bool, ...]
"""Per trained flat: whether there are gradients to add to."""


def ready_ops(unit: Placed, synchronises: bool, held: Holds, summed: Holds) -> Iterable[Op]:
    """See ``UnitOps.ready``."""
    if not unit.trained:
        return
    grads = unit.bytes(unit.trained, "reduce", 0)
    yield unit.op(Kind.COLLECT, target=Place.GRADS, copies=grads)
    if synchronises or unit.rungs.grads == unit.rungs.bottom:
        yield from _sum(unit, held, summed)
    else:
        yield from _hold(unit, held)


def _hold(unit: Placed, held: Holds) -> Iterable[Op]:
    """Under ``no_sync``: the hops stop at G's rung, where micro-batches accumulate."""
    rungs, tier = unit.rungs, unit.plan.grads.tier
    rests = unit.bytes(unit.trained, "master", rungs.grads)
    adding = unit.bytes(_chosen(unit.trained, held), "master", rungs.grads)
    hops = unit.down(0, rungs.grads)
    away = tier != "device"
    yield unit.op(
        Kind.REDUCE, Lane.REDUCE, Place.GRADS, Place.HELD, hops=hops, adds=held,
        # Hops write into the held gradients; adding also reads these.
        copies=(0 if hops else rests) + adding // 2,
        moves=moves(Move(tier, reads=adding)), after=(Kind.COLLECT,),
    )  # fmt: skip
    if away:
        yield unit.op(
            Kind.STORE, Lane.REDUCE, Place.HELD, Place.HELD,
            moves=moves(Move(tier, writes=rests)), after=(Kind.REDUCE,),
        )  # fmt: skip


def _sum(unit: Placed, held: Holds, summed: Holds) -> Iterable[Op]:
    """The hops go on to the bottom rung, so that each element is summed in exactly one place.

    Replicas of an OS shard get the sums from there, so all have equal bits.
    """
    rungs, tier = unit.rungs, unit.plan.grads.tier
    joins = held if rungs.grads != rungs.bottom else (False,) * len(held)
    joining = unit.bytes(_chosen(unit.trained, joins), "master", rungs.grads)
    adding = unit.bytes(_chosen(unit.trained, summed), "master", rungs.optim)
    rests = unit.bytes(unit.trained, "master", rungs.optim)
    hops, away = unit.down(0, rungs.bottom), tier != "device"
    replicates = rungs.optim != rungs.bottom
    overlaps = not replicates and len(hops) > 1 and any(hop.format for hop in hops)
    # Without hops, a rank sums piece by piece on the way to a disk.
    in_pieces = tier == "nvme" and rungs.bottom == 0
    inner = [hop for hop in hops if hop.step < rungs.grads]
    yield unit.op(
        Kind.REDUCE, Lane.REDUCE, Place.GRADS, Place.SUMS, hops=hops, adds=summed, joins=joins,
        # The sum with the held gradients is copied back to the buffer that it travels from.
        copies=adding // 2 + joining // 2 + joining + (0 if inner else joining),
        moves=moves(Move(tier, joining + adding, rests if in_pieces else 0)),
        after=(Kind.COLLECT,), overlaps=overlaps,
    )  # fmt: skip
    if replicates:
        yield unit.op(
            Kind.REPLICATE, Lane.REDUCE, Place.SUMS, Place.SUMS,
            hops=climbing(unit.down(rungs.optim, rungs.bottom)), after=(Kind.REDUCE,),
        )  # fmt: skip
    if away and not in_pieces:
        yield unit.op(
            Kind.STORE, Lane.OUTER if overlaps else Lane.REDUCE, Place.SUMS, Place.SUMS,
            moves=moves(Move(tier, writes=rests)), after=(Kind.REDUCE, Kind.REPLICATE),
        )  # fmt: skip


def _chosen(flats: Sequence[FlatSpec], chosen: Holds) -> list[FlatSpec]:
    return [flat for flat, wanted in zip(flats, chosen, strict=True) if wanted]
