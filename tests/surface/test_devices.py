"""Only ``shardwise/device`` knows types of devices by name; everything else asks what they can do.

Looked at is code: strings, names and attributes, and comparisons of a device's type with a string.
Comments, docstrings and sentences for users (which write CUDA) may name what they like. ``meta`` is
no type of device, but the lack of one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "shardwise"
TYPES = re.compile(r"\b(cuda|xpu|hip|npu|mps|hpu|musa|privateuseone)\b")
ATTRIBUTES = {"cuda", "xpu", "hip", "mps", "npu", "is_cuda", "is_xpu", "is_mps", "is_cpu"}


def named(source: str) -> Iterator[tuple[int, str]]:
    """Lines of a module that name a type of device, and how."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings and TYPES.search(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Compare) and any(map(_is_type, _sides(node))):
            names = [name for side in _sides(node) for name in _strings(side) if name != "meta"]
            if names:
                yield node.lineno, f"device.type compared with {', '.join(names)}"


def _sides(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def _is_type(node: ast.expr) -> bool:
    """Whether an expression ends in ``device.type``, or is a device's type in another way."""
    return isinstance(node, ast.Attribute) and node.attr == "type" and "device" in ast.unparse(node)


def _strings(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def violations() -> dict[str, list[tuple[int, str]]]:
    paths = (path.relative_to(SOURCES) for path in SOURCES.rglob("*.py"))
    found = {
        path.as_posix(): list(named((SOURCES / path).read_text(encoding="utf-8")))
        for path in paths
        if path.parts[0] != "device"
    }
    return {path: lines for path, lines in found.items() if lines}


def test_types_of_devices_are_named_in_one_package() -> None:
    assert violations() == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("torch.cuda.synchronize()", True),
        ('x.to("cuda:0")', True),
        ("if x.is_cuda: pass", True),
        ('if x.device.type == "cpu": pass', True),
        ('if device.type in ("cpu", "other"): pass', True),
        ('if device.type != "meta": pass', False),
        ("if device.type != other.device.type: pass", False),
        ('raise UsageError("There is no CUDA device.")', False),
        ('def f() -> None:\n    """On cuda."""  # cuda', False),
        ('names = "is_cuda is_xpu"', False),
    ],
)
def test_names_are_found_in_code_alone(source: str, names: bool) -> None:
    assert bool(list(named(source))) == names
