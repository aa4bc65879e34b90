"""Compiles the Triton kernels for GPUs that are not here, and reads the code; run by test_compile.py.

It is a process of its own, because importing triton takes long, and its cache must be a new one.
"""

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

KINDS = ("int8", "int8/symmetric", "int4", "int4/symmetric")
KERNELS = ("encode", "feedback", "decode", "add", "sum")
DTYPES = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "fp64": "*fp64"}


@dataclass(frozen=True)
class Variant:
    """One kernel as it is launched for granules whose sizes are multiples of 16, as all are."""

    text: str
    """The wire format."""
    what: str
    """``encode``, ``feedback``, ``decode``, ``add`` or ``sum``."""
    dtype: str
    """Of the values that are encoded, of the result of a decode, or of a sum's own piece."""
    out: str = "fp32"
    """Of a sum's result."""

    def __str__(self) -> str:
        return f"{self.text} {self.what} {self.dtype}"


def every() -> Iterator[Variant]:
    """All variants that plans with the default blocks launch, in floats of up to 32 bits."""
    for kind, what, dtype in product(KINDS, KERNELS, ("fp32", "bf16", "fp16")):
        yield Variant(kind, what, dtype)


def other_blocks() -> Iterator[Variant]:
    """The shortest and the longest blocks: many rows per tile, and one."""
    for kind, block in product(("int8", "int4"), ("/32", "/4096")):
        for what in ("feedback", "sum"):
            yield Variant(kind + block, what, "bf16")


def double() -> Iterator[Variant]:
    """Gradients and sums in float64."""
    for kind, what in product(("int8", "int4"), ("feedback", "add", "sum")):
        yield Variant(kind, what, "fp64", "fp64")


TARGETS = ("75", "80", "90", "100", "gfx942")
"""Compute capabilities of NVIDIA's GPUs, and an architecture of AMD's."""


def compiled(variant: Variant, target: Any) -> Any:
    import triton.language as tl
    from triton.compiler import ASTSource, compile

    from shardwise.core.wire import CODE_BITS, Format, row_bytes
    from shardwise.wire import reference
    from shardwise.wire import triton_kernels as kernels

    spec, pointer = Format.parse(variant.text), DTYPES[variant.dtype]
    tile = kernels.tile_rows(spec, 1 << 20)
    wide = tl.float64 if variant.dtype == "fp64" else tl.float32
    constants: dict[str, Any] = kernels.shape_of(spec, tile, kernels.alignment(spec, 1 << 20, 0))
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": False}
    if variant.what in ("encode", "feedback"):
        kernel, feedback = kernels._encode, variant.what == "feedback"
        types = {"values": pointer, "payload": "*u8", "residual": "*fp32" if feedback else "*u8"}
        constants |= {
            "feedback": feedback, "wide": wide,
            "per_span": 1 / reference.SPAN[spec.kind],
            "per_zero_point": 1 / reference.TOP_ZERO_POINT[spec.kind],
        }  # fmt: skip
    else:
        kernel, sums = kernels._decode, variant.what == "sum"
        out = DTYPES[variant.out] if sums else pointer
        types = {"payload": "*u8", "own": pointer, "out": out}
        types |= {"scale_high": "fp32", "scale_low": "fp32"}
        constants |= {
            "sums": sums,
            "add": variant.what != "decode",
            "total_dtype": wide,
            "wide": wide,
        }
    assert CODE_BITS[spec.kind] == constants["code_bits"]
    assert row_bytes(spec, spec.block) == constants["row_nbytes"]
    names = kernel.arg_names
    signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in names}
    divisible = {"values", "payload", "residual", "own", "out", "size", "code_rest"}
    divisible |= {name for name in names if name.endswith("_stride")}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in divisible
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, attributes)
    return compile(source, target=target, options=options)


def inspect(variant: Variant, ptx: str) -> None:
    """Values travel as vectors of 16 bytes, codes as words, and nothing is rounded differently."""
    loads, stores = (
        [(vector or "", int(bits)) for vector, bits in re.findall(pattern, ptx)]
        for pattern in (
            rf"{verb}\.global(?:\.(?!v\d)\w+)*?(\.v\d)?\.b(\d+)\b" for verb in ("ld", "st")
        )
    )
    found = f"{variant}: loads {sorted(set(loads))}, stores {sorted(set(stores))}"
    assert not re.search(r"\bfma\.", ptx), f"{variant}: a product was fused with a sum"
    vectors = {(".v4", 32), (".v2", 64)}
    if variant.what in ("encode", "feedback", "add", "sum"):
        assert vectors & set(loads), found
    if variant.what != "encode":
        assert vectors & set(stores), found
    # Rows without zero points begin on multiples of two bytes, the others on multiples of four.
    least = 16 if "symmetric" in variant.text else 32
    of_codes = stores if variant.what in ("encode", "feedback") else loads
    assert all(bits >= least for _, bits in of_codes), found
    if variant.what in ("encode", "feedback"):
        assert "div.rn.f32" in ptx, f"{variant}: a division is not exact"


def main(targets: list[str]) -> None:
    from triton.backends.compiler import GPUTarget

    variants = [*every(), *double(), *other_blocks()]
    for name in targets:
        begin, amd = time.perf_counter(), name.startswith("gfx")
        target = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name), 32)
        for variant in variants:
            assembly = compiled(variant, target).asm
            if amd:
                assert assembly["amdgcn"], variant
            else:
                inspect(variant, assembly["ptx"])
        took = time.perf_counter() - begin
        print(f"{name}: {len(variants)} compiled in {took:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
