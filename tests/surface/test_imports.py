"""Planning needs no torch: checked in a process of its own."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import shardwise.core, shardwise.cost, shardwise.plans, shardwise.planner
for package in (shardwise.core, shardwise.cost, shardwise.plans, shardwise.planner):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
importlib.import_module("shardwise.planning")
importlib.import_module("shardwise.cli.explain")
importlib.import_module("shardwise.cli.simulate")
heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
sys.exit(f"importing core, cost, plan, planner or their commands imports {heavy}" if heavy else 0)
"""


def test_planning_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
