"""What backward needs of a forward, told without running it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.core.topology import Topology
from shardwise.core.work import Saved
from shardwise.model.activations import SMALL_BYTES, saved_bytes
from shardwise.model.gpt import GPT, GPTConfig
from shardwise.plans import presets
from shardwise.plans.file import dump_plan
from shardwise.plans.plan import Plan, Tiers, Tiling

PLAN = Plan(min_unit_numel=500)
TWO = Topology.parse("node=2")
WIDTH, LAYERS = 64, 6
INPUT_BYTES = 512 * WIDTH * 4


class Layer(nn.Module):
    """Saves its input and what is between its linear layers: four times as wide, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))) + bias


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.first(x), torch.ones(WIDTH)
        for layer in self.layers:
            y = layer(y, bias=bias)
        return y.exp()


def measure(plan: Plan = PLAN, rows: int = 512) -> Saved:
    return saved_bytes(Layers, lambda model: model(torch.zeros(rows, 8)), plan)


def test_bytes_of_inputs_of_one_unit_and_of_everything():
    saved = measure()
    given, result = 512 * 8 * 4, INPUT_BYTES
    assert saved.root == given + result  # the first layer's input, exp's result
    assert saved.checkpoints == LAYERS * INPUT_BYTES + WIDTH * 4
    assert saved.small == WIDTH * 4
    assert saved.largest_unit == 2 * 4 * INPUT_BYTES
    assert saved.largest_input == INPUT_BYTES
    assert saved.total == saved.root + LAYERS * (INPUT_BYTES + saved.largest_unit)


def test_inputs_that_are_small_stay_in_memory():
    rows = SMALL_BYTES // (WIDTH * 4) - 1
    saved = measure(rows=rows)
    assert saved.small == saved.checkpoints > 0
    assert saved.largest_input == 0


def test_a_unit_inside_another_counts_with_it():
    nested = replace(PLAN, units=("layers.?", "layers.?.up"))

    class Sums(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

    def build() -> nn.Module:
        model = Layers()
        model.layers = nn.ModuleList(Sums() for _ in range(LAYERS))
        return model

    def run(model: nn.Module) -> torch.Tensor:
        return model(torch.zeros(512, 8))

    assert saved_bytes(build, run, nested) == saved_bytes(build, run, PLAN)


@pytest.mark.parametrize(("setting", "share"), [("recompute", 3), ("nvme", 4)])
def test_each_setting_holds_less(setting, share):
    saved = measure()
    assert saved.held("keep") == saved.total
    assert saved.held(setting) < saved.total / share


def test_explain_follows_the_plans_activations(tmp_path):
    def terms(setting: str) -> dict[str, int]:
        tiers = Tiers(path=str(tmp_path)) if setting == "nvme" else Tiers()
        plan = replace(presets.zero3(), activations=setting, tiers=tiers)
        path = tmp_path / f"{setting}.toml"
        path.write_text(dump_plan(plan))
        arguments = [str(path), "--levels", "world=2", "--model", "gpt-tiny", "--micro-batch", "4"]
        result = CliRunner().invoke(app, ["explain", *arguments, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["memory"]

    kept, recomputed, moved = (terms(setting) for setting in ("keep", "recompute", "nvme"))
    assert kept["activations"] > 2 * recomputed["activations"] > 2 * moved["activations"]
    assert kept["nvme"] == recomputed["nvme"] == 0 < moved["nvme"]


def test_a_loss_in_tiles_saves_no_logits():
    config = GPTConfig(num_layers=1, width=32, num_heads=1, vocab=5000)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    logits_bytes = 2 * 64 * 5000 * 4

    def saved(numel: int) -> int:
        plan = replace(presets.zero3(), tiling=Tiling(numel=numel))
        return saved_bytes(lambda: GPT(config), lambda m: m(tokens, tokens), plan, TWO).total

    assert saved(0) > logits_bytes
    assert saved(10_000) < logits_bytes / 4
