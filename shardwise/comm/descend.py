"""Reductions: flats on their way down the ladder, summed at every hop.

[Note: Columns]
On the way down an encoded flat is cut into chunks: the same *columns* of every granule, side by
side, are a small flat with the same ladder. The last leg runs in a separate lane, so the outer hop
of one chunk travels while the inner hops of the next are summed.

[Note: Launches]
On an accelerator an encoded hop of a chunk is three launches: one encodes the pieces of all other
members, straight from the columns; one exchanges them; one decodes what arrived, adds this rank's
own piece, and scales the sum and adds it to where it belongs. A hop in a plain format (raw, or a
cast) is a reduce-scatter of the backend, which sums in that format, as raw hops do anyway; where
the values have that dtype already it runs in place, on the whole flat and before it is cut.
On the CPU a rank adds piece by piece as it reads them, in memory that stays in cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.comm.link import CollectiveLink, accumulate, pieces
from shardwise.core.wire import CAST_DTYPES
from shardwise.plans.hops import chunk_columns
from shardwise.wire.codec import Codec

if TYPE_CHECKING:
    from shardwise.comm.carry import Carried, Carrier, Leg, Outer


@dataclass(frozen=True)
class _Chunk:
    """Some columns of every granule of a flat; see [Note: Columns]."""

    flat: "Carried"
    columns: slice

    @property
    def granule(self) -> int:
        return int(self.columns.stop - self.columns.start)


@dataclass(frozen=True)
class _Hop:
    """One hop of a chunk: ``out`` becomes ``scale`` times the sum of all ranks' piece of ``rows``,
    or with ``add`` that is added. Matrices have a row per granule."""

    chunk: _Chunk
    leg: "Leg"
    rows: torch.Tensor
    """What is summed: the granules of all members."""
    own: torch.Tensor
    """This rank's piece of them."""
    total: torch.Tensor
    """Contiguous memory in a wide dtype for the sum; may be that of ``own``."""
    out: torch.Tensor
    scale: float = 1.0
    add: bool = False

    @property
    def kept(self) -> slice:
        """The rows that are this rank's own: they are not sent."""
        start = self.leg.link.coordinate * len(self.own)
        return slice(start, start + len(self.own))

    @property
    def residual(self) -> torch.Tensor | None:
        kept = self.chunk.flat.residual(self.leg.hop)
        return None if kept is None else kept[:, self.chunk.columns]


def descend(
    carrier: "Carrier",
    flat: "Carried",
    source: torch.Tensor,
    top: int,
    legs: Sequence["Leg"],
    out: torch.Tensor,
    *,
    scale: float,
    add: bool,
    outer: "Outer | None",
) -> None:
    """``Carrier.descend``."""
    raw = 0
    while raw < len(legs) and _is_raw(flat, legs[raw], source.dtype):
        raw += 1
    if raw == len(legs) or not any(flat.format(leg.hop) for leg in legs):
        if outer is not None:
            outer.last.order_stream()  # another flat's last leg may still use that link
        _descend_raw(carrier, flat, source, top, legs, out, scale=scale, add=add)
        if outer is not None:
            for leg in legs:
                leg.link.finish()
        return
    origin = flat.interval(top).start
    for leg in legs[:raw]:
        source = _reduce_in_place(carrier, flat, source, origin, leg)
        origin, top = flat.interval(leg.low).start, leg.low
    _descend_in_chunks(
        carrier, flat, source, top, legs[raw:], out, scale=scale, add=add, outer=outer
    )


def _is_raw(flat: "Carried", leg: "Leg", dtype: torch.dtype) -> bool:
    """Whether a link sums values of a dtype as they are."""
    return isinstance(leg.link, CollectiveLink) and _plain_dtype(flat, leg) is dtype


def _plain_dtype(flat: "Carried", leg: "Leg") -> torch.dtype | None:
    """The dtype of a hop's values, unless they are encoded or errors of a cast are fed back."""
    format = flat.format(leg.hop)
    if format is None:
        return flat.reduce_dtype
    if format.is_blocked or flat.residual(leg.hop) is not None:
        return None
    dtype: torch.dtype = getattr(torch, CAST_DTYPES[format.kind])
    return dtype


def _descend_raw(
    carrier: "Carrier",
    flat: "Carried",
    source: torch.Tensor,
    top: int,
    legs: Sequence["Leg"],
    out: torch.Tensor,
    *,
    scale: float,
    add: bool,
) -> None:
    """Raw hops: each sums in place into this rank's piece, which no other rank reads."""
    if not legs:
        accumulate(source, out, scale=scale, add=add)
        return
    origin = flat.interval(top).start
    codec = carrier.codec(None, source.dtype, flat.granule)
    for leg in legs[:-1]:
        source = _reduce_in_place(carrier, flat, source, origin, leg)
        origin = flat.interval(leg.low).start
    last = legs[-1]
    own = source[flat.interval(last.low).relative_to(origin)]
    whole = source[flat.interval(last.high).relative_to(origin)].view(torch.uint8)
    last.link.reduce(whole, own, out, last.key, codec, scale=scale, add=add)


