"""The gain of overlap: steps with every state on a disk, with and without overlap, in turns.

    python benchmarks/overlap.py --disk FOLDER                 # reads ahead of their use
    python benchmarks/overlap.py --disk FOLDER --of update     # updates beside backward
    python benchmarks/overlap.py --disk FOLDER --batch 4 --trace step.json    # open it in Perfetto

One rank. Both models are in the same process and take turns, so that a noisy machine affects both
alike; the table shows medians and the median of the rounds' ratios.
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
from shardwise.model.gpt import GPT, GPTConfig
from shardwise.plans.plan import Plan

MEASURED = {"prefetch": "forward and backward", "update": "whole step"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--disk", required=True, help="a folder on a disk")
    parser.add_argument(
        "--of", choices=MEASURED, default="prefetch", help="which overlap to compare"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument(
        "--batch", default="1,2,4,8", help="sequences per step, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", help="write a trace of one step with overlap")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    models = {name: build(args, plan) for name, plan in plans(args).items()}
    rows = []
    for size in (int(text) for text in args.batch.split(",")):
        rows.append({"batch": size, **measure(models, args, size)})
    if args.trace:
        with sw.trace(args.trace):
            run(models["with"], args, 1)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"batch  without, s  with, s  without / with ({MEASURED[args.of]})")
    for row in rows:
        print(
            f"{row['batch']:>5}{row['without_s']:>12.2f}{row['with_s']:>9.2f}{row['ratio']:>16.2f}"
        )


def plans(args: argparse.Namespace) -> dict[str, Plan]:
    plan = sw.presets.infinity(args.disk)
    if args.of == "prefetch":
        return {"without": replace(plan, prefetch=0), "with": plan}
    return {"without": plan, "with": replace(plan, tiers=replace(plan.tiers, update="backward"))}


def build(args: argparse.Namespace, plan: Plan) -> Any:
    with sw.deferred_init():
        model = GPT(GPTConfig(num_layers=args.layers, width=args.width, num_heads=args.width // 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sw.shard(model, optimizer, plan)
    return model, optimizer


def measure(models: dict[str, Any], args: argparse.Namespace, batch: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(args.rounds + 1):
        for name, trained in models.items():
            seconds = run(trained, args, batch)
            if turn:  # the first turn warms up, and records the order
                times[name].append(seconds)
    pairs = zip(times["without"], times["with"], strict=True)
    return {
        "without_s": statistics.median(times["without"]),
        "with_s": statistics.median(times["with"]),
        "ratio": statistics.median(without / with_ for without, with_ in pairs),
    }


def run(trained: Any, args: argparse.Namespace, batch: int) -> float:
    """One step; returns the time of the part that overlap affects."""
    model, optimizer = trained
    tokens = torch.randint(256, (batch, args.seq + 1), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    model(tokens[:, :-1], labels=tokens[:, 1:]).loss.backward()
    passes_s = time.perf_counter() - begin
    optimizer.step()
    optimizer.zero_grad()
    runtime_of(model).homes.settle()
    return passes_s if args.of == "prefetch" else time.perf_counter() - begin


if __name__ == "__main__":
    main()
