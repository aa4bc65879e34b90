"""Links: how the ranks of one hop exchange flat memory, and which implementation is used.

A hop has two verbs, both on contiguous memory cut into one piece a member:

- ``gather``: every member's buffer holds its own piece; afterwards all hold all pieces.
- ``reduce``: every member holds a whole buffer; afterwards each has the sum of its own piece.

[Note: Choice of a link]
Measured by ``benchmarks/hops.py`` on two cores, gloo's own collectives are the slowest way to
move the bytes, point-to-point messages are about twice as fast, and reading the peer's memory
directly (``local.py``) is about twice as fast again and costs the sender no CPU time at all. So:
CUDA uses NCCL's collectives, ranks of one host read each other's memory where the kernel allows
it, and everything else goes point to point.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.core.errors import SyncError

CHUNK_NUMEL = 1 << 16
"""Sums run in chunks of this many elements, so that partial sums stay in cache."""


class Link(Protocol):
    """The exchange between the members of one hop; ``key`` names what travels (see ``Labels``)."""

    size: int
    coordinate: int

    def gather(self, buffer: torch.Tensor, key: int) -> None:
        """Fills in the other members' pieces of ``buffer``."""

    def reduce(
        self, buffer: torch.Tensor, out: torch.Tensor, key: int, *, scale: float, add: bool
    ) -> None:
        """``out`` becomes (or with ``add`` grows by) scale times the sum of the own piece.

        ``out`` may be the own piece of ``buffer``: no other member reads that.
        """

    def finish(self) -> None:
        """Returns when no other member needs this rank's buffers of the last exchange any more."""

    def close(self) -> None:
        """Releases what the link holds."""


class Labels:
    """Names for the integer keys that travel with an exchange, for messages to people."""

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
    """Sums pieces chunk by chunk, in a fixed order and at least in float32."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    @staticmethod
    def chunks(numel: int) -> Sequence[slice]:
        return [slice(i, min(i + CHUNK_NUMEL, numel)) for i in range(0, numel, CHUNK_NUMEL)]

    def begin(self, first: torch.Tensor) -> torch.Tensor:
        """A chunk's running total, begun with its first addend."""
        dtype = torch.promote_types(first.dtype, torch.float32)
        return self._buffer("total", dtype)[: first.numel()].copy_(first)

    def plus(self, total: torch.Tensor, addend: torch.Tensor) -> None:
        if addend.dtype != total.dtype:
            # Adding across dtypes is not vectorised; converting first is ten times as fast.
            addend = self._buffer("addend", total.dtype)[: addend.numel()].copy_(addend)
        total.add_(addend)

    @staticmethod
    def store(total: torch.Tensor, out: torch.Tensor, scale: float, add: bool) -> None:
        if add:
            out.add_(total, alpha=scale)
        elif scale == 1.0:
            out.copy_(total)
        else:
            torch.mul(total, scale, out=out)

    def _buffer(self, role: str, dtype: torch.dtype) -> torch.Tensor:
        if (role, dtype) not in self._scratch:
            self._scratch[role, dtype] = torch.empty(CHUNK_NUMEL, dtype=dtype)
        return self._scratch[role, dtype]


class PeerLink:
    """Point-to-point messages of ``torch.distributed``; for gloo between hosts."""

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
        self._staging: dict[torch.dtype, torch.Tensor] = {}
        self._summer = Summer()

    def gather(self, buffer: torch.Tensor, key: int) -> None:
        parts = pieces(buffer, self.size)
        receives = [
            (peer, dist.irecv(parts[i], group=self._group, group_src=i, tag=key))
            for i, peer in self._peers()
        ]
        sends = [
            (peer, dist.isend(parts[self.coordinate], group=self._group, group_dst=i, tag=key))
            for i, peer in self._peers()
        ]
        self._wait(receives + sends, key)

    def reduce(
        self, buffer: torch.Tensor, out: torch.Tensor, key: int, *, scale: float, add: bool
    ) -> None:
        parts = pieces(buffer, self.size)
        numel = parts[0].numel()
        staging = self._stage(buffer.dtype, numel)
        arrived = {i: staging[k] for k, (i, _) in enumerate(self._peers())}
        receives = [
            (peer, dist.irecv(arrived[i], group=self._group, group_src=i, tag=key))
            for i, peer in self._peers()
        ]
        sends = [
            (peer, dist.isend(parts[i], group=self._group, group_dst=i, tag=key))
            for i, peer in self._peers()
        ]
        self._wait(receives, key)
        arrived[self.coordinate] = parts[self.coordinate]
        for chunk in self._summer.chunks(numel):
            total = self._summer.begin(arrived[0][chunk])
            for i in range(1, self.size):
                self._summer.plus(total, arrived[i][chunk])
            self._summer.store(total, out[chunk], scale, add)
        self._wait(sends, key)

    def finish(self) -> None:
        """Nothing to wait for: sends were awaited, and sent memory is the sender's again."""

    def close(self) -> None:
        self._staging.clear()

    def _peers(self) -> list[tuple[int, int]]:
        return [(i, peer) for i, peer in enumerate(self._ranks) if i != self.coordinate]

    def _stage(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        staging = self._staging.get(dtype)
        if staging is None or staging.shape[1] < numel:
            staging = torch.empty(self.size - 1, numel, dtype=dtype)
            self._staging[dtype] = staging
        return staging[:, :numel]

    def _wait(self, works: Sequence[tuple[int, "dist.Work | None"]], key: int) -> None:
        for peer, work in works:
            assert work is not None
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise SyncError(
                    f"Rank {self._rank} waited for rank {peer} in the {self._labels.name(key)}, "
                    f"and rank {peer} did not take part within {self._limit.total_seconds():.0f} s "
                    f"or has ended ({str(error).splitlines()[0][:120]})."
                ) from error


class CollectiveLink:
    """NCCL's own collectives; they sum in the dtype that travels."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self.size, self.coordinate = len(ranks), list(ranks).index(rank)
        self._group = group
        # The deprecated names go away in favour of *_single; take whichever this torch has.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )

    def gather(self, buffer: torch.Tensor, key: int) -> None:
        self._all_gather(buffer, pieces(buffer, self.size)[self.coordinate], group=self._group)

    def reduce(
        self, buffer: torch.Tensor, out: torch.Tensor, key: int, *, scale: float, add: bool
    ) -> None:
        own = pieces(buffer, self.size)[self.coordinate]
        self._reduce_scatter(own, buffer, group=self._group)
        if out.data_ptr() != own.data_ptr() or scale != 1.0 or add:
            Summer.store(own, out, scale, add)

    def finish(self) -> None:
        """Streams order the buffers' reuse."""

    def close(self) -> None:
        pass
