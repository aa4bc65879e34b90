"""The optimizer step with states on a disk, beside the time of the disk alone and of memory alone.

    python benchmarks/streaming.py --disk FOLDER

One rank, every state on the disk: the step reads gradients, masters and both moments, and writes
all but the gradients. It takes turns with fio, with the same mix of reads and writes (its best
setting counts), and with the same update in memory. The goal is the larger of these two times.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.model.gpt import GPT, GPTConfig
from shardwise.plans.plan import Plan
from shardwise.runtime.execute import Done

sys.path.insert(0, str(Path(__file__).resolve().parent))

from disk import _Fio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--disk", required=True, help="a folder on a disk")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fio", default="1m:4,4m:4,4m:16", help="block:depth[:threads]")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed; install it (apt-get install fio).")
    streamed, moved_bytes = build(args, sw.presets.infinity(args.disk))
    in_memory, _ = build(args, sw.presets.zero1())
    times: dict[str, list[float]] = {"streamed": [], "in memory": []}
    settings = args.fio.split(",")
    times |= {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(prefix="streaming-", dir=args.disk) as folder:
        file, size = f"{folder}/fio", 1 << 30
        _Fio(settings[0], size, file).run("write")
        for number in range(args.rounds + 1):
            measured = {
                "streamed": _timed(streamed),
                "in memory": _timed(in_memory),
                **{s: moved_bytes / _Fio(s, size, file).run("mixed") for s in settings},
            }
            for name, seconds in measured.items() if number else ():  # the first creates states
                times[name].append(seconds)
    best = min(settings, key=lambda setting: statistics.median(times[setting]))
    ratios = [
        step / max(disk, memory)
        for step, disk, memory in zip(
            times["streamed"], times[best], times["in memory"], strict=True
        )
    ]
    if args.json:
        print(json.dumps({"moved_bytes": moved_bytes, "seconds": times, "ratios": ratios}))
        return
    names = {"streamed": "streamed", "in memory": "in memory", best: f"fio alone, {best}"}
    print(f"{moved_bytes / 1e9:.2f} GB per step, {args.rounds} rounds; median")
    for key, name in names.items():
        print(f"{name:<20}{statistics.median(times[key]):8.2f} s")
    print(f"streamed / the larger of the others: {statistics.median(ratios):.2f}")


def build(args: argparse.Namespace, plan: Plan) -> tuple[Callable[[], None], int]:
    """The optimizer step of a model under a plan, and the bytes it moves to and from tiers."""
    config = GPTConfig(num_layers=args.layers, width=args.width, num_heads=args.width // 64)
    with sw.deferred_init():
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sw.shard(model, optimizer, plan)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    model(tokens, labels=tokens).loss.backward()
    runtime = runtime_of(model)
    done: list[Done] = []

    def step() -> None:
        optimizer.step()
        runtime.homes.settle()

    step()  # makes states
    runtime.observers.append(done.append)
    step()
    runtime.observers.remove(done.append)
    moved = sum(each.meter.read + each.meter.written for each in done)
    planned = sum(each.op.on("nvme").reads + each.op.on("nvme").writes for each in done)
    if moved != planned:
        sys.exit(f"{moved} bytes were moved, and {planned} planned: please report this.")
    return step, moved


def _timed(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
