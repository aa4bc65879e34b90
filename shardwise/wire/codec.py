"""Codecs: from flat floats to payload bytes and back, in granules that decode on their own.

[Note: Granules]
A *granule* is a rank's shard on the finest rung of the ladder. Blocks never straddle granules, so
the payload of several granules is their payloads end to end, and the payload of any shard of a flat
is a slice of the flat's: a gather can forward payloads unchanged over any number of hops.

Encoding is deterministic and depends on a granule's values alone: not on the number of threads, on
alignment, or on what else is encoded in the same call. Values are first rounded to float32.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.wire import CAST_DTYPES, Format, row_bytes, wire_bytes
from shardwise.wire.rows import RowKernel, full_rows, tail_rows

CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements per piece of ``Codec.chunks``: on CPU a sum over peers must stay in cache, and calls
must not dominate; a CUDA launch should be much larger."""


class Codec(Protocol):
    """Encodes 1-D floats (fp32, bf16, fp16, fp64) as 1-D bytes, and decodes or adds them.

    Every call takes whole granules, or a piece of one as ``chunks`` cuts it.
    """

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of a payload that is plain floats; None: it is encoded."""

    def nbytes(self, numel: int) -> int:
        """Bytes of the payload of ``numel`` elements."""

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Fill ``payload``, of exactly ``nbytes`` bytes, with the encoded ``values``."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Fill ``out``, of any float dtype, with the payload's values."""

    def add(self, payload: Tensor, total: Tensor) -> None:
        """Add the payload's values to ``total``, which is float32 or wider."""

    def chunks(self, numel: int) -> Iterator[tuple[slice, slice]]:
        """Cut ``numel`` elements into pieces (elements, bytes) that decode on their own."""


def make_codec(spec: Format, granule: int, device: torch.device | str = "cpu") -> Codec:
    """The codec of a format for granules of ``granule`` elements on a device."""
    if spec.is_blocked:
        return BlockCodec(spec, granule, torch.device(device))
    return CastCodec(getattr(torch, CAST_DTYPES[spec.kind]), torch.device(device))


class CastCodec:
    """A cast: values of its dtype travel as they are, others are rounded to it, half to even.

    Values beyond float16's range become infinite.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._chunk_numel = CHUNK_NUMEL.get(device.type, CHUNK_NUMEL["cuda"])

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, payload: Tensor) -> None:
        assert payload.numel() == self.nbytes(values.numel())
        values = values.detach()
        if payload.storage_offset() % self.dtype.itemsize:
            payload.copy_(values.to(self.dtype).view(torch.uint8))
        else:
            payload.view(self.dtype).copy_(values)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        assert payload.numel() == self.nbytes(out.numel())
        out.detach().copy_(self._cast(payload))

    def add(self, payload: Tensor, total: Tensor) -> None:
        assert payload.numel() == self.nbytes(total.numel())
        for elements, run in self.chunks(total.numel()):
            # Adding across dtypes is not vectorised; converting first is much faster.
            total[elements] += self._cast(payload[run]).to(total.dtype)

    def chunks(self, numel: int) -> Iterator[tuple[slice, slice]]:
        size = self.dtype.itemsize
        for start in range(0, numel, self._chunk_numel):
            stop = min(start + self._chunk_numel, numel)
            yield slice(start, stop), slice(start * size, stop * size)

    def _cast(self, payload: Tensor) -> Tensor:
        aligned = payload.storage_offset() % self.dtype.itemsize == 0
        return (payload if aligned else payload.clone()).view(self.dtype)


class BlockCodec:
    """Codes in blocks: int8 and int4; ``reference.py`` defines the bits."""

    dtype = None

    def __init__(self, spec: Format, granule: int, device: torch.device) -> None:
        assert granule > 0
        self._format, self._granule = spec, granule
        self._chunk_numel = CHUNK_NUMEL.get(device.type, CHUNK_NUMEL["cuda"])
        self._row_bytes = row_bytes(spec, spec.block)
        self._full, self._tail = full_rows(spec, device), tail_rows(spec, device)

    def nbytes(self, numel: int) -> int:
        count, size = self._granules(numel)
        return count * wire_bytes(self._format, size)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        for kernel, floats, rows in self._matrices(values, payload):
            kernel.encode(floats, rows)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        for kernel, floats, rows in self._matrices(out, payload):
            kernel.decode(rows, floats)

    def add(self, payload: Tensor, total: Tensor) -> None:
        for kernel, floats, rows in self._matrices(total, payload):
            kernel.add(rows, floats)

    def chunks(self, numel: int) -> Iterator[tuple[slice, slice]]:
        block, nbytes = self._format.block, self.nbytes
        count, size = self._granules(numel)
        if size <= self._chunk_numel:  # several whole granules per piece
            step = self._chunk_numel // size * size if size else 1
            for start in range(0, count * size, step):
                stop = min(start + step, count * size)
                yield slice(start, stop), slice(nbytes(start), nbytes(stop))
            return
        step = self._chunk_numel // block * block
        for i in range(count):
            first, first_byte = i * size, i * nbytes(size)
            for start in range(0, size, step):
                stop = min(start + step, size)
                run = slice(first_byte + nbytes(start), first_byte + nbytes(stop))
                yield slice(first + start, first + stop), run

    def _granules(self, numel: int) -> tuple[int, int]:
        """The number and length of runs in ``numel`` elements: granules, or a piece of one."""
        if numel <= self._granule:
            return 1, numel
        if self._granule % self._format.block == 0 and numel % self._format.block == 0:
            return 1, numel  # granules without ragged ends are one long run
        assert numel % self._granule == 0, f"{numel} elements are no granules of {self._granule}"
        return numel // self._granule, self._granule

    def _matrices(
        self, values: Tensor, payload: Tensor
    ) -> Iterator[tuple[RowKernel, Tensor, Tensor]]:
        """Values and payload as matrices of equally long rows, each with its kernel."""
        assert payload.numel() == self.nbytes(values.numel())
        block = self._format.block
        count, size = self._granules(values.numel())
        if size == 0:
            return
        floats, rows = values.detach().view(count, size), payload.view(count, -1)
        full = size // block
        numel, nbytes = full * block, full * self._row_bytes
        if full:
            for i in range(count):
                yield (
                    self._full,
                    floats[i, :numel].view(full, block),
                    rows[i, :nbytes].view(full, self._row_bytes),
                )
        if size % block:
            yield self._tail, floats[:, numel:], rows[:, nbytes:]
