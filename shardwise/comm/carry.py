"""Carrying flats over hops, raw or encoded: up the ladder (gather, refresh) and down it (reduce).

[Note: Payloads]
A hop with a wire format moves a *payload*: the encoded form of a flat, in which every granule (a
part of the bottom rung) has its own bytes, of one length and in order. So the payload of any part
of any rung is contiguous, and hops cut it as they cut the flat. On the way up a payload is made
once, by the rank that owns the values, and forwarded unchanged over all hops of one format;
everybody, the owner included, then takes what it decodes to. That is the replica rule: all holders
of an interval hold equal bits, whatever was lost.

[Note: Columns]
On the way down an encoded flat is cut into chunks: the same *columns* of every granule, side by
side, are a small flat with the same ladder. While the outer hop of one chunk travels, the inner
hops of the next are summed: the last leg runs in a lane of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from shardwise.comm.lane import Early, Lane
from shardwise.comm.link import Link, accumulate, pieces
from shardwise.core.ticket import DONE, Ticket
from shardwise.core.topology import Interval
from shardwise.core.trace import span
from shardwise.core.wire import Format
from shardwise.plans.hops import chunk_columns
from shardwise.plans.ops import Hop
from shardwise.wire.codec import CastCodec, Codec, make_codec


class Carried(Protocol):
    """What is carried: a flat buffer, cut into the shards of a ladder's rungs."""

    unit_name: str
    granule: int
    """Elements of a shard of the bottom rung."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which raw gradients travel."""
        ...

    def format(self, hop: Hop) -> Format | None:
        """How it travels on a hop; None: as it is."""

    def interval(self, rung: int) -> Interval:
        """This rank's shard on a rung."""
        ...

    def rows(self, rung: int, top: int) -> slice:
        """Which of the granules that this rank owns on rung ``top`` it owns on a lower rung too."""
        ...

    def residual(self, hop: Hop) -> torch.Tensor | None:
        """What error feedback adds to the next gradients on a hop: a row for each other member."""


@dataclass(frozen=True)
class Leg:
    """One hop of a walk, with the link that it takes and the key that names the exchange."""

    hop: Hop
    link: Link
    key: int

    @property
    def low(self) -> int:
        """The rung below the hop."""
        return self.hop.step + 1

    @property
    def high(self) -> int:
        """The rung above the hop."""
        return self.hop.step


def finish(legs: Sequence[Leg]) -> None:
    """Returns when no other rank reads this one's buffers any more."""
    for leg in legs:
        leg.link.finish()


