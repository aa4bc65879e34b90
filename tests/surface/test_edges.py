"""Which package may import which: one table, and every import in the sources obeys it.

Imports inside functions count, and so do those under TYPE_CHECKING: what a signature names must be
known to whoever reads it, so that an edge for types alone is an edge. ``shardwise`` itself (``import
shardwise as sw``, or a name from it that is no package) is the layer of ``api``.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "shardwise"

ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "plans": {"core"},
    "device": {"core"},
    # Planning, for clusters that nobody has to have. It never meets what runs.
    "cost": {"core", "plans"},
    "planner": {"core", "cost", "plans"},
    # Running.
    "wire": {"core", "device"},
    "tier": {"core", "device", "plans"},
    "comm": {"core", "device", "plans", "wire"},
    "model": {"core", "device", "plans"},
    "runtime": {"comm", "core", "device", "model", "plans", "tier", "wire"},
    "checkpoint": {"comm", "core", "device", "plans", "runtime", "tier"},
    # Measuring, whose result is a cluster for planning.
    "probing": {"comm", "core", "cost", "device", "model", "plans", "tier", "wire"},
    # What users call: these wire the packages together.
    "planning": {"core", "cost", "model", "planner", "plans"},
    "auto": {"comm", "core", "cost", "device", "model", "planner", "plans", "probing", "runtime"},
    "tracing": {"core"},
    "faults": {"api", "comm", "runtime"},
    "api": {"auto", "checkpoint", "comm", "core", "device", "model", "plans", "runtime", "tier"},
    "saving": {"api", "checkpoint", "core", "runtime"},
    "__init__": {
        "api", "auto", "checkpoint", "core", "faults", "model", "planning", "plans", "probing",
        "saving", "tier", "tracing",
    },
    # Programs on top of it.
    "train": {
        "__init__", "api", "auto", "checkpoint", "comm", "core", "device", "model", "planner",
        "plans",
    },
    "bench": {
        "__init__", "api", "core", "cost", "device", "model", "planner", "plans", "probing",
        "train", "wire",
    },
    "cli": {
        "__init__", "api", "bench", "checkpoint", "core", "cost", "model", "planner", "planning",
        "plans", "probing", "tier", "train",
    },
    "__main__": {"cli"},
}  # fmt: skip

Edge = tuple[str, str]


def imported(tree: ast.AST) -> Iterator[str]:
    """The packages of shardwise that a module imports, anywhere in it."""
    packages = {path.stem for path in SOURCES.iterdir()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not looked at here; write them in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "shardwise":
                yield rest[0] if rest and rest[0] in packages else "__init__"


def bad_edges(sources: dict[str, str]) -> set[Edge]:
    """The imports that the table does not have, of sources by their path in the package."""
    found = set()
    for path, source in sources.items():
        package = Path(path).parts[0].removesuffix(".py")
        own = {package, *ALLOWED[package]}
        found |= {(path, target) for target in imported(ast.parse(source)) if target not in own}
    return found


@cache
def all_sources() -> dict[str, str]:
    return {
        path.relative_to(SOURCES).as_posix(): path.read_text(encoding="utf-8")
        for path in SOURCES.rglob("*.py")
    }


def test_the_table_has_every_package() -> None:
    assert {Path(path).parts[0].removesuffix(".py") for path in all_sources()} == set(ALLOWED)


def test_imports_go_one_way() -> None:
    TopologicalSorter(ALLOWED).prepare()  # raises where packages import each other in a circle


def test_planning_and_running_meet_in_plans_alone() -> None:
    planning, running = {"cost", "planner"}, {"runtime", "comm", "tier"}
    for one, other in ((planning, running), (running, planning)):
        assert not set().union(*(ALLOWED[package] for package in one)) & other


def test_no_import_goes_the_wrong_way() -> None:
    assert bad_edges(all_sources()) == set()


def test_a_bad_edge_is_found_wherever_it_stands() -> None:
    inside = "def f() -> None:\n    from shardwise.comm.grid import Grid"
    for_types = "if TYPE_CHECKING:\n    import shardwise.runtime.unit"
    sources = {
        "planner/search.py": inside,
        "cost/price.py": for_types,
        "tier/rest.py": "from shardwise import api",
        "core/wire.py": "import shardwise as sw",
        "plans/plan.py": "from shardwise import Plan",
        "plans/file.py": "from shardwise.core import wire",
        "cli/plan.py": "from shardwise import comm",
        "wire/cpu.py": "importlib.import_module('shardwise.tier.pool')",
    }
    assert bad_edges(sources) == {
        ("planner/search.py", "comm"),
        ("cost/price.py", "runtime"),
        ("tier/rest.py", "api"),
        ("core/wire.py", "__init__"),
        ("plans/plan.py", "__init__"),
        ("cli/plan.py", "comm"),
        ("wire/cpu.py", "tier"),
    }
