"""Rows on the CPU, with the vectorised operators that torch has for quantised embeddings.

[Note: Packing operators]
``torch.ops.quantized.embedding_bag_{byte,4bit}_prepack_with_rowwise_min_max`` quantise and pack the
rows of a matrix between given bounds, and ``..._unpack`` reverse it. On their own they decode NaN
to numbers, lose tiny values (an epsilon of 1e-8, float16 scales) and refuse bfloat16. So they get
rows that are already multiples of the block's scale, and bounds that make their own scale exactly 1
and their bias the zero point: only rounding, clamping and packing are left to them. They always
allocate their result, which must therefore be small: all work is done in chunks that stay in cache,
and each thread reuses its scratch.
"""

import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.wire import CODE_BITS, Format, row_bytes
from shardwise.device.abilities import HOST
from shardwise.wire import reference

CHUNK_NUMEL = 1 << 18
"""Elements per chunk: with fewer, calls dominate; with more, the cache overflows."""

_local = threading.local()


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros on the CPU, whatever the user's default dtype and device are."""
    return torch.zeros(shape, dtype=dtype, device=HOST)


class _Scratch:
    """Buffers of a chunk for one thread, kind and block; names of numpy arrays end in _np."""

    def __init__(self, spec: Format) -> None:
        self.rows = max(1, CHUNK_NUMEL // spec.block)
        self.floats = _zeros(self.rows, spec.block)
        self.wide: Tensor | None = None
        lowest = -reference.SYMMETRIC_TOP[spec.kind]
        self.bounds = _zeros(self.rows, 2)
        self.bounds[:, 0] = lowest
        self.bounds[:, 1] = lowest + (1 << CODE_BITS[spec.kind]) - 1
        self.low, self.high = _zeros(self.rows), _zeros(self.rows)
        self.inverse = _zeros(self.rows, 1)
        # Rows as the unpacking operators expect them: codes, then a scale of 1 and the bias.
        self.code_bytes = spec.block * CODE_BITS[spec.kind] // 8
        dtype = torch.float32 if spec.kind == "int8" else torch.float16
        width = self.code_bytes + 2 * dtype.itemsize
        self.packed = _zeros(self.rows, width, dtype=torch.uint8)
        self.packed.view(dtype)[:, -2] = 1
        self.packed.view(dtype)[:, -1] = lowest
        self.packed_np = self.packed.numpy()
        self.bias_np = self.packed.view(dtype)[:, -1].numpy()
        # Scale and zero point as they travel; the scale is the upper half of a float32.
        self.meta_np = np.zeros((self.rows, 2), np.int16)
        self.arrived_scale = _zeros(self.rows, 1)
        self.arrived_halves_np = self.arrived_scale.numpy().view(np.int16)
        self.low_np, self.high_np = self.low.numpy(), self.high.numpy()
        self.inverse_np, self.bounds_np = self.inverse.numpy()[:, 0], self.bounds.numpy()
        self.scale_np = np.zeros(self.rows, np.float32)
        self.spare_np = np.zeros(self.rows, np.float32)

    def as_float64(self) -> Tensor:
        if self.wide is None:
            with torch.inference_mode(False):
                self.wide = _zeros(*self.floats.shape, dtype=torch.float64)
        return self.wide


def _scratch(spec: Format) -> _Scratch:
    kept: dict[tuple[str, int, bool], _Scratch] = _local.__dict__.setdefault("kept", {})
    key = (spec.kind, spec.block, spec.minmax)
    if key not in kept:
        with torch.inference_mode(False):  # otherwise it could not be written outside that mode
            kept[key] = _Scratch(spec)
    return kept[key]


class PackedRows:
    """Rows of whole blocks with torch's packing operators; see [Note: Packing operators]."""

    def __init__(self, spec: Format) -> None:
        self._spec = spec
        self._top = (1 << CODE_BITS[spec.kind]) - 1
        self._meta_bytes = 4 if spec.minmax else 2
        operators = torch.ops.quantized
        if spec.kind == "int8":
            self._pack = operators.embedding_bag_byte_prepack_with_rowwise_min_max
            self._unpack = operators.embedding_bag_byte_unpack
        else:
            self._pack = operators.embedding_bag_4bit_prepack_with_rowwise_min_max
            self._unpack = operators.embedding_bag_4bit_unpack

    def encode(self, values: Tensor, payload: Tensor) -> None:
        scratch, payload_np = _scratch(self._spec), payload.numpy()
        with np.errstate(all="ignore"):  # blocks that are not finite overflow on purpose
            for start in range(0, values.shape[0], scratch.rows):
                rows = slice(start, start + scratch.rows)
                self._encode_chunk(scratch, values[rows], payload_np[rows])

    def _encode_chunk(self, scratch: _Scratch, values: Tensor, payload: Any) -> None:
        rows, split = values.shape[0], scratch.code_bytes
        floats, bounds = scratch.floats[:rows], scratch.bounds[:rows]
        if values.dtype != torch.float32:
            values = floats.copy_(values)
        torch.amin(values, 1, out=scratch.low[:rows])
        torch.amax(values, 1, out=scratch.high[:rows])
        finite = self._row_statistics(scratch, rows)
        torch.mul(values, scratch.inverse[:rows], out=floats)
        if not finite:
            floats[scratch.inverse[:rows, 0] == 0] = 0.0
        payload[:, :split] = self._pack(floats, bounds).numpy()[:, :split]
        payload[:, split:] = scratch.meta_np[:rows].view(np.uint8)[:, : self._meta_bytes]

    def _row_statistics(self, scratch: _Scratch, rows: int) -> bool:
        """Compute bounds, inverse scales, and the scale and zero point of each row; returns whether
        all rows are finite.

        The operations are those of ``reference.scales_of`` and ``zero_point``. They are many and
        short, so they use numpy, whose calls cost less than torch's.
        """
        kind, minmax = self._spec.kind, self._spec.minmax
        low, high = scratch.low_np[:rows], scratch.high_np[:rows]
        scale, spare = scratch.scale_np[:rows], scratch.spare_np[:rows]
        inverse, meta = scratch.inverse_np[:rows], scratch.meta_np[:rows]
        if minmax:
            np.subtract(high, low, out=scale)
            np.multiply(scale, np.float32(1 / reference.SPAN[kind]), out=scale)
            np.abs(low, out=spare)
            np.multiply(spare, np.float32(1 / reference.TOP_ZERO_POINT[kind]), out=spare)
            np.maximum(scale, spare, out=scale)
        else:
            np.negative(low, out=spare)
            np.maximum(high, spare, out=scale)
            np.multiply(scale, np.float32(1 / reference.SYMMETRIC_TOP[kind]), out=scale)
        np.maximum(scale, np.float32(reference.SMALLEST_SCALE), out=scale)
        bits = scale.view(np.int32)
        finite = scale.max() <= reference.LARGEST_SCALE  # false for NaN
        if not finite:
            scale[~(scale <= reference.LARGEST_SCALE)] = np.inf
        np.add(bits, 0xFFFF, out=bits)
        np.bitwise_and(bits, -0x10000, out=bits)
        np.divide(np.float32(1), scale, out=inverse)
        meta[:, 0] = bits.view(np.int16)[1::2]
        if minmax:
            np.multiply(low, inverse, out=spare)
            if not finite:
                spare[inverse == 0] = 0
            bounds = scratch.bounds_np[:rows]
            zero = np.rint(spare, out=bounds[:, 0])
            np.add(zero, np.float32(self._top), out=bounds[:, 1])
            meta[:, 1] = zero
        return bool(finite)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        scratch, payload_np = _scratch(self._spec), payload.numpy()
        for start in range(0, out.shape[0], scratch.rows):
            rows = slice(start, start + scratch.rows)
            multiples, scale = self._multiples(scratch, payload_np[rows])
            if out.dtype == torch.float32:
                torch.mul(multiples, scale, out=out[rows])
            else:
                out[rows] = multiples.mul_(scale)

    def add(self, payload: Tensor, total: Tensor) -> None:
        scratch, payload_np = _scratch(self._spec), payload.numpy()
        for start in range(0, total.shape[0], scratch.rows):
            rows = slice(start, start + scratch.rows)
            multiples, scale = self._multiples(scratch, payload_np[rows])
            values = multiples.mul_(scale)
            if total.dtype != torch.float32:
                # Adding across dtypes is not vectorised; converting first is much faster.
                values = scratch.as_float64()[: values.shape[0]].copy_(values)
            total[rows].add_(values)

    def _multiples(self, scratch: _Scratch, payload: Any) -> tuple[Tensor, Tensor]:
        """The rows' multiples (codes plus zero points) and their scales."""
        rows, split = payload.shape[0], scratch.code_bytes
        meta = scratch.meta_np[:rows]
        scratch.packed_np[:rows, :split] = payload[:, :split]
        meta.view(np.uint8)[:, : self._meta_bytes] = payload[:, split:]
        scratch.arrived_halves_np[:rows, 1] = meta[:, 0]
        if self._spec.minmax:
            scratch.bias_np[:rows] = meta[:, 1]
        return self._unpack(scratch.packed[:rows]), scratch.arrived_scale[:rows]


@cache
def is_exact(spec: Format) -> bool:
    """Whether the packing operators of this build and machine reproduce the reference's bits.

    They are vectorised for x86 only, and other builds may round differently: replicas would drift
    apart with such a kernel, so it is not used.
    """
    random = np.random.default_rng(0).standard_normal((64, spec.block))
    random *= np.logspace(-30, 30, 64)[:, None]
    random[8:16] += 3 * np.abs(random[8:16]).max()
    values = torch.from_numpy(random.astype(np.float32))
    expected = _zeros(64, row_bytes(spec, spec.block), dtype=torch.uint8)
    payload, out = torch.empty_like(expected), torch.empty_like(values)
    reference.encode_rows(spec, values, expected)
    try:
        kernel = PackedRows(spec)
        kernel.encode(values, payload)
        kernel.decode(expected, out)
    except (AttributeError, RuntimeError):  # a build without these operators
        return False
    return torch.equal(payload, expected) and torch.equal(
        out, reference.decode_rows(spec, expected, spec.block)
    )
