"""The update on the host: AdamW on float32 masters with the copy to bfloat16, beside DeepSpeed's.

    python benchmarks/update.py                     # torch's fused kernel alone, and through shard
    PYTHON_WITH_DEEPSPEED benchmarks/update.py      # and DeepSpeedCPUAdam (its kernel is compiled)

All take turns in one process with the same number of threads. `shardwise` is ``optimizer.step()``
of a sharded model, from the user's call until all bfloat16 weights are updated. The table shows
medians, and the median of the rounds' ratios to DeepSpeed's time.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

import shardwise as sw
from shardwise.plans.plan import Precision

MIXED = Precision(compute="bfloat16", reduce="bfloat16", master="float32")
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
BASE = "DeepSpeedCPUAdam"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sides: dict[str, Callable[[], None]] = {
        "torch fused": build_torch(args.layers, args.width),
        "shardwise": build_shardwise(args.layers, args.width),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        sides[BASE] = build_deepspeed(args.layers, args.width)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        for name, step in sides.items():
            begin = time.perf_counter()
            step()
            if number:  # the first round creates the states
                times[name].append(time.perf_counter() - begin)
    count = args.layers * args.width**2
    if args.json:
        print(json.dumps({"parameters": count, "seconds": times}, indent=1))
        return
    print(f"{count / 1e6:.0f}M parameters, {torch.get_num_threads()} threads, {args.rounds} rounds")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        line = f"{name:<18}{1e3 * median:8.1f} ms{count / median / 1e9:8.2f} G elements/s"
        if BASE in times and name != BASE:
            ratios = [mine / base for mine, base in zip(seconds, times[BASE], strict=True)]
            line += f"{statistics.median(ratios):8.2f} x {BASE}"
        print(line)


def _masters(layers: int, width: int) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Float32 masters with gradients, and the weights that they are copied to."""
    masters = [nn.Parameter(torch.randn(width, width)) for _ in range(layers)]
    for master in masters:
        master.grad = torch.randn(width, width)
    return masters, [master.detach().bfloat16() for master in masters]


def build_torch(layers: int, width: int) -> Callable[[], None]:
    masters, weights = _masters(layers, width)
    return _with_copy(torch.optim.AdamW(masters, fused=True, **OPTIONS), masters, weights)


def build_deepspeed(layers: int, width: int) -> Callable[[], None]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    masters, weights = _masters(layers, width)
    return _with_copy(DeepSpeedCPUAdam(masters, adamw_mode=True, **OPTIONS), masters, weights)


def _with_copy(
    optimizer: torch.optim.Optimizer, masters: list[nn.Parameter], weights: list[torch.Tensor]
) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)

    return step


def build_shardwise(layers: int, width: int) -> Callable[[], None]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    sw.shard(model, optimizer, sw.presets.zero1(precision=MIXED))
    for parameter in model.parameters():
        parameter.grad = torch.randn(width, width, dtype=torch.bfloat16)
    return optimizer.step


if __name__ == "__main__":
    main()
