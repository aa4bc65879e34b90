"""Saving and loading beside fio on the same disk, and beside DCP with FSDP2 on the same model.

    python benchmarks/checkpoint.py --folder /mnt/fast/scratch [--layers 12] [--width 1536]

Two ranks, float32, AdamW. Contenders take turns in the same processes; figures are medians over
rounds, in MB of weights and states per second. Files are dropped from the page cache before a load.
Also: how long an asynchronous save holds up the program, and what a step takes while it is written.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

Model = tuple[nn.Module, torch.optim.Optimizer]


def build(width: int, layers: int) -> Model:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, rows: int) -> None:
    model(torch.randn(rows, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(action: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def fio(folder: Path, mode: str, nbytes: int) -> float:
    """Seconds that fio takes for so many bytes, with direct I/O and large blocks on two jobs."""
    command = ["fio", "--name=x", f"--directory={folder}", f"--rw={mode}", "--bs=4M", "--direct=1",
               "--ioengine=libaio", "--iodepth=4", "--numjobs=2", f"--size={nbytes // 2}",
               "--end_fsync=1", "--group_reporting", "--output-format=json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    side = json.loads(done.stdout)["jobs"][0][mode]
    return nbytes / (side["bw_bytes"] or 1)


def worker(options: argparse.Namespace) -> None:
    from torch.distributed.fsdp import fully_shard

    import shardwise as sw

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder, width = Path(options.folder) / "checkpoint-benchmark", options.width
    first = dist.get_rank() == 0
    model, optimizer = build(width, options.layers)
    nbytes = 12 * sum(p.numel() for p in model.parameters())
    sw.shard(model, optimizer, "zero3")
    other, _ = build(width, options.layers)
    for layer in other:
        fully_shard(layer)
    fully_shard(other)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-4)
    for each in ((model, optimizer), (other, other_optimizer)):
        step(*each, width, 8)
    state = {
        "model": get_model_state_dict(other),
        "optim": get_optimizer_state_dict(other, other_optimizer),
    }
    seconds: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(timed(action))

    begun: list[sw.Pending] = []

    def begin() -> None:
        begun.append(sw.save(folder / "beside", model, optimizer, asynchronous=True))

    for _ in range(options.rounds):
        if first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if shutil.which("fio"):
                seconds.setdefault("fio write", []).append(fio(folder, "write", nbytes))
                seconds.setdefault("fio read", []).append(fio(folder, "read", nbytes))
        note("save", lambda: sw.save(folder / "ours", model, optimizer))
        note("save DCP", lambda: dcp.save(state, checkpoint_id=str(folder / "dcp")))
        if first:
            drop_from_cache(folder)
        note("load", lambda: sw.load(folder / "ours", model, optimizer))
        note("load DCP", lambda: dcp.load(state, checkpoint_id=str(folder / "dcp")))
        for _ in range(3):
            note("step", lambda: step(model, optimizer, width, options.rows))
        note("stall", begin)
        note("step beside", lambda: step(model, optimizer, width, options.rows))
        begun.pop().wait()
    if first:
        shutil.rmtree(folder)
        report({name: statistics.median(found) for name, found in seconds.items()}, nbytes)
    dist.barrier()
    dist.destroy_process_group()


def report(seconds: dict[str, float], nbytes: int) -> None:
    rates = {
        name: nbytes / seconds[name] / 1e6
        for name in ("save", "save DCP", "fio write", "load", "load DCP", "fio read")
        if name in seconds
    }
    for name, rate in rates.items():
        print(f"{name:10s} {rate:8.0f} MB/s   {seconds[name]:.3f} s")
    for ours, theirs in (("save", "save DCP"), ("load", "load DCP"), ("save", "fio write"),
                         ("load", "fio read")):  # fmt: skip
        if theirs in rates:
            print(f"{ours} / {theirs}: {rates[ours] / rates[theirs]:.2f}")
    print(f"an asynchronous save returns after {seconds['stall'] / seconds['save']:.3f} of a save")
    print(f"a step beside it takes {seconds['step beside'] / seconds['step']:.2f} x as long")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options)
    else:
        import sys

        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *sys.argv]
        raise SystemExit(subprocess.call(command))
