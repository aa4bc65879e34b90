"""Compares the Triton kernels with the reference, in Triton's interpreter; run by test_triton.py.

The interpreter is chosen when triton is first imported, so this is a process of its own, and
merely importing this file (as the search for doctests does) must not import triton.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor

from shardwise.core.wire import Format, wire_bytes
from shardwise.wire.kernels import EagerPayloads

GRANULES, APART = 9, 16
"""Granules, and elements between them."""
MEMBERS = 3


def granules_of(size: int, seed: int = 0) -> Tensor:
    """Granules of many magnitudes, and of zeros, NaN, infinities, nearly equal and huge values."""
    generator = torch.Generator().manual_seed(size + seed)
    values = torch.randn(GRANULES, size, generator=generator)
    values *= torch.logspace(-30, 30, GRANULES).unsqueeze(1)
    values[3] = 0
    values[4, size // 2] = torch.nan
    values[5, -1] = -torch.inf
    values[6] += values[6].abs().max() * 50
    values[7] = 3.4e38 * values[7].sign()
    return values


def apart(values: Tensor, fill: float = 7.0) -> Tensor:
    """The same values as columns of wider rows."""
    wide = torch.full((len(values), values.shape[1] + APART), fill, dtype=values.dtype)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def untouched(view: Tensor, fill: float = 7.0) -> bool:
    """Whether nothing was written beyond the columns of ``apart``."""
    assert view._base is not None
    return bool(view._base[:, view.shape[1] :].eq(fill).all())


def same(got: Tensor, wanted: Tensor) -> bool:
    """Equal bits; any NaN is as good as another."""
    if got.dtype is torch.bfloat16:
        # A device rounds this cast to nearest; the interpreter truncates it.
        bits = wanted.float().view(torch.int32) & -0x10000
        got, wanted = got.float(), bits.view(torch.float32)
    bits_of = {4: torch.int32, 8: torch.int64, 2: torch.int16, 1: torch.uint8}[got.element_size()]
    zeros = torch.zeros((), dtype=got.dtype)
    pair = [torch.where(t.isnan(), zeros, t).contiguous().view(bits_of) for t in (got, wanted)]
    return torch.equal(got.isnan(), wanted.isnan()) and torch.equal(*pair)


class Case:
    """A format and a size of granules, with both kernels."""

    def __init__(self, text: str, size: int) -> None:
        from shardwise.wire.triton_kernels import TritonPayloads

        self.spec, self.size = Format.parse(text), size
        self.name = f"{text}, granules of {size}"
        self.nbytes = wire_bytes(self.spec, size)
        self.values = granules_of(size)
        self.kernel, self.reference = TritonPayloads(self.spec), EagerPayloads(self.spec)

    def payload(self, count: int = GRANULES) -> Tensor:
        return torch.full((count, self.nbytes), 0xAB, dtype=torch.uint8)

    def encode(self, dtype: torch.dtype, **options: Any) -> None:
        got, wanted = self.payload(), self.payload()
        values = apart(self.values.to(dtype))
        self.reference.encode(values, wanted, **options)
        self.kernel.encode(values, got, **options)
        assert torch.equal(got, wanted), f"{self.name}, {dtype}, {options}: encode"

    def feed_back(self, dtype: torch.dtype, skip: slice) -> None:
        values = apart(self.values.to(dtype))
        left = GRANULES - (skip.stop - skip.start)
        lost = granules_of(self.size, seed=1)[:left] * 1e-2
        lost = torch.where(lost.isfinite(), lost, 0)
        both = []
        for kernel in (self.reference, self.kernel):
            payload, residual = self.payload(), apart(lost)
            kernel.encode(values, payload, skip=skip, residual=residual)
            assert untouched(residual), f"{self.name}: feedback wrote beyond its granules"
            both.append((payload, residual))
        (wanted, error), (got, found) = both
        assert torch.equal(got, wanted), f"{self.name}, {dtype}: encode with feedback"
        assert same(found, error), f"{self.name}, {dtype}: what feedback keeps"
        assert found.isfinite().all()

    def decode(self, dtype: torch.dtype) -> None:
        payload = self.payload()
        self.reference.encode(self.values, payload)
        wanted = torch.empty(GRANULES, self.size)
        self.reference.decode(payload, wanted)
        out = apart(torch.zeros(GRANULES, self.size, dtype=dtype))
        self.kernel.decode(payload, out)
        exact = wanted if dtype is torch.bfloat16 else wanted.to(dtype)
        assert same(out, exact), f"{self.name}: decode to {dtype}"
        assert untouched(out), f"{self.name}: decode wrote beyond its granules"

    def add(self, dtype: torch.dtype, wide: torch.dtype) -> None:
        payload = self.payload()
        self.reference.encode(self.values, payload)
        start = granules_of(self.size, seed=2).to(dtype)
        wanted, got = apart(start.to(wide)), apart(start)
        self.reference.add(payload, wanted, wide)
        self.kernel.add(payload, got, wide)
        exact = wanted if dtype is torch.bfloat16 else wanted.to(dtype)
        assert same(got, exact), f"{self.name}: add to {dtype} in {wide}"
        assert untouched(got), f"{self.name}: add wrote beyond its granules"

    def sum(self, own: torch.dtype, out: torch.dtype, coordinate: int, *, add: bool) -> None:
        payload = torch.stack([self.payload() for _ in range(MEMBERS)])
        for member in range(MEMBERS):
            if member != coordinate:  # this rank's place has any bytes
                self.reference.encode(granules_of(self.size, seed=member), payload[member])
        mine = apart(granules_of(self.size, seed=9).to(own))
        mine[0] = -0.0
        start = torch.ones(GRANULES, self.size, dtype=out)
        wanted, got = apart(start), apart(start)
        arrived = payload.view(MEMBERS, -1)
        for kernel, target in ((self.reference, wanted), (self.kernel, got)):
            kernel.sum(arrived, mine, target, coordinate, scale=0.25, add=add)
        assert same(got, wanted), f"{self.name}: sum of {own} to {out} at {coordinate}, add={add}"
        assert untouched(got), f"{self.name}: sum wrote beyond its granules"

    def check(self) -> None:
        single, double, half = torch.float32, torch.float64, torch.float16
        skip = slice(2, 4)
        self.encode(single)
        self.encode(half, skip=skip)
        self.encode(double, skip=slice(0, 5))
        self.feed_back(single, skip)
        self.feed_back(double, slice(0, 1))
        self.feed_back(half, slice(GRANULES - 1, GRANULES))
        for dtype in (single, double, torch.bfloat16):
            self.decode(dtype)
        self.add(single, single)
        self.add(double, double)
        self.add(half, single)
        self.add(torch.bfloat16, single)
        self.sum(single, single, 0, add=False)
        self.sum(half, single, 1, add=True)
        self.sum(double, double, 2, add=True)
        self.sum(single, double, 1, add=True)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    for spec_text in sys.argv[1].split(","):
        for granule in map(int, sys.argv[2:]):
            Case(spec_text, granule).check()
    print("equal bits")
