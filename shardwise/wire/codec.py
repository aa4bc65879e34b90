"""Codecs: from flat floats to payload bytes and back, in granules that decode on their own.

[Note: Granules]
A *granule* is a rank's shard on the finest rung of the ladder. Blocks never straddle granules, so
the payload of several granules is their payloads end to end, and the payload of any shard of a flat
is a slice of the flat's: a gather can forward payloads unchanged over any number of hops.

Encoding is deterministic and depends on a granule's values alone: not on the number of threads, on
alignment, or on what else is encoded in the same call. Values are first rounded to float32.

[Note: Two kinds of codecs]
On the CPU a call costs little and cache counts, so ``BlockCodec`` works on runs of rows, and links
sum piece by piece (``chunks``). On an accelerator a launch costs as much as a megabyte does, so
``LaunchCodec`` encodes, decodes or sums all granules of a payload in one.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.wire import CAST_DTYPES, Format, row_bytes, wire_bytes
from shardwise.device.abilities import HOST, chunk_numel, separate_memory
from shardwise.wire.kernels import NOTHING, keep_error, payload_kernel, wider
from shardwise.wire.rows import EagerRows, RowKernel, full_rows


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

    def encode_granules(
        self,
        values: Tensor,
        payload: Tensor,
        *,
        skip: slice = NOTHING,
        residual: Tensor | None = None,
    ) -> None:
        """Encode the rows of a matrix, which may lie apart, but not those to ``skip``.

        ``residual`` is for error feedback: a row for each that is encoded; see ``keep_error``.
        """

    def correct(self, payload: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Add the payload's values to ``values``, of any float dtype, in a wider one."""

    def sum(
        self,
        payload: Tensor,
        own: Tensor,
        out: Tensor,
        coordinate: int,
        *,
        scale: float,
        add: bool,
    ) -> None:
        """Set ``out`` to scale times the sum of all members' granules, or with ``add`` add that.

        ``payload`` has a row of bytes for each member; this rank's granules ``own`` are not in it.
        Rows of ``own`` and ``out`` may lie apart.
        """


def make_codec(spec: Format, granule: int, device: torch.device | str = HOST) -> Codec:
    """The codec of a format for granules of ``granule`` elements on a device."""
    device = torch.device(device)
    if not spec.is_blocked:
        return CastCodec(getattr(torch, CAST_DTYPES[spec.kind]), device)
    kind = LaunchCodec if separate_memory(device) else BlockCodec
    return kind(spec, granule, device)


