"""How much is measured: the amounts, and the time spent on each. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which compute can be measured."""


class Shape(NamedTuple):
    """A transformer block and its input."""

    width: int
    batch: int
    seq: int

    @property
    def flops(self) -> int:
        """Operations of the matrix products of a forward; a backward has twice as many.

        >>> Shape(width=128, batch=1, seq=64).flops
        27262976
        """
        tokens, weights = self.batch * self.seq, 12 * self.width**2
        return 2 * tokens * weights + 4 * tokens * self.seq * self.width


class Effort(NamedTuple):
    """How long one point is measured."""

    repeats: int
    """Number of timed batches of calls; the median counts."""
    batch_s: float
    """Short calls are repeated until a batch takes this long."""
    point_s: float
    """If all batches would take longer than this, there are fewer, but at least three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a probe measures. Amounts ascend, and stop early if they take too long."""

    sent_bytes: tuple[int, ...]
    """For hops: bytes that each rank sends."""
    blocks: tuple[Shape, ...]
    copied_bytes: tuple[int, ...]
    updated_numel: tuple[int, ...]
    coded_numel: tuple[int, ...]
    disk_bytes: int
    """Bytes of one rank."""
    calls: Effort
    passes: Effort
    """Per visit. Longer than others, because compute that shares few cores varies much."""
    hops: Effort
    """Longer batches, so that bursts that a link or a switch absorbs count little."""
    patience_s: float
    """Amounts are limited so that one call takes at most this long."""
    busy_s: float
    """How long hops run in each of a few rounds, to measure how busy they keep processors."""


FULL = Scope(
    sent_bytes=(4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20),
    blocks=(
        Shape(128, 1, 32),
        Shape(256, 1, 128),
        Shape(512, 2, 128),
        Shape(768, 2, 256),
        Shape(1024, 2, 512),
    ),
    copied_bytes=(64 << 10, 1 << 20, 16 << 20, 64 << 20),
    updated_numel=(10_000, 100_000, 1_000_000, 10_000_000),
    coded_numel=(1 << 14, 1 << 18, 1 << 22),
    disk_bytes=256 << 20,
    calls=Effort(repeats=5, batch_s=0.02, point_s=0.6),
    passes=Effort(repeats=5, batch_s=0.1, point_s=1.5),
    hops=Effort(repeats=5, batch_s=0.15, point_s=2.5),
    patience_s=1.2,
    busy_s=0.5,
)
QUICK = Scope(
    sent_bytes=(4 << 10, 64 << 10),
    blocks=(Shape(32, 1, 8), Shape(64, 1, 32)),
    copied_bytes=(4 << 10, 256 << 10),
    updated_numel=(1_000, 20_000),
    coded_numel=(1 << 10, 1 << 14),
    disk_bytes=1 << 20,
    calls=Effort(repeats=2, batch_s=0.0, point_s=0.1),
    passes=Effort(repeats=2, batch_s=0.0, point_s=0.1),
    hops=Effort(repeats=2, batch_s=0.0, point_s=0.1),
    patience_s=1.0,
    busy_s=0.02,
)
"""For tests: its figures mean little."""


def check_dtype(dtype: str) -> None:
    """Raise unless compute in the dtype can be measured."""
    if dtype not in DTYPES:
        raise UsageError(
            f"'{dtype}' is not a dtype that shardwise probe measures; use {', '.join(DTYPES)}."
        )


def fitting(amounts: Sequence[int], bytes_each: float, room: int) -> tuple[int, ...]:
    """The amounts whose buffers fit in an eighth of a rank's memory; at least the two smallest.

    >>> fitting((10, 20, 30, 40), bytes_each=16, room=4000)
    (10, 20, 30)
    """
    return tuple(
        amount for i, amount in enumerate(amounts) if i < 2 or amount * bytes_each <= room / 8
    )
