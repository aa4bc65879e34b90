"""bfloat16 products computed in float32: same numbers, other dtypes untouched, all given back."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.probing import matmul

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((5, 7), (7, 3))),
    "addmm": (torch.addmm, ((3,), (5, 7), (7, 3))),
    "bmm": (torch.bmm, ((2, 5, 7), (2, 7, 3))),
    "baddbmm": (torch.baddbmm, ((2, 5, 3), (2, 5, 7), (2, 7, 3))),
    "linear": (F.linear, ((2, 5, 7), (3, 7), (3,))),
    "gelu": (F.gelu, ((5, 7),)),
}


@pytest.fixture(autouse=True)
def in_float32() -> Iterator[None]:
    matmul.compute_in_float32()
    yield
    matmul.restore()


def _draw(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_result_is_the_float32_one_rounded(name: str) -> None:
    function, shapes = PRODUCTS[name]
    operands = _draw(shapes, torch.bfloat16)
    wide = function(*(operand.float() for operand in operands))
    result = function(*operands)
    assert result.dtype is torch.bfloat16
    assert torch.equal(result, wide.to(torch.bfloat16))


@pytest.mark.parametrize("name", PRODUCTS)
def test_float32_is_bitwise_untouched(name: str) -> None:
    function, shapes = PRODUCTS[name]
    operands = _draw(shapes, torch.float32)
    ours = function(*operands)
    matmul.restore()
    assert torch.equal(ours, function(*operands))


def test_layouts_and_scales() -> None:
    a, b, bias = _draw(((7, 5), (3, 7), (5, 3)), torch.bfloat16)
    sliced = _draw(((5, 14),), torch.bfloat16)[0][:, ::2]  # not dense in any order
    expanded = _draw(((7, 1),), torch.bfloat16)[0].expand(7, 3)
    for left, right in ((a.t(), b.t()), (sliced, b.t()), (sliced, expanded)):
        wide = torch.addmm(bias.float(), left.float(), right.float(), beta=0.5, alpha=2)
        ours = torch.addmm(bias, left, right, beta=0.5, alpha=2)
        assert torch.equal(ours, wide.to(torch.bfloat16))
    assert torch.mm(torch.empty(0, 7).bfloat16(), b.t()).shape == (0, 3)


def test_a_result_outlives_the_next_product() -> None:
    a, b = _draw(((5, 7), (7, 3)), torch.bfloat16)
    first = torch.mm(a, b)
    copy = first.clone()
    torch.mm(a + 1, b + 1)
    assert torch.equal(first, copy)


def test_attention_and_its_gradients_are_those_of_float32_rounded() -> None:
    inputs = _draw(((1, 2, 16, 8),) * 3, torch.bfloat16)
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.float().requires_grad_() for x in inputs]
    ours = F.scaled_dot_product_attention(*narrow, is_causal=True)
    exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    assert torch.equal(ours, exact.to(torch.bfloat16))
    ours.sum().backward()
    exact.sum().backward()
    for mine, theirs in zip(narrow, wide, strict=True):
        torch.testing.assert_close(mine.grad.float(), theirs.grad, atol=2e-2, rtol=2e-2)


def test_it_trains_and_is_given_back() -> None:
    layer = torch.nn.Linear(8, 4).bfloat16()
    layer(torch.randn(3, 8).bfloat16()).sum().backward()
    assert layer.weight.grad.dtype is torch.bfloat16
    matmul.compute_in_float32()  # twice is once
    matmul.restore()
    matmul.restore()
    a, b = _draw(((5, 7), (7, 3)), torch.bfloat16)
    torch.testing.assert_close(torch.mm(a, b).float(), a.float() @ b.float(), atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("flags", "found"),
    [("avx2 avx512f", False), ("avx512_bf16", True), ("amx_bf16", True), ("asimd bf16", True)],
)
def test_has_bfloat16(tmp_path: Path, flags: str, found: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} sse\n")
    assert matmul.has_bfloat16(tmp_path / "cpuinfo") is found
    assert matmul.has_bfloat16(tmp_path / "missing")