class _Codec:
    """What a codec does with calls for a single granule, or for a few."""

    def encode_granules(
        self: Codec,
        values: Tensor,
        payload: Tensor,
        *,
        skip: slice = NOTHING,
        residual: Tensor | None = None,
    ) -> None:
        rows = payload.view(len(values), -1)
        done = 0  # rows of the residual
        for run in (slice(0, skip.start), slice(skip.stop, len(values))):
            if residual is None and values[run].is_contiguous():
                self.encode(values[run].view(-1), rows[run].view(-1))
                continue
            for value, row in zip(values[run], rows[run], strict=True):
                if residual is None:
                    self.encode(value, row)
                    continue
                lost = residual[done]
                wanted = value + lost
                self.encode(wanted, row)
                self.decode(row, lost)
                keep_error(wanted, lost, lost)
                done += 1

    def correct(self: Codec, payload: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        for elements, nbytes in self.chunks(values.numel()):
            total = values[elements].to(dtype)  # a view if the dtypes are equal
            self.add(payload[nbytes], total)
            if total.dtype != values.dtype:
                values[elements].copy_(total)

    def sum(
        self: Codec,
        payload: Tensor,
        own: Tensor,
        out: Tensor,
        coordinate: int,
        *,
        scale: float,
        add: bool,
    ) -> None:
        total = own.new_zeros(own.numel(), dtype=wider(own.dtype))
        for i, arrived in enumerate(payload.unbind(0)):
            if i == coordinate:
                total.view(own.shape).add_(own)
            else:
                self.add(arrived, total)
        result = total.view(own.shape) * scale
        out.copy_(out + result if add else result)


class CastCodec(_Codec):
    """A cast: values of its dtype travel as they are, others are rounded to it, half to even.

    Values beyond float16's range become infinite.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype: torch.dtype | None = dtype
        self._dtype, self._chunk_numel = dtype, chunk_numel(device)

    def nbytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: Tensor, payload: Tensor) -> None:
        assert payload.numel() == self.nbytes(values.numel())
        values = values.detach()
        if payload.storage_offset() % self._dtype.itemsize:
            payload.copy_(values.to(self._dtype).view(torch.uint8))
        else:
            payload.view(self._dtype).copy_(values)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        assert payload.numel() == self.nbytes(out.numel())
        out.detach().copy_(self._cast(payload))

    def add(self, payload: Tensor, total: Tensor) -> None:
        assert payload.numel() == self.nbytes(total.numel())
        for elements, run in self.chunks(total.numel()):
            # Adding across dtypes is not vectorised; converting first is much faster.
            total[elements] += self._cast(payload[run]).to(total.dtype)

    def chunks(self, numel: int) -> Iterator[tuple[slice, slice]]:
        size = self._dtype.itemsize
        for start in range(0, numel, self._chunk_numel):
            stop = min(start + self._chunk_numel, numel)
            yield slice(start, stop), slice(start * size, stop * size)

    def _cast(self, payload: Tensor) -> Tensor:
        aligned = payload.storage_offset() % self._dtype.itemsize == 0
        return (payload if aligned else payload.clone()).view(self._dtype)


class _Blocks(_Codec):
    """Codes in blocks: int8 and int4; ``reference.py`` defines the bits."""

    dtype: torch.dtype | None = None

    def __init__(self, spec: Format, granule: int, device: torch.device) -> None:
        assert granule > 0
        self._format, self._granule = spec, granule
        self._chunk_numel = chunk_numel(device)

    def nbytes(self, numel: int) -> int:
        count, size = self._granules(numel)
        return count * wire_bytes(self._format, size)

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


class BlockCodec(_Blocks):
    """On the CPU: rows of whole blocks with a fast kernel, the few ragged ends with a slow one."""

    def __init__(self, spec: Format, granule: int, device: torch.device) -> None:
        super().__init__(spec, granule, device)
        self._row_bytes = row_bytes(spec, spec.block)
        self._full: RowKernel = full_rows(spec)
        self._tail: RowKernel = EagerRows(spec)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        for kernel, floats, rows in self._matrices(values, payload):
            kernel.encode(floats, rows)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        for kernel, floats, rows in self._matrices(out, payload):
            kernel.decode(rows, floats)

    def add(self, payload: Tensor, total: Tensor) -> None:
        for kernel, floats, rows in self._matrices(total, payload):
            kernel.add(rows, floats)

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


class LaunchCodec(_Blocks):
    """On an accelerator: one launch per call; see [Note: Two kinds of codecs]."""

    def __init__(self, spec: Format, granule: int, device: torch.device) -> None:
        super().__init__(spec, granule, device)
        self.kernel = payload_kernel(spec, device)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        if values.numel():
            self.kernel.encode(*self._matrices(values, payload))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        if out.numel():
            values, rows = self._matrices(out, payload)
            self.kernel.decode(rows, values)

    def add(self, payload: Tensor, total: Tensor) -> None:
        self.correct(payload, total, total.dtype)

    def correct(self, payload: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        if values.numel():
            totals, rows = self._matrices(values, payload)
            self.kernel.add(rows, totals, dtype)

    def encode_granules(
        self,
        values: Tensor,
        payload: Tensor,
        *,
        skip: slice = NOTHING,
        residual: Tensor | None = None,
    ) -> None:
        rows = payload.view(len(values), -1)
        self.kernel.encode(values.detach(), rows, skip=skip, residual=residual)

    def sum(
        self,
        payload: Tensor,
        own: Tensor,
        out: Tensor,
        coordinate: int,
        *,
        scale: float,
        add: bool,
    ) -> None:
        self.kernel.sum(payload, own, out, coordinate, scale=scale, add=add)

    def _matrices(self, values: Tensor, payload: Tensor) -> tuple[Tensor, Tensor]:
        assert payload.numel() == self.nbytes(values.numel())
        count, size = self._granules(values.numel())
        return values.detach().view(count, size), payload.view(count, -1)
