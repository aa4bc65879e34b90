"""Nothing grows beyond what a reader can hold: the lines of a file, the methods of a class."""

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "shardwise"

MOST_LINES = 400
MOST_METHODS = 20
"""Properties and dunders count."""


def too_large(path: str, source: str) -> set[str]:
    """The file, and those of its classes, inner ones included, that exceed the limits."""
    found = {path} if len(source.splitlines()) > MOST_LINES else set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [
                part
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            if len(methods) > MOST_METHODS:
                found.add(f"{path}:{node.name}")
    return found


def all_too_large() -> set[str]:
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        found |= too_large(path.relative_to(SOURCES).as_posix(), path.read_text(encoding="utf-8"))
    return found


def test_no_file_and_no_class_is_too_large() -> None:
    assert all_too_large() == set()


def test_the_limits_themselves_are_allowed() -> None:
    methods = "".join(f"    def f{number}(self): pass\n" for number in range(MOST_METHODS))
    assert too_large("a.py", f"class A:\n{methods}") == set()
    one_more = f"class A:\n{methods}    @property\n    def more(self): pass\n"
    assert too_large("a.py", one_more) == {"a.py:A"}
    assert too_large("a.py", "x = 1\n" * MOST_LINES) == set()
    assert too_large("a.py", "x = 1\n" * (MOST_LINES + 1)) == {"a.py"}
