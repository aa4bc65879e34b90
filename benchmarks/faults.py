"""How long it takes from a fault to the report, and until all ranks have ended: one table.

    python benchmarks/faults.py [--timeout 60] [--repeats 3] [--kinds killed,stopped,...] [-o FILE]

Each fault hits ranks that train a small model, at a random moment. ``cut link`` needs root: two
network namespaces, whose link is taken down. ``full disk`` saves to a small file system in memory,
which needs root as well. ``recorder`` is not a fault: what the flight recorder costs a step.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from shardwise.bench.cluster import Cluster

ROOT = Path(__file__).parents[1]
RANKS = 2


def worker() -> None:
    """One rank: trains until something happens; says when each step is done."""
    import torch
    import torch.distributed as dist

    import shardwise as sw

    torch.set_num_threads(1)
    folder, timeout_s, how = Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    sw.shard(model, optimizer, "zero3", timeout_s=timeout_s, patience_s=600, run=folder / "run")
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    step = 0
    while True:
        model(torch.randn(8, 256)).square().mean().backward()
        if how == "exception" and rank == 1 and (folder / "strike").exists():
            (folder / "struck").write_text(str(time.time()))
            raise ZeroDivisionError("a fault on purpose")
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if how == "full disk" and (folder / "strike").exists():
            (folder / "struck").touch()
            if not (folder / "struck").read_text():
                (folder / "struck").write_text(str(time.time()))
            sw.save(folder / "disk" / f"step-{step}", model, optimizer, step=step)
        (folder / f"steps-{rank}").write_text(str(step))


def torchrun(folder: Path, timeout_s: float, how: str, *node: str) -> list[str]:
    here = str(Path(__file__).resolve())
    arguments = ["-m", "torch.distributed.run", *node, here, "worker"]
    return [sys.executable, *arguments, str(folder), str(timeout_s), how]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def wait(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} took more than {limit_s:.0f} s")
        time.sleep(0.01)


def measure(kind: str, timeout_s: float) -> tuple[float, float, str]:
    """Seconds from the fault to the report, until all ranks have ended, and what was reported."""
    with tempfile.TemporaryDirectory() as name, started(kind, Path(name), timeout_s) as strike:
        folder = Path(name)
        reports = (folder / "run").glob
        wait(lambda: len(list(folder.glob("steps-*"))) == RANKS, 300, "the start")
        time.sleep(random.uniform(0.2, 1.0))
        pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(RANKS)]
        processes = [psutil.Process(pid) for pid in pids]
        begin = strike(pids)
        if kind == "full disk":  # all ranks raise the same, so that no rank is to blame
            psutil.wait_procs(processes, timeout=3 * timeout_s + 60)
            begin, ended = float((folder / "struck").read_text()), time.time()
            said = [line for line in (folder / "log").read_text().splitlines() if "space" in line]
            return ended - begin, ended - begin, said[-1].partition("Error: ")[2]
        wait(lambda: bool(list(reports("failure-*/report.json"))), 3 * timeout_s + 60, "the report")
        (report,) = reports("failure-*/report.json")
        told = report.stat().st_mtime
        _, alive = psutil.wait_procs(processes, timeout=3 * timeout_s + 60)
        if alive:
            raise SystemExit(f"{kind}: {len(alive)} ranks have not ended")
        ended = time.time()
        begin = begin or float((folder / "struck").read_text())
        return told - begin, ended - begin, json.loads(report.read_text())["sentence"]


Strike = Callable[[list[int]], float]


@contextmanager
def started(kind: str, folder: Path, timeout_s: float) -> Iterator[Strike]:
    """Ranks that train, and what makes one of them fail; it returns when, or 0 if that is noted."""
    if kind == "cut link":
        with Cluster(2) as cluster:
            for node in range(2):
                rendezvous = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
                rendezvous += [f"--master-addr={cluster.address(0)}", "--master-port=29555"]
                line = torchrun(folder, timeout_s, kind, *rendezvous)
                named = {**environment(), "GLOO_SOCKET_IFNAME": "slow0"}
                cluster.start(node, line, named, subprocess.DEVNULL)

            def cut(_: list[int]) -> float:
                cluster.cut(1)
                return time.time()

            yield cut
        return
    with mounted(folder / "disk") if kind == "full disk" else nothing():
        line = torchrun(folder, timeout_s, kind, f"--nproc-per-node={RANKS}")
        with (folder / "log").open("wb") as log:
            launcher = subprocess.Popen(line, env=environment(), stdout=log, stderr=log)

        def send(pids: list[int]) -> float:
            if kind in ("killed", "stopped"):
                number = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
                os.kill(random.choice(pids), number)
                return time.time()
            (folder / "strike").touch()
            return 0.0

        try:
            yield send
        finally:
            launcher.terminate()
            launcher.wait(60)


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """A file system that is soon full."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def nothing() -> Iterator[None]:
    yield


KINDS = ("killed", "stopped", "exception", "cut link", "full disk")


def recorder() -> None:
    """What the flight recorder costs a small step on one rank, with and without it in turns."""
    import torch

    import shardwise as sw
    from shardwise.core.flight import RECORDER, SIZE, read

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    sw.shard(model, optimizer, replace(sw.presets.zero3(), min_unit_numel=1))

    def step() -> None:
        model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert len(RECORDER.snapshot()) == SIZE
    write, times = RECORDER.write, {"with": [], "without": []}
    for turn in range(400):
        how = ("with", "without")[turn % 2]
        RECORDER.write = write if how == "with" else lambda *_: time.perf_counter()
        begin = time.perf_counter()
        step()
        times[how].append(time.perf_counter() - begin)
    RECORDER.write = write
    begin = time.perf_counter()
    for _ in range(100_000):
        RECORDER.begin("gather", "blocks.1")
    record_s = (time.perf_counter() - begin) / 100_000
    before = time.perf_counter()
    step()
    records = sum(event.at_s >= before for event in read(RECORDER.snapshot()).events)
    step_s = statistics.median(times["without"])
    print(
        f"flight recorder: {records} records of {record_s * 1e6:.2f} µs a step of "
        f"{step_s * 1e3:.2f} ms, {records * record_s / step_s:.2%}; measured in turns: "
        f"{statistics.median(times['with']) / step_s - 1:+.2%}"
    )


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    rows = []
    recorder()
    print(f"timeout_s = {given.timeout:g}; medians of {given.repeats}")
    print("| fault | s to the report | s until all have ended | what it says |\n|---|---|---|---|")
    for kind in given.kinds.split(","):
        found = [measure(kind, given.timeout) for _ in range(given.repeats)]
        report_s, end_s = (statistics.median(row[i] for row in found) for i in (0, 1))
        print(f"| {kind} | {report_s:.1f} | {end_s:.1f} | {found[-1][2]} |", flush=True)
        rows.append({"kind": kind, "report_s": report_s, "end_s": end_s, "runs": found})
    if given.output is not None:
        table = {"timeout_s": given.timeout, "repeats": given.repeats, "rows": rows}
        given.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
