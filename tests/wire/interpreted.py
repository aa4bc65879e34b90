"""Compares the Triton kernels with the reference, in Triton's interpreter; run by test_triton.py.

The interpreter is chosen when triton is first imported, so this is a process of its own, and
merely importing this file (as the search for doctests does) must not import triton.
"""

import os
import sys

import torch

from shardwise.core.wire import Format, row_bytes
from shardwise.wire import reference

ROWS = 8


def rows_of(numel: int) -> torch.Tensor:
    """Rows of many magnitudes, and of zeros, NaN, infinities, nearly equal and huge values."""
    values = torch.randn(ROWS, numel, generator=torch.Generator().manual_seed(numel))
    values *= torch.logspace(-30, 30, ROWS).unsqueeze(1)
    values[3] = 0
    values[4, numel // 2] = torch.nan
    values[5, -1] = -torch.inf
    values[6] += values[6].abs().max() * 50
    values[7] = 3.4e38 * values[7].sign()
    return values


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got.isnan(), wanted.isnan()) and torch.equal(
        got.nan_to_num(), wanted.nan_to_num()
    )


def check(text: str, numel: int) -> None:
    from shardwise.wire.triton_kernels import TritonRows

    spec, values = Format.parse(text), rows_of(numel)
    kernel = TritonRows(spec)
    wanted = torch.empty(ROWS, row_bytes(spec, numel), dtype=torch.uint8)
    for dtype in (torch.float32, torch.float16):
        payload = torch.zeros_like(wanted)
        reference.encode_rows(spec, values.to(dtype), wanted)
        kernel.encode(values.to(dtype), payload)
        assert torch.equal(payload, wanted), f"{text}, rows of {numel}, {dtype}: encode"
    reference.encode_rows(spec, values, wanted)
    decoded = reference.decode_rows(spec, wanted, numel)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        out = torch.zeros(ROWS, numel, dtype=dtype)
        kernel.decode(wanted, out)
        if dtype is torch.bfloat16:
            # CUDA rounds this cast to nearest; the interpreter truncates it.
            decoded_bits = decoded.view(torch.int32) & -0x10000
            assert same(out.float(), decoded_bits.view(torch.float32)), f"{text}, {numel}: bf16"
        else:
            assert same(out, decoded.to(dtype)), f"{text}, rows of {numel}: decode to {dtype}"
    for dtype in (torch.float32, torch.float64):
        # Rows that lie apart, as ragged ends of granules do.
        total = torch.ones(ROWS, numel + 3, dtype=dtype)
        kernel.add(wanted, total[:, :numel])
        assert same(total[:, :numel], 1 + decoded.to(dtype)), f"{text}, {numel}: add to {dtype}"
        assert total[:, numel:].eq(1).all(), f"{text}, {numel}: add wrote beyond its row"


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    for spec_text in ("int8", "int8/symmetric", "int4", "int4/symmetric"):
        for row_numel in map(int, sys.argv[1:]):
            check(spec_text, row_numel)
    print("equal bits")
