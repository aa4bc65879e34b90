"""Links: how the ranks of one hop exchange flat memory, and which implementation is used.

A hop has two operations, both on contiguous memory with one piece per member:

- ``gather`` (all-gather): every member's buffer has its own piece; afterwards all have all pieces.
- ``reduce`` (reduce-scatter): every member has a whole payload; afterwards each has the sum of its
  own piece.

Codecs (``wire/``) define what a piece looks like on the wire: links move bytes, and call the codec
to add what arrived to a running total.

[Note: Choice of a link]
Measured by ``benchmarks/hops.py`` on two cores, gloo's own collectives are the slowest way to move
bytes, point-to-point messages are about twice as fast, and reading the peer's memory directly
(``local.py``) is about twice as fast again and costs the sender no CPU time. So accelerators use
their backend's collectives, ranks of one host read each other's memory if the kernel allows it, and
everything else uses point-to-point messages.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from shardwise.core.errors import SyncError
from shardwise.core.meter import count_sent
from shardwise.device.abilities import separate_memory

if TYPE_CHECKING:
    from shardwise.wire.codec import Codec


class Link(Protocol):
    """The exchange between the members of one hop; ``key`` names what travels (see ``Labels``)."""

    kind: str
    """How members communicate, as shown to users."""
    size: int
    coordinate: int

    def gather(self, buffer: torch.Tensor, key: int) -> None:
        """Fill in the other members' pieces of ``buffer``."""

    def reduce(
        self,
        payload: torch.Tensor,
        own: torch.Tensor,
        out: torch.Tensor,
        key: int,
        codec: "Codec",
        *,
        scale: float,
        add: bool,
    ) -> None:
        """Set ``out`` to scale times the sum of this member's piece, or with ``add`` add that.

        ``payload`` has one encoded piece per member; ``own`` is this member's piece, not encoded.
        ``out`` may be the same memory, because no other member reads it.
        """

    def finish(self) -> None:
        """Wait until no other member needs this rank's buffers of the last exchange."""

    def close(self) -> None:
        """Release the link's resources."""


class Labels:
    """Names of the integer keys of exchanges, for error messages."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def key(self, index: int, name: str) -> int:
        self._names[index] = name
        return index

    def name(self, key: int) -> str:
        return self._names.get(key, f"unknown exchange {key}")


def pieces(buffer: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The members' pieces of a flat buffer, as views in order of their coordinate."""
    return buffer.view(size, -1).unbind(0)


class Summer:
    """Sums the members' pieces chunk by chunk, in a fixed order and at least in float32."""

    def __init__(self) -> None:
        self._totals: dict[torch.dtype, torch.Tensor] = {}

    def sum(
        self,
        arrived: Callable[[int, slice], torch.Tensor],
        own: torch.Tensor,
        coordinate: int,
        size: int,
        codec: "Codec",
        out: torch.Tensor,
        *,
        scale: float,
        add: bool,
    ) -> None:
        """``arrived(member, bytes)`` is a piece of the payload that came from another member."""
        dtype = torch.promote_types(own.dtype, torch.float32)
        for elements, nbytes in codec.chunks(own.numel()):
            total = self._total(dtype, own.device, elements.stop - elements.start)
            for i in range(size):
                if i == coordinate:
                    accumulate(own[elements], total, scale=1.0, add=i > 0)
                elif i == 0:
                    codec.decode(arrived(i, nbytes), total)
                else:
                    codec.add(arrived(i, nbytes), total)
            accumulate(total, out[elements], scale=scale, add=add)

    def _total(self, dtype: torch.dtype, device: torch.device, numel: int) -> torch.Tensor:
        total = self._totals.get(dtype)
        if total is None or total.numel() < numel:
            total = self._totals[dtype] = torch.empty(numel, dtype=dtype, device=device)
        return total[:numel]


def accumulate(value: torch.Tensor, out: torch.Tensor, *, scale: float, add: bool) -> None:
    """Set ``out`` to scale times a value, or add that."""
    if add:
        if value.dtype != out.dtype and not separate_memory(out.device):
            # On CPU adding across dtypes is not vectorised; converting first is ten times faster.
            value = value.to(out.dtype)
        out.add_(value, alpha=scale)
    elif scale == 1.0:
        out.copy_(value)
    else:
        torch.mul(value, scale, out=out)