def _reduce_in_place(
    carrier: "Carrier", flat: "Carried", source: torch.Tensor, origin: int, leg: "Leg"
) -> torch.Tensor:
    """Sums this rank's piece of ``source``, which begins at element ``origin``; returns it."""
    codec = carrier.codec(None, source.dtype, flat.granule)
    whole = source[flat.interval(leg.high).relative_to(origin)].view(torch.uint8)
    own = source[flat.interval(leg.low).relative_to(origin)]
    leg.link.reduce(whole, own, own, leg.key, codec, scale=1.0, add=False)
    return own


def _descend_in_chunks(
    carrier: "Carrier",
    flat: "Carried",
    source: torch.Tensor,
    top: int,
    legs: Sequence["Leg"],
    out: torch.Tensor,
    *,
    scale: float,
    add: bool,
    outer: "Outer | None",
) -> None:
    rows, sums = source.view(-1, flat.granule), out.view(-1, flat.granule)
    wide = torch.promote_types(source.dtype, torch.float32)
    first: Leg | None = legs[0]
    others = list(legs[1:])
    if outer is not None and not others:
        # The only leg runs later, when the source may be gone: it gets a copy.
        first, others = None, list(legs)
    low = top if first is None else first.low
    mine = flat.rows(low, top)
    for columns in chunk_columns(flat.granule, len(rows), accelerated=carrier.accelerated):
        chunk = _Chunk(flat, columns)
        own = rows[mine, columns]
        if first is not None and not others and outer is None and carrier.accelerated:
            target = sums[:, columns]
            _sum(carrier, _Hop(chunk, first, rows[:, columns], own, own, target, scale, add))
            continue
        # This chunk must not overwrite the values that the outer lane still uses.
        role = f"values {outer.turn()}" if outer else "values"
        values = carrier.scratch(role, own.numel(), wide).view(-1, chunk.granule)
        if first is None:
            values.copy_(own)
        else:
            _sum(carrier, _Hop(chunk, first, rows[:, columns], own, values, values))
        for leg in others[:-1]:
            piece = values[flat.rows(leg.low, low)]
            _sum(carrier, _Hop(chunk, leg, values[flat.rows(leg.high, low)], piece, piece, piece))

        def end(carrier: "Carrier", chunk: _Chunk = chunk, values: torch.Tensor = values) -> None:
            piece, target = values[flat.rows(legs[-1].low, low)], sums[:, chunk.columns]
            if not others:
                accumulate(piece, target, scale=scale, add=add)
                return
            rows = values[flat.rows(others[-1].high, low)]
            _sum(carrier, _Hop(chunk, others[-1], rows, piece, piece, target, scale, add))

        outer.run(end, f"reduce {flat.unit_name}") if outer else end(carrier)


def _sum(carrier: "Carrier", hop: _Hop) -> None:
    flat, leg = hop.chunk.flat, hop.leg
    codec = carrier.codec(flat.format(leg.hop), flat.reduce_dtype, hop.chunk.granule)
    if not isinstance(leg.link, CollectiveLink):
        _sum_by_reading(carrier, hop, codec)
    elif (dtype := _plain_dtype(flat, leg)) is not None:
        _sum_plain(carrier, hop, leg.link, codec, dtype)
    else:
        _sum_exchanged(carrier, hop, leg.link, codec)


def _sum_by_reading(carrier: "Carrier", hop: _Hop, codec: Codec) -> None:
    """The link gets the others' pieces, and adds them one by one."""
    if hop.total.data_ptr() != hop.own.data_ptr():
        hop.total.copy_(hop.own)
    payload = _encode_others(carrier, hop, codec)
    leg, total = hop.leg, hop.total.view(-1)
    leg.link.reduce(payload, total, total, leg.key, codec, scale=1.0, add=False)
    if hop.out.data_ptr() != hop.total.data_ptr():
        accumulate(hop.total, hop.out, scale=hop.scale, add=hop.add)


def _sum_plain(
    carrier: "Carrier", hop: _Hop, link: CollectiveLink, codec: Codec, dtype: torch.dtype
) -> None:
    """The backend sums."""
    whole = hop.rows
    if whole.dtype != dtype or not whole.is_contiguous():
        whole = carrier.scratch("plain", whole.numel(), dtype).view(whole.shape).copy_(whole)
    own = pieces(whole.view(-1), link.size)[link.coordinate]
    payload = whole.view(-1).view(torch.uint8)
    link.reduce(payload, own, hop.out, hop.leg.key, codec, scale=hop.scale, add=hop.add)


def _sum_exchanged(carrier: "Carrier", hop: _Hop, link: CollectiveLink, codec: Codec) -> None:
    """All pieces arrive first, and are summed at once."""
    payload = _encode_others(carrier, hop, codec)
    arrived = carrier.scratch("arrived", payload.numel())
    link.exchange(payload, arrived, hop.leg.key)
    codec.sum(
        arrived.view(link.size, -1), hop.own, hop.out, link.coordinate,
        scale=hop.scale, add=hop.add,
    )  # fmt: skip


def _encode_others(carrier: "Carrier", hop: _Hop, codec: Codec) -> torch.Tensor:
    """A payload with all pieces but this rank's own, which nobody reads."""
    payload = carrier.payload(codec.nbytes(hop.rows.numel()), (hop.leg,))
    codec.encode_granules(hop.rows, payload, skip=hop.kept, residual=hop.residual)
    return payload
