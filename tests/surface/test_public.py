"""What users can rely on: growth of these sets needs a visible change here."""

import typer

import shardwise
from shardwise.cli.main import app

NAMES = {
    "Auto", "BudgetError", "Override", "Plan", "PlanError", "Precision", "ShardwiseError", "StatePlan", "SyncError",
    "TierError", "Tiers", "Tiling", "UsageError",
    "clip_grad_norm_", "deferred_init", "export", "full_grads", "full_params", "load_pretrained", "no_sync",
    "optim_state_dict", "plan", "presets", "probe", "set_grad_divisor", "shard", "simulate", "state_dict", "stats", "trace", "unshard",
}  # fmt: skip
COMMON = {"--help"}
OPTIONS = {
    "bench cluster": {
        "--nodes", "--ranks", "--rate", "--latency", "--model", "--seq", "--dtype", "--steps", "--warmup", "--rounds",
        "--plans", "--peers", "--native-bf16", "--deepspeed-python", "--out", "--json",
    },
    "doctor": {"--clean", "--json"},
    "explain": {"--model", "--levels", "--accumulate", "--phase", "--micro-batch", "--seq", "--json"},
    "inspect": {"--json"},
    "plan": {
        "--cluster", "--model", "--ranks", "--global-batch", "--seq", "--memory", "--path", "--dtype", "--lossless",
        "--output", "--chart", "--json",
    },
    "probe": {"--output", "--workers", "--levels", "--path", "--dtype", "--quick", "--json"},
    "simulate": {
        "--cluster", "--model", "--ranks", "--bandwidth", "--micro-batch", "--accumulate", "--seq", "--dtype", "--flat",
        "--output", "--trace", "--json",
    },
    "train": {
        "--model", "--data", "--plan", "--nvme", "--levels", "--workers", "--steps", "--output", "--set", "--print-config",
        "--json",
    },
    "verify": {
        "--plan", "--nvme", "--model", "--levels", "--workers", "--steps", "--dtype", "--global-batch", "--accumulation",
        "--seq", "--clip", "--lr", "--seed", "--tolerance", "--json",
    },
}  # fmt: skip


def test_names_of_the_package():
    assert set(shardwise.__all__) == NAMES
    for name in NAMES:
        assert getattr(shardwise, name) is not None


def test_options_of_the_command_line():
    found = {
        name: {option for p in command.params for option in p.opts if option.startswith("--")}
        - COMMON
        for name, command in _commands(typer.main.get_command(app))
    }
    assert found == OPTIONS


def _commands(group, path=()):
    """All commands below a group, by their full names."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command
