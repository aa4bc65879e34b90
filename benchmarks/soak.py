"""The soak: random faults at random instants over random plans, until nothing may be lost.

    python benchmarks/soak.py [--faults 200] [--minutes 60] [--seed 0] [-o FILE]

`shardwise train --max-restarts` trains a tiny model; meanwhile one of its ranks is killed or
stopped, in a step, in a save or in a write to a tier, its launcher is killed (and started again
with `--resume latest`), or the disk of its checkpoints is full for a while (as root). After each
run every loss must be bit-identical to an undisturbed run of the same plan, and every checkpoint
whole: a damaged one, or another loss, is an error at once. Ends when so many faults have struck, or
the time is over, and prints a table.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shardwise.checkpoint.training.place import is_checkpoint
from shardwise.checkpoint.training.verify import faults as damages

ROOT = Path(__file__).parents[1]
PLANS = ("zero1", "zero2", "zero3", "ddp", "amsp", "zeropp", "lean", "infinity")
STEPS, SAVE_EVERY, PER_RUN = 60, 3, 4
TIMEOUT_S = 6.0
LIMIT_S = 600.0
"""A run that takes longer than this hangs."""
DISK_BYTES = 24 << 20


@dataclass
class Soak:
    """What has happened so far."""

    folder: Path
    chance: random.Random
    kinds: list[str]
    struck: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    checkpoints: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Of an undisturbed run of each plan."""

    def command(self, plan: str, output: Path, *more: str) -> list[str]:
        job = ["--plan", plan, "--nvme", str(self.folder / "tier"), "--model", "gpt-tiny"]
        job += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--output", str(output)]
        settings = ["model.num_layers=2", "model.width=32", "model.num_heads=2", "train.seq=16"]
        settings += [f"timeout_s={TIMEOUT_S}"]
        for setting in settings:
            job += ["--set", setting]
        return [sys.executable, "-m", "shardwise", "train", *job, *more]

    def start(self, plan: str, output: Path, *more: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = self.command(plan, output, *more)
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def reference(self, plan: str) -> list[float]:
        if plan not in self.losses:
            output = self.folder / f"reference-{plan}"
            if self.start(plan, output).wait(LIMIT_S):
                raise SystemExit(f"the undisturbed run of {plan} failed; see {self.folder / 'log'}")
            self.losses[plan] = losses(output)
        return self.losses[plan]

    def run(self, plan: str) -> None:
        """One run with several faults, and what must hold afterwards."""
        expected = self.reference(plan)
        output = self.folder / f"run-{self.runs}"
        output.mkdir()
        disk = Disk(output / "checkpoints") if "disk" in self.kinds else None
        launcher = self.start(plan, output, "--max-restarts", "1000")
        try:
            for _ in range(PER_RUN):
                launcher = self.strike(self.chance.choice(self.kinds), plan, output, launcher, disk)
            code = launcher.wait(LIMIT_S)
            if code:
                raise SystemExit(f"a run of {plan} ended with code {code}; see {self.folder}/log")
            if losses(output) != expected:
                raise SystemExit(f"a run of {plan} has other losses than undisturbed: {output}")
            for path in sorted((output / "checkpoints").iterdir()):
                if path.name.startswith(".") or not path.is_dir():
                    continue
                if not is_checkpoint(path) or damages(path):
                    raise SystemExit(f"checkpoint {path} is damaged")
                self.checkpoints += 1
        finally:
            launcher.kill()
            launcher.wait()
            if disk is not None:
                disk.close()
        self.runs += 1
        shutil.rmtree(output)

    def strike(
        self, kind: str, plan: str, output: Path, launcher: subprocess.Popen[bytes],
        disk: "Disk | None",
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """One fault at a random instant; returns the launcher, which may be a new one."""
        before = len(losses(output))
        target = before + self.chance.randrange(1, STEPS // (PER_RUN + 1))
        wait_until(lambda: len(losses(output)) >= target or launcher.poll() is not None)
        if kind.endswith("in a save"):
            saving = output / "checkpoints"
            wait_until(lambda: any(saving.glob(".*.partial")) or launcher.poll() is not None)
        time.sleep(self.chance.uniform(0, 0.02))
        if launcher.poll() is not None:  # it was faster than the fault
            return launcher
        if kind == "disk":
            assert disk is not None
            disk.fill()
            wait_until(lambda: launcher.poll() is not None)
            disk.drain()
            launcher = self.start(plan, output, "--max-restarts", "1000", "--resume", "latest")
        elif kind == "launcher killed":
            workers = psutil.Process(launcher.pid).children()
            launcher.kill()
            launcher.wait()
            psutil.wait_procs(workers, timeout=60)
            launcher = self.start(plan, output, "--max-restarts", "1000", "--resume", "latest")
        else:
            number = signal.SIGSTOP if kind.startswith("stopped") else signal.SIGKILL
            with suppress(psutil.NoSuchProcess, IndexError):
                workers = psutil.Process(launcher.pid).children()
                self.chance.choice(workers).send_signal(number)
                _, alive = psutil.wait_procs(workers, timeout=10 * TIMEOUT_S)
                if alive:
                    raise SystemExit(f"{len(alive)} ranks did not end after: {kind}")
        self.struck[kind] += 1
        return launcher


class Disk:
    """A small file system in memory for checkpoints, which can be full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        size = f"size={DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(folder)], check=True)

    def fill(self) -> None:
        with suppress(OSError), (self.folder / ".ballast").open("wb") as ballast:
            while True:
                ballast.write(bytes(4096))
                ballast.flush()

    def drain(self) -> None:
        (self.folder / ".ballast").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


def losses(output: Path) -> list[float]:
    """What the run has written by now, whole lines only."""
    try:
        text = (output / "metrics.jsonl").read_text()
        return [json.loads(line)["loss"] for line in text[: text.rfind("\n") + 1].splitlines()]
    except OSError:
        return []


def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"a run hangs: nothing happened for {LIMIT_S:.0f} s")
        time.sleep(0.002)


KINDS = ["killed", "stopped", "killed in a save", "stopped in a save", "launcher killed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    kinds = KINDS + (["disk"] if os.geteuid() == 0 else [])
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwise-soak-") as name:
        soak = Soak(Path(name), random.Random(given.seed), kinds)
        (Path(name) / "tier").mkdir()
        plans: list[str] = []
        while soak.struck.total() < given.faults:
            if time.monotonic() - began > 60 * given.minutes:
                break
            plans = plans or soak.chance.sample(PLANS, len(PLANS))
            try:
                soak.run(plans.pop())
            except BaseException:
                sys.stderr.write((Path(name) / "log").read_text()[-4000:])
                raise
            minutes = (time.monotonic() - began) / 60
            print(
                f"{minutes:5.1f} min: {soak.struck.total()} faults in {soak.runs} runs", flush=True
            )
    print("\n| fault | times |\n|---|---|")
    for kind, times in sorted(soak.struck.items()):
        print(f"| {kind} | {times} |")
    print(f"\n{soak.runs} runs of {len(soak.losses)} plans: all losses are bit-identical, and all")
    print(f"{soak.checkpoints} checkpoints whole.")
    if given.output is not None:
        table = {"faults": soak.struck, "runs": soak.runs, "checkpoints": soak.checkpoints}
        given.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
