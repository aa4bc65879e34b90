"""The Triton kernels: the reference's bits in the interpreter, and code for a real GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton; a Linux wheel that needs no GPU)",
)
ROOT = Path(__file__).parents[2]

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shardwise.core.wire import Format
from shardwise.wire import make_codec, reference, triton_kernels as kernels

def assembly(kernel, pointers, constants, **options):
    signature = {n: pointers.get(n, "constexpr" if n in constants else "i32")
                 for n in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]

for bits, minmax, out, add in ((8, False, "*bf16", False), (4, True, "*fp32", True)):
    kind = f"int{bits}"
    shape = dict(lanes=64, code_bits=bits, minmax=minmax,
                 symmetric_top=reference.SYMMETRIC_TOP[kind])
    constants = dict(per_span=1 / reference.SPAN[kind],
                     per_zero_point=1 / reference.TOP_ZERO_POINT[kind])
    ptx = assembly(kernels._encode, {"values": "*bf16", "payload": "*u8"}, shape | constants,
                   num_warps=1, enable_fp_fusion=False)
    assert "fma." not in ptx, "a product was fused, so that its rounding differs from the CPU's"
    assert "div.rn.f32" in ptx
    assembly(kernels._decode, {"payload": "*u8", "out": out}, shape | {"add": add}, num_warps=1)

codec = make_codec(Format("int4"), 300, "cuda")  # nothing is allocated yet
assert isinstance(codec._full, kernels.TritonRows) and isinstance(codec._tail, kernels.TritonRows)
print("compiled")
"""


def run(*arguments: str, folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_interpreted_kernels_have_the_references_bits(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("interpreted.py"))
    assert "equal bits" in run(script, "37", "64", folder=tmp_path)


def test_kernels_compile_for_a_gpu_and_cuda_gets_them(tmp_path: Path) -> None:
    assert "compiled" in run("-c", COMPILE, folder=tmp_path)
