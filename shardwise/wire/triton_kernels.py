"""Rows on CUDA: quantise and pack, unpack and dequantise (or accumulate), in one kernel each.

The bits are those of ``reference.py``; tests compare them in Triton's interpreter. A program
handles one row of any length up to a block, so ragged ends need no separate kernel. Importing this
module needs ``triton``, which CUDA builds of torch include.

Three things keep the bits equal to those on the CPU: contraction to fused multiply-adds is off
where a product is not exact, the one division is ``div_rn``, and rounding half to even is an
addition of 1.5 * 2**23, after which a float32 has no fraction left.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.core.wire import CODE_BITS, Format
from shardwise.wire import reference

_MAGIC = tl.constexpr(1.5 * 2**23)
_SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)
_LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
_INFINITY = tl.constexpr(float("inf"))


def _kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` with a type, which triton lacks."""
    return triton.jit(function)


@_kernel
def _round(x: tl.tensor) -> tl.tensor:
    """Round half to even, for magnitudes below 2**22."""
    return (x + _MAGIC) - _MAGIC


@_kernel
def _elements(
    values: tl.tensor, lane: tl.tensor, numel: tl.tensor, step: tl.constexpr, first: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Every step-th element of a row from ``first`` on, and which of them exist."""
    index = step * lane + first
    mask = index < numel
    return tl.load(values + index, mask=mask, other=0.0).to(tl.float32), mask


@_kernel
def _codes(x: tl.tensor, mask: tl.tensor, inverse: tl.tensor, zero: tl.tensor) -> tl.tensor:
    """The codes of elements; in a block that is not finite, those that stand for zero."""
    multiples = tl.where(inverse == 0.0, 0.0, x * inverse)
    return tl.where(mask, _round(multiples - zero).to(tl.int32), 0)


@_kernel
def _encode(
    values: tl.tensor, payload: tl.tensor, numel: tl.tensor, code_bytes: tl.tensor,
    values_stride: tl.tensor, payload_stride: tl.tensor,
    lanes: tl.constexpr, code_bits: tl.constexpr, minmax: tl.constexpr,
    per_span: tl.constexpr, per_zero_point: tl.constexpr, symmetric_top: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values += row * values_stride
    payload += row * payload_stride
    lane = tl.arange(0, lanes)
    step: tl.constexpr = 8 // code_bits

    x, mask = _elements(values, lane, numel, step, 0)
    low = tl.min(tl.where(mask, x, _INFINITY))
    high = tl.max(tl.where(mask, x, -_INFINITY))
    # Devices differ in whether reductions propagate NaN, so it is checked explicitly.
    finite = tl.min((tl.abs(x) < _INFINITY).to(tl.int32))
    if code_bits == 4:
        y, mask_y = _elements(values, lane, numel, step, 1)
        low = tl.minimum(low, tl.min(tl.where(mask_y, y, _INFINITY)))
        high = tl.maximum(high, tl.max(tl.where(mask_y, y, -_INFINITY)))
        finite = tl.minimum(finite, tl.min((tl.abs(y) < _INFINITY).to(tl.int32)))

    if minmax:
        scale = tl.maximum((high - low) * per_span, tl.abs(low) * per_zero_point)
    else:
        scale = tl.maximum(high, -low) * (1 / symmetric_top)
    scale = tl.maximum(scale, _SMALLEST_SCALE)
    scale = tl.where((finite != 0) & (scale <= _LARGEST_SCALE), scale, _INFINITY)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = bits.to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, scale)
    zero = _round(tl.where(inverse == 0.0, 0.0, low * inverse)) if minmax else -1.0 * symmetric_top

    codes = _codes(x, mask, inverse, zero)
    if code_bits == 4:
        codes = codes | (_codes(y, mask_y, inverse, zero) << 4)
    tl.store(payload + lane, codes.to(tl.uint8), mask=lane < code_bytes)
    # Rows start at any byte, so scale and zero point are stored byte by byte.
    meta = payload + code_bytes
    tl.store(meta, ((bits >> 16) & 0xFF).to(tl.uint8))
    tl.store(meta + 1, ((bits >> 24) & 0xFF).to(tl.uint8))
    if minmax:
        point = zero.to(tl.int32)
        tl.store(meta + 2, (point & 0xFF).to(tl.uint8))
        tl.store(meta + 3, ((point >> 8) & 0xFF).to(tl.uint8))


@_kernel
def _store(
    out: tl.tensor, x: tl.tensor, lane: tl.tensor, numel: tl.tensor,
    step: tl.constexpr, first: tl.constexpr, add: tl.constexpr,
) -> None:  # fmt: skip
    """Store or add every step-th element of a row from ``first`` on."""
    index = step * lane + first
    mask = index < numel
    x = x.to(out.dtype.element_ty)
    if add:
        x += tl.load(out + index, mask=mask)
    tl.store(out + index, x, mask=mask)


@_kernel
def _decode(
    payload: tl.tensor, out: tl.tensor, numel: tl.tensor, code_bytes: tl.tensor,
    payload_stride: tl.tensor, out_stride: tl.tensor,
    lanes: tl.constexpr, code_bits: tl.constexpr, minmax: tl.constexpr,
    symmetric_top: tl.constexpr, add: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    payload += row * payload_stride
    out += row * out_stride
    lane = tl.arange(0, lanes)
    step: tl.constexpr = 8 // code_bits

    meta = payload + code_bytes
    bits = (tl.load(meta).to(tl.int32) << 16) | (tl.load(meta + 1).to(tl.int32) << 24)
    scale = bits.to(tl.float32, bitcast=True)
    if minmax:
        point = tl.load(meta + 2).to(tl.int32) | (tl.load(meta + 3).to(tl.int32) << 8)
        zero = (point << 16) >> 16  # extends the sign of 16 bits
    else:
        zero = -symmetric_top
    codes = tl.load(payload + lane, mask=lane < code_bytes, other=0).to(tl.int32)
    if code_bits == 4:
        _store(out, ((codes >> 4) + zero).to(tl.float32) * scale, lane, numel, step, 1, add)
        codes = codes & 15
    _store(out, (codes + zero).to(tl.float32) * scale, lane, numel, step, 0, add)


class TritonRows:
    """Rows of any length up to a block, one program per row."""

    def __init__(self, spec: Format) -> None:
        self._kind, self._minmax = spec.kind, spec.minmax
        self._bits = CODE_BITS[spec.kind]

    def encode(self, values: Tensor, payload: Tensor) -> None:
        rows, numel = values.shape
        code_bytes = -(-numel * self._bits // 8)
        _encode[(rows,)](
            values, payload, numel, code_bytes, values.stride(0), payload.stride(0),
            **self._shape(code_bytes),
            per_span=1 / reference.SPAN[self._kind],
            per_zero_point=1 / reference.TOP_ZERO_POINT[self._kind],
            enable_fp_fusion=False,
        )  # fmt: skip

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._launch_decode(payload, out, add=False)

    def add(self, payload: Tensor, total: Tensor) -> None:
        assert total.dtype in (torch.float32, torch.float64)
        self._launch_decode(payload, total, add=True)

    def _launch_decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        rows, numel = out.shape
        code_bytes = -(-numel * self._bits // 8)
        _decode[(rows,)](
            payload, out, numel, code_bytes, payload.stride(0), out.stride(0),
            **self._shape(code_bytes), add=add,
        )  # fmt: skip

    def _shape(self, code_bytes: int) -> dict[str, int | bool]:
        lanes = triton.next_power_of_2(code_bytes)
        return {
            "lanes": lanes,
            "code_bits": self._bits,
            "minmax": self._minmax,
            "symmetric_top": reference.SYMMETRIC_TOP[self._kind],
            "num_warps": max(1, min(8, lanes // 256)),
        }