class PeerLink:
    """Point-to-point messages of ``torch.distributed``; for gloo between hosts."""

    kind = "messages"

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        labels: Labels,
        limit_s: float,
    ) -> None:
        self.size, self.coordinate = len(ranks), list(ranks).index(rank)
        self._group, self._ranks, self._rank, self._labels = group, ranks, rank, labels
        self._limit = timedelta(seconds=limit_s)
        self._staging = torch.empty(len(ranks) - 1, 0, dtype=torch.uint8)
        self._summer = Summer()

    def gather(self, buffer: torch.Tensor, key: int) -> None:
        parts = pieces(buffer, self.size)
        receives = [(peer, self._receive(parts[i], i, key)) for i, peer in self._peers()]
        own = parts[self.coordinate]
        sends = [(peer, self._send(own, i, key)) for i, peer in self._peers()]
        self._wait(receives + sends, key)
        count_sent(key, len(sends) * own.nbytes)

    def reduce(
        self,
        payload: torch.Tensor,
        own: torch.Tensor,
        out: torch.Tensor,
        key: int,
        codec: "Codec",
        *,
        scale: float,
        add: bool,
    ) -> None:
        parts = pieces(payload, self.size)
        staging = self._stage(parts[0].numel())
        arrived = {i: staging[k] for k, (i, _) in enumerate(self._peers())}
        receives = [(peer, self._receive(arrived[i], i, key)) for i, peer in self._peers()]
        sends = [(peer, self._send(parts[i], i, key)) for i, peer in self._peers()]
        self._wait(receives, key)
        self._summer.sum(
            lambda i, nbytes: arrived[i][nbytes],
            own, self.coordinate, self.size, codec, out, scale=scale, add=add,
        )  # fmt: skip
        self._wait(sends, key)
        count_sent(key, len(sends) * parts[0].nbytes)

    def finish(self) -> None:
        """Nothing to wait for: all sends are complete."""

    def close(self) -> None:
        self._staging = self._staging[:, :0].clone()

    def _peers(self) -> list[tuple[int, int]]:
        return [(i, peer) for i, peer in enumerate(self._ranks) if i != self.coordinate]

    def _stage(self, nbytes: int) -> torch.Tensor:
        if self._staging.shape[1] < nbytes:
            self._staging = torch.empty(self.size - 1, nbytes, dtype=torch.uint8)
        return self._staging[:, :nbytes]

    def _receive(self, tensor: torch.Tensor, member: int, key: int) -> "dist.Work | None":
        try:  # raises at once if the peer is known to have ended
            return dist.irecv(tensor, group=self._group, group_src=member, tag=key)
        except RuntimeError as error:
            raise self._lost(self._ranks[member], key, error) from error

    def _send(self, tensor: torch.Tensor, member: int, key: int) -> "dist.Work | None":
        try:
            return dist.isend(tensor, group=self._group, group_dst=member, tag=key)
        except RuntimeError as error:
            raise self._lost(self._ranks[member], key, error) from error

    def _wait(self, works: Sequence[tuple[int, "dist.Work | None"]], key: int) -> None:
        for peer, work in works:
            assert work is not None
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise self._lost(peer, key, error) from error

    def _lost(self, peer: int, key: int, error: RuntimeError) -> SyncError:
        return SyncError(
            f"Rank {self._rank} waited for rank {peer} in the {self._labels.name(key)}, "
            f"but rank {peer} did not take part within {self._limit.total_seconds():.0f} s "
            f"or has ended ({str(error).splitlines()[0][:120]})."
        )


class CollectiveLink:
    """The own collectives of a device's backend, which also sum plain floats.

    Encoded pieces are exchanged all-to-all; ``reduce`` is for plain ones only.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self.size, self.coordinate = len(ranks), list(ranks).index(rank)
        self.kind = dist.get_backend(group).upper()
        self._group = group
        # The names are being replaced by *_single; use those that this torch has.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )

    def gather(self, buffer: torch.Tensor, key: int) -> None:
        own = pieces(buffer, self.size)[self.coordinate]
        self._all_gather(buffer, own, group=self._group)
        count_sent(key, (self.size - 1) * own.nbytes)

    def reduce(
        self,
        payload: torch.Tensor,
        own: torch.Tensor,
        out: torch.Tensor,
        key: int,
        codec: "Codec",
        *,
        scale: float,
        add: bool,
    ) -> None:
        assert codec.dtype is own.dtype, "a backend sums plain floats only"
        count_sent(key, (self.size - 1) * (payload.nbytes // self.size))
        whole = payload.view(own.dtype)
        mine = pieces(whole, self.size)[self.coordinate]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        self._reduce_scatter(own, whole, group=self._group)
        if out.data_ptr() != own.data_ptr() or scale != 1.0 or add:
            accumulate(own.view(out.shape), out, scale=scale, add=add)

    def exchange(self, payload: torch.Tensor, arrived: torch.Tensor, key: int) -> None:
        """Every member gets its piece of all payloads: a row each, in order of coordinates."""
        count_sent(key, (self.size - 1) * (payload.nbytes // self.size))
        dist.all_to_all_single(arrived, payload, group=self._group)

    def finish(self) -> None:
        """Nothing to wait for: streams order the reuse of buffers."""

    def close(self) -> None:
        pass
