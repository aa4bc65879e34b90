"""What travels on hops: payloads of flats between rungs, and the chunks of encoded reductions."""

from collections.abc import Iterator, Sequence
from math import ceil

from shardwise.core.layout import DTYPE_BYTES, FlatSpec
from shardwise.core.wire import BLOCKS, Format, wire_bytes
from shardwise.plans.ops import Hop
from shardwise.plans.plan import Rungs, format_of

Sizes = Sequence[tuple[FlatSpec, str]]
"""Flats, each with the dtype in which it travels or rests."""


CHUNK_NUMEL = 1 << 22
"""Elements of a chunk of an encoded reduction on CPU: long for the link, short enough to overlap.
"""

LEAST_COLUMNS = 1 << 15
"""At least this many elements of a chunk go to each rank: with many ranks chunks grow, because
messages of a few kilobytes cost a link only latency."""

ACCELERATED_CHUNK_NUMEL = 1 << 24
"""Elements of the smallest chunk of an accelerator: shorter ones cost more launches than they hide.
"""
ACCELERATED_CHUNKS = 2
"""At most so many chunks on an accelerator, because each takes three launches per hop; with two,
half of the outer hop overlaps with the inner ones, and the rest with other units."""


def chunk_numel(numel: int, rows: int, *, accelerated: bool = False) -> int:
    """The number of elements of a chunk of ``numel`` elements in ``rows`` granules."""
    if accelerated:
        return max(ACCELERATED_CHUNK_NUMEL, -(-numel // ACCELERATED_CHUNKS))
    return max(CHUNK_NUMEL, rows * LEAST_COLUMNS)


def chunk_columns(granule: int, rows: int, *, accelerated: bool = False) -> Iterator[slice]:
    """Cuts granules so that ``rows`` of them are not much longer than a chunk.

    >>> [next(chunk_columns(1 << 24, rows)).stop for rows in (4, 64, 1024)]
    [1048576, 65536, 32768]
    >>> [columns.stop for columns in chunk_columns(1 << 24, 64, accelerated=True)]
    [8388608, 16777216]
    """
    longest = chunk_numel(granule * rows, rows, accelerated=accelerated)
    # No chunk cuts a block; on an accelerator there must not be one more of them for that.
    blocks = longest / rows / BLOCKS[-1]
    width = max(1, ceil(blocks) if accelerated else int(blocks)) * BLOCKS[-1]
    for start in range(0, granule, width):
        yield slice(start, min(start + width, granule))


def payload_bytes(
    flat: FlatSpec, rungs: Rungs, rung: int, dtype: str, format: Format | None
) -> int:
    """The bytes of one shard of a flat on a rung, as it travels."""
    parts = rungs.ladder.parts[rung]
    if format is None:
        return flat.numel // parts * DTYPE_BYTES[dtype]
    return rungs.granules // parts * wire_bytes(format, flat.numel // rungs.granules)


def hops_between(sizes: Sizes, rungs: Rungs, top: int, bottom: int, wire: str) -> tuple[Hop, ...]:
    """The hops between two rungs, from the top down."""
    hops = []
    for index in range(top, bottom):
        step = rungs.ladder.steps[index]
        if step.size == 1:
            continue
        formats = [format_of(wire, step, dtype) for _, dtype in sizes]
        part_bytes = sum(
            payload_bytes(flat, rungs, index + 1, dtype, format)
            for (flat, dtype), format in zip(sizes, formats, strict=True)
        )
        sent = (step.size - 1) * part_bytes
        hops.append(Hop(index, step.level, step.size, sent, next(filter(None, formats), None)))
    return tuple(hops)


def shard_bytes(sizes: Sizes, rungs: Rungs, rung: int) -> int:
    """The bytes of a rank's shards of some flats on a rung."""
    return sum(payload_bytes(flat, rungs, rung, dtype, None) for flat, dtype in sizes)
