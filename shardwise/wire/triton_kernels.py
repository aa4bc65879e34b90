"""Payloads in Triton: encoding, decoding and sums over members, each in one launch.

The bits are those of ``reference.py``; tests compare them in Triton's interpreter. Importing this
module needs ``triton``, which torch's builds for accelerators include.

[Note: Tiles]
A program handles a *tile*: some neighbouring rows of one granule, of which the last may be a ragged
end. Tiles of all granules are one launch, and granules may lie apart. Values are read and written
as vectors where granules begin on multiples of 16 elements, as those of a unit do. Rows of a
payload lie on multiples of 4 bytes then, or of 2 without zero points, so codes travel as words, and
scale and zero point together.

Three things keep the bits equal to those on the CPU: contraction to fused multiply-adds is off
where a product is not exact, the one division is ``div_rn``, and rounding half to even is an
addition of 1.5 * 2**23, after which a float32 has no fraction left.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.core.wire import (
    CODE_BITS,
    SCALE_BYTES,
    ZERO_POINT_BYTES,
    Format,
    row_bytes,
    wire_bytes,
)
from shardwise.wire import reference
from shardwise.wire.kernels import NOTHING, wider

_MAGIC = tl.constexpr(1.5 * 2**23)
_SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)
_LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
_INFINITY = tl.constexpr(float("inf"))

TILE = 2048
"""Elements of a tile of several rows: 16 per thread, which hides latency and fits registers."""
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def tile_rows(spec: Format, size: int) -> int:
    """The rows of a tile, in granules of so many elements."""
    rows = triton.next_power_of_2(max(1, -(-size // spec.block)))
    return int(min(rows, max(1, TILE // spec.block)))


def alignment(spec: Format, size: int, address: int) -> int:
    """What the scales of all rows, of granules of so many elements, lie on multiples of.

    >>> [alignment(Format("int8"), size, 0) for size in (512, 300, 301)]
    [4, 4, 1]
    """
    tail = -(-(size % spec.block) * CODE_BITS[spec.kind] // 8)
    wanted = SCALE_BYTES + ZERO_POINT_BYTES * spec.minmax
    places = (address, row_bytes(spec, spec.block), tail, wire_bytes(spec, size))
    return 1 if any(place % wanted for place in places) else wanted


_VARYING = frozenset(
    [
        "tiles",
        "granule_bytes",
        "member_bytes",
        "code_quads",
        "members",
        "coordinate",
        "skip_start",
        "skip_count",
    ]
)
"""Arguments for whose values no kernel is compiled anew: it would gain nothing."""


def _kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` with a type, which triton lacks."""
    names = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[name for name in _VARYING if name in names])


@_kernel
def _round(x: tl.tensor) -> tl.tensor:
    """Round half to even, for magnitudes below 2**22."""
    return (x + _MAGIC) - _MAGIC


@_kernel
def _grid(rows: tl.constexpr, width: tl.constexpr, stride: tl.constexpr) -> tl.tensor:
    """The offsets of a tile's elements or bytes; rows begin ``stride`` apart."""
    return tl.arange(0, rows)[:, None] * stride + tl.arange(0, width)[None, :]


