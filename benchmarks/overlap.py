"""What reading ahead buys: steps with every state on a disk, with prefetch and without, in turns.

    python benchmarks/overlap.py --disk FOLDER
    python benchmarks/overlap.py --disk FOLDER --batch 4 --trace step.json    # open it in Perfetto

One rank. Both models live in the same process and take turns, so that a noisy machine is noisy for
both; the table shows medians and the median of the rounds' ratios.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.train.gpt import GPT, GPTConfig


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--disk", required=True, help="a folder on a disk")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", default="1,2,4,8", help="sequences a step, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", help="write one step with prefetch as a trace")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    models = {prefetch: build(args, prefetch) for prefetch in (0, 1)}
    rows = []
    for size in (int(text) for text in args.batch.split(",")):
        rows.append({"batch": size, **measure(models, args, size)})
    if args.trace:
        with sw.trace(args.trace):
            run(models[1], args.seq, 1)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print("batch  without, s  with, s  without / with (forward and backward)")
    for row in rows:
        print(
            f"{row['batch']:>5}{row['without_s']:>12.2f}{row['with_s']:>9.2f}{row['ratio']:>16.2f}"
        )


def build(args: argparse.Namespace, prefetch: int) -> Any:
    plan = replace(sw.presets.infinity(args.disk), prefetch=prefetch)
    with sw.deferred_init():
        model = GPT(GPTConfig(num_layers=args.layers, width=args.width, num_heads=args.width // 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sw.shard(model, optimizer, plan)
    return model, optimizer


def measure(models: dict[int, Any], args: argparse.Namespace, batch: int) -> dict[str, float]:
    times: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(args.rounds + 1):
        for prefetch, trained in models.items():
            seconds = run(trained, args.seq, batch)
            if turn:  # the first one warms up, and records the order
                times[prefetch].append(seconds)
    pairs = zip(times[0], times[1], strict=True)
    return {
        "without_s": statistics.median(times[0]),
        "with_s": statistics.median(times[1]),
        "ratio": statistics.median(without / with_ for without, with_ in pairs),
    }


def run(trained: Any, seq: int, batch: int) -> float:
    """One step; returns the time of forward and backward, which is what prefetch is about."""
    model, optimizer = trained
    tokens = torch.randint(256, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    model(tokens[:, :-1], labels=tokens[:, 1:]).loss.backward()
    seconds = time.perf_counter() - begin
    optimizer.step()
    optimizer.zero_grad()
    runtime_of(model).homes.settle()
    return seconds


if __name__ == "__main__":
    main()
