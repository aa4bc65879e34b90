"""bfloat16 matmuls computed in float32, for CPUs without bfloat16 instructions.

Without them torch emulates a bfloat16 product one element at a time, some 90 times slower than in
float32, and a benchmark measures nothing but that emulation. `compute_in_float32` replaces the CPU
kernels of matrix products, attention and gelu for bfloat16 tensors: operands are widened (exactly),
the float32 kernel runs, and its result is rounded once. This is a bfloat16 product with float32
accumulation, as hardware with such instructions computes it. Every other dtype uses torch's own
kernel. It is for benchmarks only, applies to the whole process and so to all contenders alike, and
reports of such runs print `REMARK`.
"""

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import DispatchKeySet, Tensor

REMARK = "bf16 matmuls computed in fp32: this CPU has no bf16 instructions"
_OVERRIDES = "(?s).*Overriding a previously registered kernel"
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Their names in /proc/cpuinfo; the last one is ARM's."""

_library: torch.library.Library | None = None


def has_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has bfloat16 products; if unknown, it is assumed to."""
    try:
        return bool(_INSTRUCTIONS & set(cpu_info.read_text(encoding="utf-8").split()))
    except OSError:
        return True


def compute_in_float32() -> None:
    """Replace the kernels in this process; a second call changes nothing."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_OVERRIDES, category=UserWarning)
            for name, kernel in _KERNELS.items():
                original = torch.library.get_kernel(f"aten::{name}", "CPU")
                chosen = functools.partial(_choose, original, kernel)
                _library.impl(name, chosen, "CPU", with_keyset=True, allow_override=True)


def restore() -> None:
    """Restore torch's own kernels."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _choose(
    original: Any, kernel: Callable[..., Any], keys: DispatchKeySet, *args: Any, **kwargs: Any
) -> Any:
    if args[0].dtype is torch.bfloat16:
        return kernel(*args, **kwargs)
    return original.call_boxed(keys, *args, **kwargs)


# --- kernels ------------------------------------------------------------------------------------
# `.out` variants and other dtypes keep torch's own kernels, so that nothing calls itself.


def _mm(a: Tensor, b: Tensor) -> Tensor:
    product = _scratch("out", (a.shape[0], b.shape[1]))
    torch.mm(_widen("a", a), _widen("b", b), out=product)
    return product.to(torch.bfloat16)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    total = _scratch("out", (a.shape[0], b.shape[1]))
    wide = _widen("bias", bias), _widen("a", a), _widen("b", b)
    torch.addmm(*wide, beta=beta, alpha=alpha, out=total)
    return total.to(torch.bfloat16)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    product = _scratch("out", (*a.shape[:2], b.shape[2]))
    torch.bmm(_widen("a", a), _widen("b", b), out=product)
    return product.to(torch.bfloat16)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    total = _scratch("out", (*a.shape[:2], b.shape[2]))
    wide = _widen("bias", bias), _widen("a", a), _widen("b", b)
    torch.baddbmm(*wide, beta=beta, alpha=alpha, out=total)
    return total.to(torch.bfloat16)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = _widen("q", query), _widen("k", key), _widen("v", value)
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *wide, *args, attn_mask=_widen_mask(attn_mask), scale=scale
    )
    return output.to(torch.bfloat16), logsumexp


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
    *args: Any, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = (_widen("grad", grad), _widen("q", query), _widen("k", key), _widen("v", value),
            _widen("out", output))  # fmt: skip
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *wide, logsumexp, *args, attn_mask=_widen_mask(attn_mask), scale=scale
    )
    query_grad, key_grad, value_grad = (wide_grad.to(torch.bfloat16) for wide_grad in grads)
    return query_grad, key_grad, value_grad


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    out = _like("out", x)
    torch.ops.aten.gelu.out(_widen("a", x), approximate=approximate, out=out)
    return out.to(torch.bfloat16)


_KERNELS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "gelu": _gelu,
}


# --- scratch ------------------------------------------------------------------------------------


class _Buffers(threading.local):
    """Reused float32 memory by use: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}


_buffers = _Buffers()


def _scratch(use: str, shape: tuple[int, ...]) -> Tensor:
    numel = 1
    for length in shape:
        numel *= length
    buffer = _buffers.of.get(use)
    if buffer is None or buffer.numel() < numel:
        buffer = _buffers.of[use] = torch.empty(numel)
    return buffer[:numel].view(shape)


def _like(use: str, tensor: Tensor) -> Tensor:
    """Scratch with a tensor's shape, and its strides if it is dense in any order."""
    if tensor.is_contiguous():
        return _scratch(use, tuple(tensor.shape))
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = _scratch(use, tuple(tensor.shape[dim] for dim in order))
    return dense.permute([order.index(dim) for dim in range(tensor.dim())])


def _widen(use: str, tensor: Tensor) -> Tensor:
    return _like(use, tensor).copy_(tensor)


def _widen_mask(mask: Tensor | None) -> Tensor | None:
    return mask.float() if mask is not None and mask.dtype is torch.bfloat16 else mask