@_kernel
def _tail(
    rows: tl.constexpr, left: tl.tensor, code_left: tl.tensor,
    block: tl.constexpr, code_bits: tl.constexpr, row_nbytes: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Where the scale of each row of a tile lies, and which rows exist."""
    row = tl.arange(0, rows)
    code_bytes: tl.constexpr = block * code_bits // 8
    codes = tl.minimum(code_left - row * code_bytes, code_bytes).to(tl.int32)
    return row * row_nbytes + codes, row * block < left


@_kernel
def _store_tail(
    payload: tl.tensor, scale_bits: tl.tensor, zero: tl.tensor, mask: tl.tensor,
    minmax: tl.constexpr, align: tl.constexpr,
) -> None:  # fmt: skip
    """Store scales, of which bfloat16 has the upper half, and zero points."""
    scale = (scale_bits >> 16) & 0xFFFF
    if minmax:
        point = zero.to(tl.int32) & 0xFFFF
        if align == 4:
            word = payload.to(tl.pointer_type(tl.int32))
            tl.store(word, scale | (point << 16), mask=mask)
        else:
            tl.store(payload + 2, (point & 0xFF).to(tl.uint8), mask=mask)
            tl.store(payload + 3, ((point >> 8) & 0xFF).to(tl.uint8), mask=mask)
    if not minmax and align > 1:
        half = payload.to(tl.pointer_type(tl.int16))
        tl.store(half, scale.to(tl.int16), mask=mask)
    elif align != 4:
        tl.store(payload, (scale & 0xFF).to(tl.uint8), mask=mask)
        tl.store(payload + 1, ((scale >> 8) & 0xFF).to(tl.uint8), mask=mask)


@_kernel
def _load_tail(
    payload: tl.tensor, mask: tl.tensor,
    minmax: tl.constexpr, symmetric_top: tl.constexpr, align: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Scales as float32, and zero points as int32."""
    if minmax and align == 4:
        word = tl.load(payload.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
        bits = word << 16
        zero = word >> 16  # extends the sign
    elif not minmax and align == 2:
        half = tl.load(payload.to(tl.pointer_type(tl.int16)), mask=mask, other=0)
        bits = half.to(tl.int32) << 16
        zero = tl.zeros_like(bits) - symmetric_top
    else:
        low = tl.load(payload, mask=mask, other=0).to(tl.int32)
        high = tl.load(payload + 1, mask=mask, other=0).to(tl.int32)
        bits = (low << 16) | (high << 24)
        if minmax:
            point = tl.load(payload + 2, mask=mask, other=0).to(tl.int32)
            point |= tl.load(payload + 3, mask=mask, other=0).to(tl.int32) << 8
            zero = (point << 16) >> 16
        else:
            zero = tl.zeros_like(bits) - symmetric_top
    return bits.to(tl.float32, bitcast=True), zero


@_kernel
def _encode(
    values: tl.tensor, payload: tl.tensor, residual: tl.tensor,
    tiles: tl.tensor, size: tl.tensor, code_quads: tl.tensor, code_rest: tl.tensor,
    granule_bytes: tl.tensor, values_stride: tl.tensor, residual_stride: tl.tensor,
    skip_start: tl.tensor, skip_count: tl.tensor,
    rows: tl.constexpr, block: tl.constexpr, code_bits: tl.constexpr, minmax: tl.constexpr,
    row_nbytes: tl.constexpr, align: tl.constexpr, feedback: tl.constexpr, wide: tl.constexpr,
    per_span: tl.constexpr, per_zero_point: tl.constexpr, symmetric_top: tl.constexpr,
) -> None:  # fmt: skip
    code_bytes: tl.constexpr = block * code_bits // 8
    index = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * rows
    granule = index + tl.where(index >= skip_start, skip_count, 0)
    values += granule * values_stride + first * block
    payload = tl.multiple_of(payload + (granule * granule_bytes + first * row_nbytes), align)
    left = size - first * block
    code_left = code_quads * 4 + code_rest - first * code_bytes

    offset = _grid(rows, block, block)
    mask = offset < left
    wanted = tl.load(values + offset, mask=mask, other=0.0)
    if feedback:
        residual += index * residual_stride + first * block
        lost = tl.load(residual + offset, mask=mask, other=0.0)
        wanted = wanted.to(wide) + lost.to(wide)
    x = wanted.to(tl.float32)
    low = tl.min(tl.where(mask, x, _INFINITY), axis=1)
    high = tl.max(tl.where(mask, x, -_INFINITY), axis=1)
    # Devices differ in whether reductions propagate NaN, so it is checked explicitly.
    finite = tl.min((tl.abs(x) < _INFINITY).to(tl.int32), axis=1)

    if minmax:
        scale = tl.maximum((high - low) * per_span, tl.abs(low) * per_zero_point)
    else:
        scale = tl.maximum(high, -low) * (1 / symmetric_top)
    scale = tl.maximum(scale, _SMALLEST_SCALE)
    scale = tl.where((finite != 0) & (scale <= _LARGEST_SCALE), scale, _INFINITY)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = bits.to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, scale)
    if minmax:
        zero = _round(tl.where(inverse == 0.0, 0.0, low * inverse))
    else:
        zero = tl.zeros_like(low) - symmetric_top

    # All codes of a block that is not finite stand for zero.
    multiples = tl.where(inverse[:, None] == 0.0, 0.0, x * inverse[:, None])
    rounded = _round(multiples - zero[:, None])
    codes = tl.where(mask, rounded.to(tl.int32), 0)
    if code_bits == 4:
        even, odd = tl.split(tl.reshape(codes, (rows, code_bytes, 2)))
        codes = even | (odd << 4)
    exists = _grid(rows, code_bytes, code_bytes) < code_left
    tl.store(payload + _grid(rows, code_bytes, row_nbytes), codes.to(tl.uint8), mask=exists)
    at, present = _tail(rows, left, code_left, block, code_bits, row_nbytes)
    _store_tail(payload + at, bits, zero, present, minmax, align)
    if feedback:
        arrives = (rounded + zero[:, None]) * scale[:, None]
        error = (wanted - arrives.to(wide)).to(tl.float32)
        # An overflow shows in the gradients themselves and must not return in every later step.
        tl.store(residual + offset, tl.where(tl.abs(error) < _INFINITY, error, 0.0), mask=mask)


@_kernel
def _decoded(
    payload: tl.tensor, left: tl.tensor, code_left: tl.tensor,
    rows: tl.constexpr, block: tl.constexpr, code_bits: tl.constexpr, minmax: tl.constexpr,
    row_nbytes: tl.constexpr, align: tl.constexpr, symmetric_top: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of a tile of a payload, as float32."""
    code_bytes: tl.constexpr = block * code_bits // 8
    exists = _grid(rows, code_bytes, code_bytes) < code_left
    codes = tl.load(payload + _grid(rows, code_bytes, row_nbytes), mask=exists, other=0)
    codes = codes.to(tl.int32)
    if code_bits == 4:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (rows, block))
    at, present = _tail(rows, left, code_left, block, code_bits, row_nbytes)
    scale, zero = _load_tail(payload + at, present, minmax, symmetric_top, align)
    return (codes + zero[:, None]).to(tl.float32) * scale[:, None]


@_kernel
def _decode(
    payload: tl.tensor, own: tl.tensor, out: tl.tensor,
    members: tl.tensor, coordinate: tl.tensor, scale_high: tl.tensor, scale_low: tl.tensor,
    tiles: tl.tensor, size: tl.tensor, code_quads: tl.tensor, code_rest: tl.tensor,
    granule_bytes: tl.tensor, member_bytes: tl.tensor, own_stride: tl.tensor, out_stride: tl.tensor,
    rows: tl.constexpr, block: tl.constexpr, code_bits: tl.constexpr, minmax: tl.constexpr,
    row_nbytes: tl.constexpr, align: tl.constexpr, sums: tl.constexpr, add: tl.constexpr,
    total_dtype: tl.constexpr, wide: tl.constexpr, symmetric_top: tl.constexpr,
) -> None:  # fmt: skip
    code_bytes: tl.constexpr = block * code_bits // 8
    granule = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * rows
    payload = tl.multiple_of(payload + (granule * granule_bytes + first * row_nbytes), align)
    out += granule * out_stride + first * block
    left = size - first * block
    code_left = code_quads * 4 + code_rest - first * code_bytes
    offset = _grid(rows, block, block)
    mask = offset < left

    if sums:
        own += granule * own_stride + first * block
        # Adding to minus zero changes nothing, not even the sign of a zero.
        total = tl.full((rows, block), -0.0, total_dtype)
        for i in range(members):
            if i == coordinate:
                total += tl.load(own + offset, mask=mask, other=0.0).to(total_dtype)
            else:
                piece = tl.multiple_of(payload + tl.cast(i, tl.int64) * member_bytes, align)
                total += _decoded(
                    piece, left, code_left,
                    rows, block, code_bits, minmax, row_nbytes, align, symmetric_top,
                ).to(total_dtype)  # fmt: skip
        result = total.to(wide) * (tl.full((1, 1), 0.0, wide) + scale_high + scale_low)
    else:
        result = _decoded(
            payload, left, code_left,
            rows, block, code_bits, minmax, row_nbytes, align, symmetric_top,
        ).to(wide)  # fmt: skip
    if add:
        result += tl.load(out + offset, mask=mask, other=0.0).to(wide)
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)


def shape_of(spec: Format, rows: int, align: int) -> dict[str, Any]:
    """What both kernels are compiled for."""
    return {
        "rows": rows,
        "block": spec.block,
        "code_bits": CODE_BITS[spec.kind],
        "minmax": spec.minmax,
        "row_nbytes": row_bytes(spec, spec.block),
        "align": align,
        "symmetric_top": reference.SYMMETRIC_TOP[spec.kind],
        "num_warps": 4 if rows * spec.block <= TILE else 8,
    }


class TritonPayloads:
    """A ``PayloadKernel`` of which every call is one launch."""

    def __init__(self, spec: Format) -> None:
        self._spec = spec

    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        *,
        skip: slice = NOTHING,
        residual: Tensor | None = None,
    ) -> None:
        granules, size = values.shape
        count = granules - (skip.stop - skip.start)
        shape, places, tiles = self._geometry(size, payload)
        if count * tiles == 0:
            return
        kind = self._spec.kind
        lost = payload if residual is None else residual  # not used if there is none
        assert lost.stride(-1) == values.stride(-1) == 1
        _encode[(count * tiles,)](
            values, payload, lost, *places, values.stride(0), lost.stride(0),
            skip.start, skip.stop - skip.start,
            **shape, feedback=residual is not None, wide=_WIDE[wider(values.dtype)],
            per_span=1 / reference.SPAN[kind], per_zero_point=1 / reference.TOP_ZERO_POINT[kind],
            enable_fp_fusion=False,
        )  # fmt: skip

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._launch(payload, None, out, -1, 1.0, add=False, wide=torch.float32)

    def add(self, payload: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        self._launch(payload, None, total, -1, 1.0, add=True, wide=dtype)

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
        wide = torch.promote_types(wider(own.dtype), out.dtype)
        self._launch(payload, own, out, coordinate, scale, add=add, wide=wide)

    def _launch(
        self,
        payload: Tensor,
        own: Tensor | None,
        out: Tensor,
        coordinate: int,
        scale: float,
        *,
        add: bool,
        wide: torch.dtype,
    ) -> None:
        granules, size = out.shape
        members = len(payload) if own is not None else 1
        shape, places, tiles = self._geometry(size, payload)
        if granules * tiles == 0:
            return
        mine = out if own is None else own
        assert mine.stride(-1) == out.stride(-1) == 1
        # A kernel gets floats as float32: a second one has what the first lacks.
        high = torch.tensor(scale, dtype=torch.float32).item()
        _decode[(granules * tiles,)](
            payload, mine, out, members, coordinate, high, scale - high,
            *places, granules * places[-1], mine.stride(0), out.stride(0),
            **shape, sums=own is not None, add=add,
            total_dtype=_WIDE[wider(mine.dtype)], wide=_WIDE[wide], enable_fp_fusion=False,
        )  # fmt: skip

    def _geometry(self, size: int, payload: Tensor) -> tuple[dict[str, Any], tuple[int, ...], int]:
        """The shape of tiles, the kernels' arguments on sizes, and the tiles of a granule."""
        spec = self._spec
        assert payload.is_contiguous()
        granule_bytes = wire_bytes(spec, size)
        tile = tile_rows(spec, size)
        code_total = -(-size * CODE_BITS[spec.kind] // 8)
        shape = shape_of(spec, tile, alignment(spec, size, payload.data_ptr()))
        places = -(-size // (tile * spec.block)), size, code_total // 4, code_total % 4
        return shape, (*places, granule_bytes), places[0]
