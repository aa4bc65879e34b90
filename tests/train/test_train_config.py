"""The job file: defaults that work, strict keys, errors that name file and key."""

from pathlib import Path

import pytest

from shardwise.train.config import ConfigError, TrainConfig, load_config, parse_assignment


def load_text(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_everything_has_a_default(tmp_path: Path) -> None:
    assert load_text(tmp_path, "") == TrainConfig() == load_config(None)
    TrainConfig().batching(TrainConfig().workers)
    assert TrainConfig().plan == "auto"  # with no argument it plans for this machine


def test_toml_round_trip(tmp_path: Path) -> None:
    changes = {"plan": "zero2", "train.steps": 3, "model.width": 64, "optim.betas": [0.8, 0.9]}
    config = load_config(None, changes)
    assert load_text(tmp_path, config.to_toml()) == config
    assert config.optim.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 1", "unknown key 'stepps'"),
        ("[train]\nstep = 1", "unknown key 'train.step'; did you mean 'steps'?"),
        ("[train]\nlr = 1", "unknown key 'train.lr'; did you mean 'optim.lr'?"),
        ("[train]\nsteps = 0", "train.steps should be greater than 0, not 0"),
        ("[optim]\nlr = 'fast'", "optim.lr should be a valid number"),
        ("[model]\ndtype = 'float8'", "model.dtype should be 'float32', 'float64' or 'bfloat16'"),
        ("train = 3", "train "),
        ("[train", "is not TOML"),
    ],
)
def test_mistakes_name_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)
    assert "job.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_mistake_is_told_on_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "plann = 'x'\n[train]\nsteps = -1")
    assert len(str(caught.value).splitlines()) == 2


def test_mistakes_on_the_command_line_name_it() -> None:
    with pytest.raises(ConfigError, match=r"command line: train\.steps"):
        load_config(None, {"train.steps": 0})
    with pytest.raises(ConfigError, match="not a table"):
        load_config(None, {"plan": "zero3", "plan.x": 1})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no file nowhere\.toml"):
        load_config("nowhere.toml")


def test_assignments_are_toml_or_plain_text() -> None:
    assert parse_assignment("optim.lr=1e-4") == ("optim.lr", 1e-4)
    assert parse_assignment("optim.betas = [0.9, 0.99]") == ("optim.betas", [0.9, 0.99])
    assert parse_assignment("plan=zero2") == ("plan", "zero2")
    for bad in ("plan", "=3", "plan="):
        with pytest.raises(ConfigError, match="key=value"):
            parse_assignment(bad)


@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        ({"global_batch": 16}, 2, (8, 1)),
        ({"global_batch": 16, "micro_batch": 2}, 2, (2, 4)),
        ({"global_batch": 16, "accumulation": 4}, 2, (2, 4)),
        ({"global_batch": 16, "micro_batch": 4, "accumulation": 2}, 2, (4, 2)),
        ({"global_batch": 16, "micro_batch": 3}, 2, None),
        ({"global_batch": 16, "micro_batch": 4, "accumulation": 3}, 2, None),
        ({"global_batch": 2}, 4, None),
    ],
)
def test_the_global_batch_is_cut_or_refused(
    options: dict[str, int], world: int, expected: tuple[int, int] | None
) -> None:
    config = load_config(None, {f"train.{key}": value for key, value in options.items()})
    if expected is not None:
        assert config.batching(world) == expected
    else:
        with pytest.raises(ConfigError, match="cannot be divided"):
            config.batching(world)
