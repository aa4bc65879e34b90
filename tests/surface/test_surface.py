"""Public surfaces, frozen: growth needs a visible change of these literals."""

import json

import pytest
import typer
from typer.testing import CliRunner

from shardwise.cli import explain as explain_module
from shardwise.cli.explain import explain
from shardwise.core.layout import ModelSpec, ParamSpec, lay_out
from shardwise.core.topology import Topology
from shardwise.plans.file import TABLES
from shardwise.plans.plan import Plan
from shardwise.plans.presets import PRESETS

PLAN_KEYS = {
    "preset",
    "name",
    "params",
    "params.spread",
    "params.wire",
    "params.tier",
    "grads",
    "grads.spread",
    "grads.wire",
    "grads.tier",
    "optim",
    "optim.spread",
    "optim.wire",
    "optim.tier",
    "keep",
    "keep_until",
    "activations",
    "precision",
    "precision.compute",
    "precision.reduce",
    "precision.master",
    "prefetch",
    "tiers",
    "tiers.path",
    "tiers.device_bytes",
    "tiers.cpu_bytes",
    "tiers.nvme_bytes",
    "tiers.window_numel",
    "tiers.update",
    "tiers.checksum",
    "tiling",
    "tiling.numel",
    "tiling.loss",
    "units",
    "min_unit_numel",
    "overrides",
    "overrides.unit",
    "overrides.params",
    "overrides.grads",
    "overrides.optim",
    "overrides.keep",
}

PRESET_NAMES = {
    "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "mics", "amsp", "zeropp", "lean", "infinity",
}  # fmt: skip

EXPLAIN_KEYS = {
    "plan",
    "levels",
    "accumulate",
    "units",
    "phase",
    "schedule",
    "traffic",
    "leaving",
    "memory",
}

MEMORY_KEYS = {
    "params",
    "kept",
    "gathered",
    "grads",
    "grad_buffers",
    "optim",
    "staging",
    "wires",
    "activations",
    "allowance",
    "total",
    "cpu",
    "nvme",
}


def test_plan_keys() -> None:
    found = {
        f"{opener}.{key}" if opener else key
        for opener, table in TABLES.items()
        for key in table.model_fields
    }
    assert found == PLAN_KEYS


def test_preset_names() -> None:
    assert set(PRESETS) == PRESET_NAMES


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command with a small model in place of a built one."""

    def describe(name: str, plan: Plan, topology: Topology) -> ModelSpec:
        weight, world = ParamSpec("weight", (1000,), "float32"), topology.world
        return ModelSpec(tuple(lay_out(unit, [weight], world) for unit in ("", "h.0", "h.1")))

    monkeypatch.setattr(explain_module, "_describe", describe)
    app = typer.Typer()
    app.command()(explain)
    return app


def test_explain_answers_in_json(app: typer.Typer) -> None:
    answer = json.loads(CliRunner().invoke(app, ["amsp", "--json", "--accumulate", "3"]).output)
    assert set(answer) == EXPLAIN_KEYS
    assert set(answer["memory"]) == MEMORY_KEYS
    assert answer["phase"] == "last"
    assert [(unit["unit"], unit["count"]) for unit in answer["units"]] == [
        ("(root)", 1),
        ("h.*", 2),
    ]
    assert answer["units"][0]["rests"]["OS"] == {"rung": 2, "parts": 4}


@pytest.mark.parametrize("levels", ["world=1", "node=2,world=2", "node=8,rack=4,world=4"])
@pytest.mark.parametrize("plan", PRESETS)
def test_explain_prints_for_people(app: typer.Typer, plan: str, levels: str) -> None:
    done = CliRunner().invoke(app, [plan, "--levels", levels], catch_exceptions=False)
    assert done.exit_code == 0
    for word in (f"Plan {plan}", "Where states rest", "Ladder", "2 × h.*", "Memory a rank"):
        assert word in done.output
