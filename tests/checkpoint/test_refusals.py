"""What cannot be saved or loaded is refused in one sentence, and what is missing is named."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardwise as sw
from shardwise.cli.main import app
from tests.harness import Workers


def run_of(width: int = 4, bias: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width, bias=bias), nn.Linear(width, 2))
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()), plan="zero3")
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(action) -> str:
    with pytest.raises(sw.UsageError) as caught:
        action()
    return str(caught.value)


def bad_values(root: str) -> None:
    model, optimizer = run_of()
    path = Path(root) / "a"
    for number in ("3", 3.5, -1, True, torch.tensor(1.5)):
        message = refused(lambda number=number: sw.save(path, model, optimizer, step=number))
        assert "is not a number of steps" in message, message
    for number in (np.int64(3), torch.tensor(3)):
        sw.save(path, model, optimizer, step=number)
        found = sw.load(path, model, optimizer).step
        assert found == 3
        assert type(found) is int
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for call in (sw.save, sw.load):
        message = refused(lambda call=call: call(path, model, scheduler))
        assert "A StepLR was given as the optimizer" in message, message
        message = refused(lambda call=call: call(path, model, optimizer, scheduler=5))
        assert "scheduler=5 has no state_dict" in message, message
    endless: dict = {}
    endless["a"] = [endless]
    message = refused(lambda: sw.save(path, model, optimizer, extra=endless))
    assert message.startswith("extra contains itself"), message
    message = refused(lambda: sw.save("/", model, optimizer))
    assert "cannot be the name of a checkpoint" in message, message


def without_index(root: str) -> None:
    """A checkpoint whose index was lost is not taken for one of another program."""
    model, optimizer = run_of()
    for number in (1, 2):
        sw.save(Path(root) / f"step-{number}", model, optimizer, step=number)
    weights = {name: value.clone() for name, value in full(model).items()}
    (Path(root) / "step-2" / "shardwise.json").unlink()
    step(model, optimizer)
    message = refused(lambda: sw.load(root, model, optimizer))
    assert "is damaged: its file 'shardwise.json' is missing" in message, message
    assert f"The checkpoint before it is '{Path(root) / 'step-1'}'" in message
    assert "may have values of this one" not in message  # nothing was read
    done = CliRunner().invoke(app, ["import", f"{root}/step-2", f"{root}/of-others/a"])
    assert done.exit_code == 0, (done.output, done.exception)
    sw.load(f"{root}/of-others/a", model, optimizer)
    for name, value in full(model).items():
        assert torch.equal(value, weights[name]), name


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    with sw.full_params(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def others(root: str) -> None:
    """Of another model only a few names are listed; with strict=False states are loaded as well."""
    model, optimizer = run_of()
    path = Path(root) / "step-1"
    sw.save(path, model, optimizer, step=1)
    deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))
    deep, its_optimizer = sw.shard(deep, torch.optim.AdamW(deep.parameters()), plan="zero3")
    message = refused(lambda: sw.load(path, deep, its_optimizer))
    assert "missing in it: " in message
    assert "and 66 more" in message, message
    assert len(message) < 1500, message
    for bias in (True, False):
        one, other = (run_of(bias=b) for b in (bias, not bias))
        sw.save(path, *one, step=1)
        assert "'0.bias'" in refused(lambda other=other: sw.load(path, *other))
        found = sw.load(path, *other, strict=False)
        assert (found.unexpected, found.missing) == (
            (("0.bias",), ()) if bias else ((), ("0.bias",))
        )
        states = [g[1].state[g[0][0].weight] for g in (one, other)]
        assert torch.equal(states[0]["exp_avg"], states[1]["exp_avg"])
        step(*other)


class TestRefusals:
    def test_values(self, one: Workers, tmp_path: Path) -> None:
        one.run(bad_values, str(tmp_path))

    def test_a_lost_index(self, one: Workers, tmp_path: Path) -> None:
        one.run(without_index, str(tmp_path))

    def test_another_model(self, one: Workers, tmp_path: Path) -> None:
        one.run(others, str(tmp_path))


def save_one(root: str) -> None:
    sw.save(Path(root) / "step-1", *run_of(), step=1)


class TestCommands:
    def test_what_is_missing_is_named(self, one: Workers, tmp_path: Path) -> None:
        one.run(save_one, str(tmp_path))
        whole, no_index, no_data = (tmp_path / name for name in ("step-1", "b", "c"))
        shutil.copytree(whole, no_index)
        shutil.copytree(whole, no_data)
        (no_index / "shardwise.json").unlink()
        (no_data / "__0_0.distcp").unlink()
        empty, absent = tmp_path / "empty", tmp_path / "absent"
        empty.mkdir()
        for path, sentence in (
            (no_index, "has no 'shardwise.json'"),
            (no_data, "is damaged: its file '__0_0.distcp' is missing"),
            (empty, "has no checkpoint and no safetensors files"),
            (absent, "There is no file or folder"),
        ):
            done = CliRunner().invoke(app, ["inspect", str(path)])
            assert isinstance(done.exception, sw.UsageError)
            assert sentence in str(done.exception)
        done = CliRunner().invoke(app, ["inspect", str(absent), "--verify"])
        assert "There is no file or folder" in str(done.exception)
        done = CliRunner().invoke(app, ["export", str(no_index), str(tmp_path / "out")])
        assert "'shardwise import' makes a checkpoint of it" in str(done.exception)

    def test_doctor_of_a_run_without_failures(self, tmp_path: Path) -> None:
        (tmp_path / "config.toml").touch()
        (tmp_path / "plan.toml").touch()
        done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
        assert done.output == f"No failure was reported in {tmp_path}.\n"
        done = CliRunner().invoke(app, ["doctor", str(tmp_path / "absent")])
        assert "is not a folder; give a run's" in str(done.exception)
