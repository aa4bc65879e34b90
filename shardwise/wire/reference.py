"""The block formats, defined bit for bit in plain torch; every kernel must produce the same bytes.

[Note: Grid]
A block's values are rounded to whole multiples of its scale. What travels is the multiple minus the
zero point (the block's smallest multiple, or -127 and -7 if symmetric)::

    code  = round(value * (1 / scale) - zero_point)          half to even, 0 <= code <= 255 or 15
    value = (code + zero_point) * scale

Properties of this, and reasons for the details:

- Zero is a multiple, so zeros arrive as zeros.
- The scale is rounded up to bfloat16, which has float32's range: tiny and huge blocks keep their
  relative error, with a grid that is at most 1/128 coarser. It is at least 2**-126, so that its
  inverse is finite; values below that vanish.
- Multiples have at most 15 bits and the scale has 8, so every decoded value is exact in float32.
  A kernel may fuse the multiplication with the following sum and still gets the same bits.
- To keep multiples in that range (and int4's zero points exact in float16, as CPU kernels need),
  the scale is at least 1/16384 (int8) or 1/2048 (int4) of the smallest value's magnitude. This
  only affects blocks whose values are all nearly equal; as these are powers of two, a block of one
  value that bfloat16 can represent, such as the ones of a new norm, arrives exactly.
- Codes never overflow: the span of a min-max block is a little less than 255 or 15 scales, so that
  rounding the zero point cannot push the largest value out of range.

The error of a value is at most scale / 2 (and the rounding of float32, some millionths of that);
``error_bound`` has the formula. A block with a NaN, an infinity, or values farther apart than
float32 can represent has an infinite scale and multiples of zero: all of it decodes to NaN.
"""

import torch
from torch import Tensor

from shardwise.core.wire import CODE_BITS, Format, row_bytes

TOP_ZERO_POINT = {"int8": 16384, "int4": 2048}
"""The largest magnitude of a zero point; see [Note: Grid]."""
SYMMETRIC_TOP = {"int8": 127, "int4": 7}
SPAN = {"int8": 255 - 2**-6, "int4": 15 - 2**-6}
"""Scales between the smallest and the largest value of a min-max block."""
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = float.fromhex("0x1.fep127")
"""The largest finite bfloat16."""


def scales_of(spec: Format, low: Tensor, high: Tensor) -> Tensor:
    """The scale of each block, as float32, from its smallest and largest value."""
    # Multiply by constants, because a division does not give the same bits on every device.
    if spec.minmax:
        smallest = low.abs() * (1 / TOP_ZERO_POINT[spec.kind])
        scale = torch.maximum((high - low) * (1 / SPAN[spec.kind]), smallest)
    else:
        scale = torch.maximum(high, -low) * (1 / SYMMETRIC_TOP[spec.kind])
    scale = scale.clamp(min=SMALLEST_SCALE)
    scale = torch.where(scale <= LARGEST_SCALE, scale, torch.inf)
    # Rounding a positive number up to bfloat16 is integer arithmetic on its bits.
    return ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def zero_point(spec: Format, low: Tensor, inverse: Tensor) -> Tensor:
    """The multiple that code 0 stands for, as float32; zero for blocks that are not finite."""
    if spec.minmax:
        return torch.where(inverse == 0, 0.0, low * inverse).round_()
    return torch.full_like(low, -SYMMETRIC_TOP[spec.kind])


def encode_rows(spec: Format, values: Tensor, payload: Tensor) -> None:
    """Encode each row of ``values`` (rows, numel) as one row of ``payload`` (rows, bytes)."""
    values = values.to(torch.float32)
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    scale = scales_of(spec, low, high)
    inverse = scale.reciprocal()
    zero = zero_point(spec, low, inverse)
    # All codes of a block that is not finite stand for zero.
    multiples = torch.where(inverse == 0, 0.0, values * inverse)
    codes = (multiples - zero).round_().to(torch.uint8)
    if CODE_BITS[spec.kind] == 4:
        if codes.shape[1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    meta = [scale.to(torch.bfloat16).view(torch.uint8)]
    if spec.minmax:
        meta.append(zero.to(torch.int16).view(torch.uint8))
    payload.copy_(torch.cat([codes, *meta], 1))


def decode_rows(spec: Format, payload: Tensor, numel: int) -> Tensor:
    """The values of each row of ``payload`` (rows, bytes), as float32 (rows, numel)."""
    assert payload.shape[1] == row_bytes(spec, numel)
    count = -(-numel * CODE_BITS[spec.kind] // 8)
    codes = payload[:, :count]
    meta = payload[:, count:].clone(memory_format=torch.contiguous_format)  # also aligns it
    if CODE_BITS[spec.kind] == 4:
        codes = torch.stack([codes & 15, codes >> 4], 2).view(-1, 2 * count)[:, :numel]
    scale = meta[:, :2].contiguous().view(torch.bfloat16).to(torch.float32)
    if spec.minmax:
        zero = meta[:, 2:].contiguous().view(torch.int16).to(torch.float32)
    else:
        zero = torch.full_like(scale, -SYMMETRIC_TOP[spec.kind])
    return (codes.to(torch.float32) + zero) * scale


def error_bound(spec: Format, low: Tensor, high: Tensor) -> Tensor:
    """The largest error of a value in a finite block from ``low`` to ``high``, as float64.

    Half a scale, which rounding to bfloat16 increases by at most 1/128, plus the effect of rounding
    to float32 on the way: a few parts in 2**24 of the multiples, which 1/100 covers.
    """
    low, high = low.double(), high.double()
    if spec.minmax:
        scale = torch.maximum((high - low) / SPAN[spec.kind], low.abs() / TOP_ZERO_POINT[spec.kind])
    else:
        scale = torch.maximum(high, -low) / SYMMETRIC_TOP[spec.kind]
    return scale.clamp(min=SMALLEST_SCALE) * (1 + 2**-7) * (1 + 0.01) / 2
