"""`shardwise train --max-restarts`: killed, stopped and preempted, and still the same losses."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardwise.cli.main import run as shardwise

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
STEPS = 50_000  # more than even a quick machine takes while the other run is disturbed
COMPARED = 12
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def command(output: Path, *more: str) -> list[str]:
    job = ["--plan", "zero3", "--model", "gpt-tiny", "--steps", str(STEPS), "--save-every", "3"]
    for setting in ("model.num_layers=1", "model.width=32", "model.num_heads=2", "train.seq=16"):
        job += ["--set", setting]
    job += ["--set", "timeout_s=3", "--output", str(output), *more]
    return [sys.executable, "-m", "shardwise", "train", *job]


def start(output: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command(output, *more), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip


def losses(output: Path) -> list[float]:
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]
    except (OSError, ValueError):  # not there yet, or not the whole line
        return []


def wait_for_steps(output: Path, launcher: subprocess.Popen[str], number: int) -> None:
    deadline = time.monotonic() + 120
    while len(losses(output)) < number and launcher.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_goes_on_from_its_checkpoints_with_the_same_losses(tmp_path: Path) -> None:
    plain, faulty = tmp_path / "plain", tmp_path / "faulty"
    undisturbed = start(plain)
    launcher = start(faulty, "--max-restarts", "2")
    resumed = None
    try:
        for number, how in ((5, "kill"), (11, "stop")):
            wait_for_steps(faulty, launcher, number)
            workers = psutil.Process(launcher.pid).children()
            random.choice(workers).send_signal(SIGNALS[how])
            _, alive = psutil.wait_procs(workers, timeout=30)
            assert not alive
        wait_for_steps(faulty, launcher, 16)
        launcher.send_signal(signal.SIGTERM)
        said = launcher.communicate(timeout=60)[1]
        assert launcher.returncode == 0, said
        done = len(losses(faulty))
        resumed = start(faulty, "--resume", "latest", "--set", "preempted_code=75")
        for run, launched in ((faulty, resumed), (plain, undisturbed)):
            wait_for_steps(run, launched, done + COMPARED)
            launched.send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=60)[1] for process in (resumed, undisturbed)]
    finally:
        for process in (launcher, undisturbed, *([resumed] if resumed else [])):
            process.kill()
    assert "was killed (SIGKILL)" in said
    assert " is stopped (SIGSTOP, or a debugger)" in said
    assert [line for line in said.splitlines() if line.startswith("restart ")] == [
        f"restart {n} of 2, from the last checkpoint" for n in (1, 2)
    ]
    assert len(list(faulty.glob("failure-*/report.json"))) == 2
    assert [resumed.returncode, undisturbed.returncode] == [75, 0], told
    assert all("preempted: saved " in text for text in (said, *told))
    assert 16 <= done < STEPS
    assert len(losses(faulty)) >= done + COMPARED
    common = min(len(losses(faulty)), len(losses(plain)))
    assert losses(faulty)[:common] == losses(plain)[:common]


def test_restarts_need_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise(["train", "--max-restarts", "1", "--output", str(tmp_path / "run")]) == 2
    assert "max_restarts = 1 needs checkpoints to go on from" in capsys.readouterr().err
