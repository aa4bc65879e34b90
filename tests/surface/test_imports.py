"""Planning needs no torch: checked in a process of its own."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import shardwise.core, shardwise.plan
for package in (shardwise.core, shardwise.plan):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
importlib.import_module("shardwise.cli.explain")
heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
sys.exit(f"importing core, plan or cli.explain imports {heavy}" if heavy else 0)
"""


def test_core_plan_and_explain_import_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
