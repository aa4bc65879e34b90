"""The command: its surface, its errors, how it ends, and that it starts quickly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import run
from tests.train.processes import children_of, is_alive, wait_for

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
SMALL = ["--plan", "zero3", "--model", "gpt-tiny"]
SMALL += ["--set", "model.num_layers=1", "--set", "train.seq=16"]


@pytest.fixture
def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "shardwise train" in capsys.readouterr().out
    for command in ("train", "verify", "explain"):
        assert run([command, "--help"]) == 0
        assert f"shardwise {command}" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardwise ")


def test_the_command_line_imports_no_torch(environment: dict[str, str]) -> None:
    check = "import shardwise.cli.main, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--set", "optim.lrr=3"], "unknown key 'optim.lrr'; did you mean 'lr'?"),
        (["train", "--steps", "0"], "train.steps should be greater than 0"),
        (["train", "nowhere.toml"], "there is no file nowhere.toml"),
        (["verify", "--dtype", "bfloat16"], "compares in float64 or float32"),
        (["verify", "--global-batch", "3"], "cannot be divided"),
        (["verify", "--plan", "auto"], "name a preset or a plan's file"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_print_config_is_a_job_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "--plan", "zero2", "--set", "optim.lr=0.5", "--print-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "job.toml").write_text(text)
    assert run(["train", str(tmp_path / "job.toml"), "--print-config"]) == 0
    assert capsys.readouterr().out == text
    assert "lr = 0.5" in text


def test_ctrl_c_stops_everything_in_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    output = tmp_path / "run"
    # Not `-m shardwise`: a shell that runs tests in the background ignores SIGINT, and children
    # inherit that.
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from shardwise.cli.main import main; main()"
    )
    command = [sys.executable, "-c", start, "train", *SMALL, "--steps", "100000"]
    with subprocess.Popen(
        [*command, "--output", str(output)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        metrics = output / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
        children = children_of(launcher.pid)
        os.killpg(launcher.pid, signal.SIGINT)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert len(children) >= 2
    wait_for(lambda: not any(map(is_alive, children)))
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == f"error: interrupted; the run is in {output}"
    assert all(json.loads(line)["loss"] for line in metrics.read_text().splitlines())


def test_under_an_outer_torchrun_it_is_one_of_the_ranks(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["--nproc-per-node", "2", "-m", "shardwise", "train", *SMALL, "--steps", "2"]
    done = subprocess.run(
        [*launcher, *command, "--output", str(tmp_path / "run"), "--json"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert json.loads(done.stdout)["ranks"] == 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
