"""Carries flats over hops, raw or encoded: up the ladder (gather, refresh); ``descend.py`` has the
way down (reduce).

[Note: Payloads]
A hop with a wire format moves a *payload*: the encoded form of a flat, in which every granule (a
shard of the bottom rung) has its own bytes, of equal length and in order. So the payload of any
shard of any rung is contiguous, and hops cut it as they cut the flat. On the way up the rank that
owns the values encodes them once, and the payload is forwarded unchanged over all hops of one
format. All ranks, including the owner, then use the decoded values. That is the replica rule: all
holders of an interval have equal bits, whatever encoding lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from shardwise.comm.descend import descend
from shardwise.comm.lane import Early, Lane
from shardwise.comm.link import Link
from shardwise.core.ticket import DONE, Ticket
from shardwise.core.topology import Interval
from shardwise.core.trace import span
from shardwise.core.wire import Format
from shardwise.device.abilities import separate_memory
from shardwise.plans.ops import Hop
from shardwise.wire.codec import CastCodec, Codec, make_codec


class Carried(Protocol):
    """A flat buffer that is cut into the shards of a ladder's rungs."""

    unit_name: str
    granule: int
    """Elements of a shard of the bottom rung."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which raw gradients travel."""
        ...

    def format(self, hop: Hop) -> Format | None:
        """Its wire format on a hop; None: raw."""

    def interval(self, rung: int) -> Interval:
        """This rank's shard on a rung."""
        ...

    def rows(self, rung: int, top: int) -> slice:
        """The granules of this rank's shard on rung ``top`` that its shard on ``rung`` has too."""
        ...

    def residual(self, hop: Hop) -> torch.Tensor | None:
        """What error feedback adds to the next gradients on a hop: a row per other member."""


@dataclass(frozen=True)
class Leg:
    """One hop of an operation, with its link and the key that names the exchange."""

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
    """Wait until no other rank reads this rank's buffers."""
    for leg in legs:
        leg.link.finish()


class Carrier:
    """One lane's codecs and working memory. Lanes run concurrently, so each has its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.accelerated = separate_memory(device)
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
        """Memory for a role, reused each time: fresh pages would cost more than the work."""
        nbytes = numel * dtype.itemsize
        memory = self._memory.get(role)
        if memory is None or memory.nbytes < nbytes:
            self._memory.pop(role, None)  # frees the old memory before the new is allocated
            memory = self._memory[role] = torch.empty(
                nbytes, dtype=torch.uint8, device=self._device
            )
        return memory[:nbytes].view(dtype)

    def payload(self, nbytes: int, legs: Sequence[Leg]) -> torch.Tensor:
        """Memory for the next payload on some legs."""
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
        """Fill ``buffer``, which begins at element ``origin``, from this rank's shard upwards.

        ``dtype`` is the dtype of raw hops, if it is not the buffer's.
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
        """As ``climb``, but send the difference of this rank's ``new`` values to the old ones.

        Losses do not add up: the next difference is taken from the values that all ranks have now.
        """
        (format, run), *rest = _runs(flat, legs)
        assert format is not None
        old = buffer[flat.interval(run[0].low).relative_to(origin)]
        difference = self.scratch("difference", old.numel(), new.dtype)
        torch.sub(new, old, out=difference)
        codec = self.codec(format, difference.dtype, flat.granule)
        payload = self._send_up(flat, codec, run, difference)
        target = buffer[flat.interval(run[-1].high).relative_to(origin)]
        codec.correct(payload, target, new.dtype)
        self.climb(flat, buffer, origin, [leg for _, later in rest for leg in later])

    def _send_up(
        self, flat: Carried, codec: Codec, run: Sequence[Leg], own: torch.Tensor
    ) -> torch.Tensor:
        """Encode this rank's shard once and forward it over a run of hops; return all payloads."""
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
        """Sum ``source``, this rank's shard on rung ``top``, over the legs into ``out``.

        With ``outer`` the last leg runs there; wait for it before reading ``out``.
        """
        descend(self, flat, source, top, legs, out, scale=scale, add=add, outer=outer)


class Outer:
    """The lane of last legs, which run beside the inner legs of later chunks."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._lane, self.carrier = lane, Carrier(device)
        self._turn = 0
        self._busy: list[Ticket] = [DONE, DONE]

    def turn(self) -> int:
        """The index of the next of two chunk buffers; waits until it is free."""
        self._turn = 1 - self._turn
        self._busy[self._turn].order_stream()
        return self._turn

    def run(self, work: Callable[[Carrier], None], name: str) -> None:
        """Submit the last leg of the chunk whose turn it is; ``name`` is its name in traces."""

        def traced(_: Early) -> None:
            with span("outer", name):
                work(self.carrier)

        self._busy[self._turn] = self._lane.submit(traced)

    def afterwards(self, work: Callable[[], None]) -> Ticket:
        """Submit work that runs after everything before it, without a chunk buffer."""
        return self._lane.submit(lambda _: work())

    @property
    def last(self) -> Ticket:
        """The ticket of the latest work; when it is done, everything before it is."""
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
