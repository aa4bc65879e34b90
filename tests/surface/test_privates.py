"""Nobody reaches into what others keep private: ``other._name``, or an import of a ``_name``.

Private is what a module or a class of shardwise names with one underscore. The module itself may
use it on any of its objects; others may not, whether by attribute, ``getattr`` or import. Privates
of torch and the standard library are used where nothing public does the same; each is listed.
"""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "shardwise"

FOREIGN = {
    # --- torch's modules that everybody uses, and whose names are private for history's sake
    "torch._C*": "the interpreter's own switches, such as DisableTorchFunctionSubclass",
    "torch._dynamo": "loaded on purpose, so that its memory counts for every contender",
    "torch._subclasses*": "fake tensors: shapes and saved bytes of a forward without its memory",
    "torch.utils._foreach_utils*": "which devices have foreach kernels",
    "torch.utils._python_dispatch*": "the base of dispatch modes, which deferred_init is one of",
    "torch.utils._pytree*": "nested arguments; the public name needs another library",
    # --- torch's operators whose names have an underscore
    "torch._*foreach_*": "what torch's own clipping and GradScaler call",
    "torch._assert_async": "a check on the device, for which the host need not wait",
    "torch._has_compatible_shallow_copy_type": "whether .data may change the device, as in .to()",
    "torch._neg_view": "appears among the operations that a module records",
    "torch.ops.aten._*": "names of operators, as a dispatcher sees them",
    # --- what torch keeps in its objects
    "module._apply": "what .to() and .half() come down to",
    "module._buffers": "buffers by name, with those that two names share",
    "module._modules": "children by name, with those that two names share",
    "module._parameters": "parameters by name, where a hook exchanges them",
    "m._parameters": "the same",
    "*._non_persistent_buffers_set": "which buffers a state_dict leaves out",
    "*._backward_hooks": "whether the user hung hooks on a parameter",
    "*._post_accumulate_grad_hooks": "the same",
    "*._cdata": "which tensors share a storage",
    "*._swap_data_ptr_": "see [Note: Swapped storage]",
    "*x._version": "whether a tensor was changed in place",
    "*._schema": "which arguments of an operator are written",
    "*._overloadpacket": "an operator's name without its overload",
    "*._shardwise_cell": "ours, on a storage of torch: it lives as long as that does",
    "nn.Module._call_impl": "the frame of a module's call on the stack",
    "torch.autograd.Variable._execution_engine": "callbacks at the end of a backward",
    "dist.distributed_c10d._get_default_store": "the store in which ranks leave notes",
    "filesystem._StorageInfo": "where a box is, in the index of a distributed checkpoint",
    "*_library._destroy": "takes replaced kernels out again",
    # --- the standard library
    "os._exit": "leaves without the interpreter's exit, which gloo's threads may abort",
    "sys._current_frames": "where the main thread is when a rank says what it does",
    "sys._getframe": "who calls; inspect's way to it reads sources",
}
"""Patterns of foreign privates that may be used, and what for."""

Use = tuple[str, str]
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: object) -> bool:
    if not isinstance(name, str) or not name.strip("_"):
        return False
    return name.startswith("_") and not name.endswith("__")


def defined(tree: ast.AST) -> set[str]:
    """The private names that a module gives to its own: at its top, in classes, on self."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_own(node.value) else set()
    return {name for name in found if is_private(name)}


def is_own(receiver: ast.expr) -> bool:
    """self, cls and super(), on which a class may use what it inherits."""
    return ast.unparse(receiver) in {"self", "cls", "super()"}


def used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The privates that a module takes from elsewhere: as written, and the private name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and not is_own(node.value):
                yield ast.unparse(node), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            receiver, name = node.args[:2]
            if isinstance(name, ast.Constant) and is_private(name.value) and not is_own(receiver):
                yield f"{ast.unparse(receiver)}.{name.value}", str(name.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = module + alias.name
                if privates := [part for part in path.split(".") if is_private(part)]:
                    yield path, privates[-1]


def breaches(sources: dict[str, str]) -> set[Use]:
    """Uses of what is neither a module's own nor listed."""
    found = set()
    for path, source in sources.items():
        tree = ast.parse(source)
        own = defined(tree)
        for text, name in used(tree):
            is_foreign = any(fnmatchcase(text, pattern) for pattern in FOREIGN)
            if text.startswith("shardwise.") or not (is_foreign or name in own):
                found.add((path, text))
    return found


@cache
def all_sources() -> dict[str, str]:
    return {
        path.relative_to(SOURCES).as_posix(): path.read_text(encoding="utf-8")
        for path in SOURCES.rglob("*.py")
    }


def test_nobody_reaches_into_what_others_keep_private() -> None:
    assert breaches(all_sources()) == set()


def test_no_pattern_for_foreign_privates_lets_ours_through() -> None:
    ours = {name for source in all_sources().values() for name in defined(ast.parse(source))}
    anywhere = {pattern.removeprefix("*.") for pattern in FOREIGN if pattern.startswith("*.")}
    assert not anywhere & ours, "name the receiver in these patterns"


def test_a_breach_is_found_however_it_is_written() -> None:
    sources = {
        "a.py": "_top = 1\nclass A:\n    def __init__(self):\n        self._x = 1",
        "b.py": "a._x",
        "c.py": "self.a._x",
        "d.py": "getattr(a, '_x')",
        "e.py": "from shardwise.a import _top",
        "f.py": "self._a._x\nself._a = 1",
        "g.py": "a._x = 1",
        "own.py": "class B:\n    _x = 1\n    def f(self, other):\n        return self._x + other._x",
        "torch.py": "torch._C.f(); torch._C._g(); storage._cdata; a.__class__",
    }
    assert breaches(sources) == {
        ("b.py", "a._x"),
        ("c.py", "self.a._x"),
        ("d.py", "a._x"),
        ("e.py", "shardwise.a._top"),
        ("f.py", "self._a._x"),
        ("g.py", "a._x"),
    }
