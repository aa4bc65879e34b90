"""What users can rely on: growth of these sets needs a visible change here."""

import inspect
from collections.abc import Callable, Iterator

import pytest
import typer

import shardwise
from shardwise.cli.main import app

NAMES = {
    "Auto", "BudgetError", "Override", "Pending", "Plan", "PlanError", "Precision", "Resumed", "ShardwiseError", "StatePlan", "SyncError",
    "TierError", "Tiers", "Tiling", "UsageError",
    "clip_grad_norm_", "deferred_init", "export", "find_nonfinite", "full_grads", "full_params", "load", "load_pretrained",
    "no_sync", "optim_state_dict", "plan", "preempted", "presets", "probe", "save", "set_grad_divisor", "shard", "simulate", "state_dict",
    "stats", "trace", "unshard",
}  # fmt: skip
COMMON = {"--help"}
OPTIONS = {
    "bench cluster": {
        "--nodes", "--ranks", "--rate", "--latency", "--model", "--seq", "--dtype", "--steps", "--warmup", "--rounds",
        "--plans", "--peers", "--native-bf16", "--deepspeed-python", "--out", "--json",
    },
    "doctor": {"--clean", "--gpu", "--json", "--model", "--output"},
    "explain": {"--model", "--levels", "--accumulate", "--phase", "--micro-batch", "--seq", "--json"},
    "export": {"--dtype", "--max-file-size", "--overwrite", "--json"},
    "inspect": {"--verify", "--json"},
    "import": {"--json"},
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
        "--model", "--data", "--plan", "--nvme", "--levels", "--workers", "--steps", "--output", "--save-every", "--resume", "--max-restarts",
        "--set", "--print-config", "--json",
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


def _public() -> dict[str, object]:
    """Everything of the package and of the presets that users call, by its full name."""
    found = {name: getattr(shardwise, name) for name in sorted(NAMES)}
    presets = found["presets"]
    return found | {f"presets.{name}": getattr(presets, name) for name in presets.PRESETS}


@pytest.mark.parametrize("name", _public())
def test_every_public_name_is_documented(name):
    said = _public()[name]
    assert said.__doc__, f"{name} has no docstring"
    assert not said.__doc__.startswith(f"{name}("), f"{name}'s docstring is the dataclass's own"
    is_error = isinstance(said, type) and issubclass(said, Exception)
    if not is_error and not name.startswith("presets."):
        assert ">>> " in said.__doc__, f"{name} has no example"  # which runs as a doctest
    for method, function in _functions(said):
        assert function.__doc__, f"{name}.{method} has no docstring"


@pytest.mark.parametrize("name", [name for name in _public() if name != "presets"])
def test_every_public_name_is_annotated(name):
    for method, function in _functions(_public()[name]):
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, f"{name}.{method}"
        for parameter in signature.parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not inspect.Parameter.empty, (
                    f"{name}.{method}({parameter.name})"
                )


def test_shard_has_the_parameters_of_every_plan_only():
    assert list(inspect.signature(shardwise.shard).parameters) == [
        "model", "optimizer", "plan", "levels", "elementwise", "timeout_s", "patience_s", "run", "device",
    ]  # fmt: skip


def _functions(said: object) -> Iterator[tuple[str, Callable]]:
    """A function itself; of a class what it adds for users: methods and properties."""
    if inspect.isfunction(said):
        yield "", said
    if inspect.isclass(said):
        for name, member in vars(said).items():
            function = member.fget if isinstance(member, property) else inspect.unwrap(member)
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, function


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