class Carrier:
    """One lane's codecs and working memory. Lanes run at once, so that each has its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._codecs: dict[tuple[Format | torch.dtype, int], Codec] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._read: Sequence[Leg] = ()
        """The legs on which other ranks may still read the last payload."""

    @property
    def held_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def codec(self, format: Format | None, dtype: torch.dtype, granule: int) -> Codec:
        key = (dtype if format is None else format, granule)
        if key not in self._codecs:
            if format is None:
                self._codecs[key] = CastCodec(dtype, self._device)
            else:
                self._codecs[key] = make_codec(format, granule, self._device)
        return self._codecs[key]

    def scratch(self, role: str, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Memory for a role, kept from one use to the next: fresh pages cost more than the work."""
        nbytes = numel * dtype.itemsize
        memory = self._memory.get(role)
        if memory is None or memory.nbytes < nbytes:
            self._memory.pop(role, None)  # first, so that not both are there at once
            memory = self._memory[role] = torch.empty(
                nbytes, dtype=torch.uint8, device=self._device
            )
        return memory[:nbytes].view(dtype)

    def payload(self, nbytes: int, legs: Sequence[Leg]) -> torch.Tensor:
        """Memory for what travels on some legs next."""
        finish(self._read)
        self._read = legs
        return self.scratch("payload", nbytes)

    # --- up -----------------------------------------------------------------------------------

    def climb(
        self,
        flat: Carried,
        buffer: torch.Tensor,
        origin: int,
        legs: Sequence[Leg],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Fills ``buffer``, which begins at element ``origin``, from the own part upwards.

        ``dtype`` is that of what has no wire format, where it is not the buffer's.
        """
        dtype = dtype or buffer.dtype
        for format, run in _runs(flat, legs):
            if format is None and dtype == buffer.dtype:
                for leg in run:
                    leg.link.gather(buffer[flat.interval(leg.high).relative_to(origin)], leg.key)
                continue
            own = buffer[flat.interval(run[0].low).relative_to(origin)]
            codec = self.codec(format, dtype, flat.granule)
            payload = self._send_up(flat, codec, run, own)
            codec.decode(payload, buffer[flat.interval(run[-1].high).relative_to(origin)])

    def climb_by_difference(
        self,
        flat: Carried,
        new: torch.Tensor,
        buffer: torch.Tensor,
        origin: int,
        legs: Sequence[Leg],
    ) -> None:
        """As ``climb``, but what travels is how the own part's ``new`` values differ from the old.

        What is lost is not lost for ever: the next difference is taken from what all have now.
        """
        (format, run), *rest = _runs(flat, legs)
        assert format is not None
        old = buffer[flat.interval(run[0].low).relative_to(origin)]
        difference = self.scratch("difference", old.numel(), new.dtype)
        torch.sub(new, old, out=difference)
        codec = self.codec(format, difference.dtype, flat.granule)
        payload = self._send_up(flat, codec, run, difference)
        target = buffer[flat.interval(run[-1].high).relative_to(origin)]
        for elements, nbytes in codec.chunks(target.numel()):
            total = target[elements].to(new.dtype)  # a view where the dtypes agree
            codec.add(payload[nbytes], total)
            if total.dtype != target.dtype:
                target[elements].copy_(total)
        self.climb(flat, buffer, origin, [leg for _, later in rest for leg in later])

    def _send_up(
        self, flat: Carried, codec: Codec, run: Sequence[Leg], own: torch.Tensor
    ) -> torch.Tensor:
        """Encodes the own part once and forwards it over a run of hops; returns all payloads."""
        top = flat.interval(run[-1].high)
        payload = self.payload(codec.nbytes(top.numel), run)

        def at(rung: int) -> torch.Tensor:
            place = flat.interval(rung).relative_to(top.start)
            return payload[codec.nbytes(place.start) : codec.nbytes(place.stop)]

        codec.encode(own, at(run[0].low))
        for leg in run:
            leg.link.gather(at(leg.high), leg.key)
        return payload

    # --- down ---------------------------------------------------------------------------------

    def descend(
        self,
        flat: Carried,
        source: torch.Tensor,
        top: int,
        legs: Sequence[Leg],
        out: torch.Tensor,
        *,
        scale: float,
        add: bool,
        outer: "Outer | None" = None,
    ) -> None:
        """Sums ``source``, this rank's part of rung ``top``, over the legs into ``out``.

        With ``outer`` the last leg runs there; wait for that before ``out`` is read.
        """
        if not any(flat.format(leg.hop) for leg in legs):
            if outer is not None:
                outer.last.wait()  # another flat's last leg may still be on that link
            self._descend_raw(flat, source, top, legs, out, scale=scale, add=add)
            if outer is not None:
                finish(legs)
            return
        rows, sums = source.view(-1, flat.granule), out.view(-1, flat.granule)
        dtype = torch.promote_types(source.dtype, torch.float32)
        first: Leg | None = legs[0]
        others = list(legs[1:])
        if outer is not None and not others:
            # The only leg runs later, when the source may be gone: it gets a copy.
            first, others = None, list(legs)
        low = top if first is None else first.low
        for columns in chunk_columns(flat.granule, len(rows)):
            chunk = _Chunk(flat, columns)
            # What the outer lane still works on is not this chunk's to overwrite.
            role = f"values {outer.turn()}" if outer else "values"
            mine = flat.rows(low, top)
            values = self.scratch(role, (mine.stop - mine.start) * chunk.granule, dtype)
            values = values.view(-1, chunk.granule).copy_(rows[mine, columns])
            if first is not None:
                self._sum(chunk, first, rows[:, columns], values)
            for leg in others[:-1]:
                self._sum(
                    chunk, leg, values[flat.rows(leg.high, low)], values[flat.rows(leg.low, low)]
                )

            def end(carrier: Carrier, chunk: _Chunk = chunk, values: torch.Tensor = values) -> None:
                own = values[flat.rows(legs[-1].low, low)]
                if others:
                    carrier._sum(chunk, others[-1], values[flat.rows(others[-1].high, low)], own)
                accumulate(own, sums[:, chunk.columns], scale=scale, add=add)

            outer.run(end, f"reduce {flat.unit_name}") if outer else end(self)

    def _descend_raw(
        self,
        flat: Carried,
        source: torch.Tensor,
        top: int,
        legs: Sequence[Leg],
        out: torch.Tensor,
        *,
        scale: float,
        add: bool,
    ) -> None:
        """Nothing is encoded: hops sum in place into the own piece, which nobody else reads."""
        origin = flat.interval(top).start
        codec = self.codec(None, source.dtype, flat.granule)
        for leg in legs:
            whole = source[flat.interval(leg.high).relative_to(origin)]
            own = source[flat.interval(leg.low).relative_to(origin)]
            payload = whole.view(torch.uint8)
            if leg is legs[-1]:
                leg.link.reduce(payload, own, out, leg.key, codec, scale=scale, add=add)
            else:
                leg.link.reduce(payload, own, own, leg.key, codec, scale=1.0, add=False)
        if not legs:
            accumulate(source, out, scale=scale, add=add)

    def _sum(self, chunk: "_Chunk", leg: Leg, rows: torch.Tensor, own: torch.Tensor) -> None:
        """One hop of a chunk: ``own``, this rank's piece of ``rows``, becomes all ranks' sum."""
        flat, size = chunk.flat, leg.hop.size
        codec = self.codec(flat.format(leg.hop), flat.reduce_dtype, chunk.granule)
        payload = self.payload(codec.nbytes(rows.numel()), (leg,))
        residual = flat.residual(leg.hop)
        sent, encoded = rows.view(size, -1, chunk.granule), pieces(payload, size)
        for member, i in enumerate(i for i in range(size) if i != leg.link.coordinate):
            piece = sent[i]
            if residual is not None:
                _add_residual(codec, piece[0], encoded[i], residual[member, chunk.columns])
            elif piece.is_contiguous():
                codec.encode(piece.view(-1), encoded[i])
            else:
                for row, granule in zip(piece, pieces(encoded[i], len(piece)), strict=True):
                    codec.encode(row, granule)
        total = own.view(-1)
        leg.link.reduce(payload, total, total, leg.key, codec, scale=1.0, add=False)


@dataclass(frozen=True)
class _Chunk:
    """Some columns of every granule of a flat; see [Note: Columns]."""

    flat: Carried
    columns: slice

    @property
    def granule(self) -> int:
        return int(self.columns.stop - self.columns.start)


class Outer:
    """The lane of the last legs, which run beside the inner legs of later chunks."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._lane, self.carrier = lane, Carrier(device)
        self._turn = 0
        self._busy: list[Ticket] = [DONE, DONE]

    def turn(self) -> int:
        """Which of two chunk buffers is next; waits until it is free."""
        self._turn = 1 - self._turn
        self._busy[self._turn].wait()
        return self._turn

    def run(self, work: Callable[[Carrier], None], name: str) -> None:
        """Submits the last leg of the chunk whose turn it is; ``name`` is what traces call it."""

        def traced(_: Early) -> None:
            with span("outer", name):
                work(self.carrier)

        self._busy[self._turn] = self._lane.submit(traced)

    def afterwards(self, work: Callable[[], None]) -> Ticket:
        """Submits what waits for everything before it, but uses no chunk."""
        return self._lane.submit(lambda _: work())

    @property
    def last(self) -> Ticket:
        """The ticket of what was submitted last; everything before is over by then."""
        return self._busy[self._turn]


@dataclass(frozen=True)
class Carriers:
    """The carriers of a model's lanes."""

    gathers: Carrier
    reduces: Carrier
    outer: Outer

    @property
    def held_bytes(self) -> int:
        """Working memory for payloads and chunks."""
        carriers = (self.gathers, self.reduces, self.outer.carrier)
        return sum(carrier.held_bytes for carrier in carriers)


def _runs(flat: Carried, legs: Sequence[Leg]) -> list[tuple[Format | None, list[Leg]]]:
    """Consecutive legs of one format."""
    return [(format, list(run)) for format, run in groupby(legs, lambda leg: flat.format(leg.hop))]


def _add_residual(
    codec: Codec, values: torch.Tensor, payload: torch.Tensor, residual: torch.Tensor
) -> None:
    """Error feedback: what the last encoding lost is added first, and what this one loses kept."""
    wanted = values + residual
    codec.encode(wanted, payload)
    codec.decode(payload, residual)
    torch.sub(wanted, residual, out=residual)
    # An overflow is reported by the gradients themselves and must not come back in every step.
    residual.nan_to_num_(0.0, 0.0, 0.0)
