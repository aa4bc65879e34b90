"""A run of the trainer is saved, killed, resumed, shown and exported."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

import shardwise as sw
from shardwise.checkpoint.training import place
from shardwise.checkpoint.training.read import Reader
from shardwise.cli.main import app
from shardwise.train.config import ConfigError, load_config
from shardwise.train.loop import train_worker
from shardwise.train.run import prepare_output
from tests.harness import Workers, free_port

ARGUMENTS = ["--model", "gpt-tiny", "--plan", "zero1", "--set", "train.seq=32", "--set",
             "train.global_batch=4", "--save-every", "2"]  # fmt: skip


def start(output: Path, steps: int, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "shardwise", "train", *ARGUMENTS, "--steps", str(steps),
               "--output", str(output), "--workers", "2", "--json", *more]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> str:
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors[-3000:]
    return out


def losses(output: Path) -> dict[int, float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of 8 steps without a break."""
    output = tmp_path_factory.mktemp("whole") / "run"
    finished(start(output, 8))
    return output


def test_the_newest_are_kept(whole: Path) -> None:
    names = [path.name for path in place.series(whole / "checkpoints")]
    assert names == ["step-4", "step-6", "step-8"]
    assert (whole / "checkpoints" / "latest").read_text() == "step-8\n"
    assert len(losses(whole)) == 8


def test_a_killed_run_goes_on_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start(output, 8, "--resume", "latest")  # nothing to resume yet: from the beginning
    deadline = time.monotonic() + 100
    while not (output / "checkpoints" / "step-2").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)  # workers end with it
    process.communicate()
    time.sleep(0.5)
    latest = place.find(output / "checkpoints")
    done = int(latest.name.removeprefix("step-"))
    assert done < 8
    damaged = output / "checkpoints" / f"step-{done + 100}"
    shutil.copytree(latest, damaged)  # the newest one is damaged, and is passed over
    os.truncate(damaged / "__1_0.distcp", 1000)
    place.point(damaged)
    finished(start(output, 8, "--resume", "latest"))
    assert losses(output) == losses(whole)


def test_restarted_by_torchrun_on_other_ranks(whole: Path, tmp_path: Path) -> None:
    """Its worker is killed, and started again: the same data, and the same losses but for rounding."""
    output = tmp_path / "run"
    shutil.copytree(whole / "checkpoints/step-4", output / "checkpoints/step-4")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1",
               "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m",
               "shardwise", "train", *ARGUMENTS, "--steps", "8", "--output", str(output), "--resume",
               "latest"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (output / "checkpoints" / "step-6").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (worker,) = psutil.Process(process.pid).children()
    worker.kill()
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors[-3000:]
    assert "note: The checkpoint has the random states of 2 ranks" in errors
    found, expected = losses(output), losses(whole)
    assert found.keys() == {5, 6, 7, 8}
    assert all(abs(loss - expected[step]) < 2e-4 for step, loss in found.items()), (found, expected)


def test_the_newest_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("b", "a")):
        folder = tmp_path / "runs" / name / "checkpoints" / "step-1"
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    assert prepare_output(load_config(None, {"resume": "latest"})) == Path("runs/a")
    assert prepare_output(load_config(None, {"resume": "x"})).parent == Path("runs")
    (tmp_path / "runs/a/metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="--resume latest"):
        prepare_output(load_config(None, {"output": "runs/a"}))


def test_a_restart_never_takes_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts a job anew that was refused because its directory holds another run."""
    monkeypatch.chdir(tmp_path)
    old, new = (load_config(None, {"train.steps": n, "output": "runs/a"}) for n in (10, 20))
    folder = prepare_output(old)
    (folder / "metrics.jsonl").write_text("")
    again = {"resume": "latest"}
    for resume in (again, {}):
        with pytest.raises(ConfigError, match="already holds a run"):
            prepare_output(new.model_copy(update=resume), restarted=bool(resume))
        prepare_output(old.model_copy(update=again), restarted=True)
    first = prepare_output(load_config(None, {"train.steps": 30}))
    (tmp_path / "runs/b/checkpoints/step-1").mkdir(parents=True)  # newer, but no run of this job
    assert prepare_output(load_config(None, {"train.steps": 30, **again}), restarted=True) == first


def train_apart(root: str) -> None:
    options = {"model.name": "gpt-tiny", "plan": "zero1", "train.steps": 2, "train.save_every": 1,
               "train.seq": 16, "train.global_batch": 2, "train.eval_batches": 1}  # fmt: skip
    output = Path(root) / str(dist.get_rank())  # ranks whose clocks differ
    output.mkdir()
    train_worker(load_config(None, options).model_dump(mode="json"), str(output))
    dist.barrier()


def test_all_ranks_use_one_directory(two: Workers, tmp_path: Path) -> None:
    two.run(train_apart, str(tmp_path))
    assert (tmp_path / "0/checkpoints/step-2/__1_0.distcp").is_file()
    assert not list((tmp_path / "1").iterdir())


def test_inspect(whole: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(whole / "checkpoints"), "--verify"])
    assert shown.exit_code == 0, shown.output
    for word in (
        "step 8",
        "optimizer states",
        "weights",
        "2 rank(s)",
        'name = "zero1"',
        "Every byte",
    ):
        assert word in shown.output, shown.output
    answer = CliRunner().invoke(
        app, ["inspect", str(whole / "checkpoints/step-6"), "--verify", "--json"]
    )
    found = json.loads(answer.output)
    assert (found["step"], found["world"], found["faults"]) == (6, 2, [])
    assert found["contents"]["optimizer states"]["elements"] > 0


def test_inspect_names_damage(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "checkpoints", tmp_path / "c")
    file = tmp_path / "c/step-8/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "c"), "--verify"])
    assert result.exit_code == 1
    assert "is damaged between bytes" in result.output
    assert f"The checkpoint before it is '{tmp_path / 'c/step-6'}'" in result.output


def test_export(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    arguments = [
        "export",
        str(whole / "checkpoints"),
        str(out),
        "--max-file-size",
        "200 kB",
        "--json",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    answer = json.loads(done.output)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == answer["files"] > 1
    found = {name: value for file in files for name, value in load_file(file).items()}
    with Reader(whole / "checkpoints/step-8") as reader:
        names = [n for n in reader.index.tensors if n.startswith("model.")]
        assert {f"model.{name}" for name in found} == set(names)
        for name in names:
            assert torch.equal(found[name.removeprefix("model.")], reader.whole(name))
    half = tmp_path / "half"
    CliRunner().invoke(
        app, ["export", str(whole / "checkpoints"), str(half), "--dtype", "bfloat16"]
    )
    (file,) = half.glob("*.safetensors")
    for name, value in load_file(file).items():
        assert torch.equal(value, found[name].bfloat16())
    refused = CliRunner().invoke(app, ["export", str(whole / "checkpoints"), str(out)])
    assert isinstance(refused.exception, sw.UsageError)
    assert "is not empty" in str(refused.exception)
    refused = CliRunner().invoke(app, ["export", str(tmp_path / "no"), str(out)])
    assert "There is no checkpoint" in str(refused.exception)
