"""A training step with the optimizer states on a disk, beside DeepSpeed's; the two take turns.

    python benchmarks/offload.py --disk FOLDER --python PYTHON_WITH_DEEPSPEED

Both train the same GPT in float32 on one rank: ZeRO-3 with AdamW's states on the disk. Each turn
runs in a new process that builds the model (`wall.py`); its first step is not counted. The table
shows the median step of each, and the median of the turns' ratios.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import shardwise as sw
from shardwise.plans.file import dump_plan
from shardwise.plans.plan import Tiers

WALL = Path(__file__).resolve().parent / "wall.py"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--disk", required=True, help="a folder on a disk")
    parser.add_argument("--python", required=True, help="a Python interpreter with DeepSpeed")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", default="14 GiB")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    zero3 = sw.presets.zero3()
    plan = replace(zero3, optim=replace(zero3.optim, tier="nvme"), tiers=Tiers(path=args.disk))
    turns: dict[str, list[float]] = {"shardwise": [], "deepspeed": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.toml"
        file.write_text(dump_plan(plan), encoding="utf-8")
        for turn in range(args.turns):
            turns["shardwise"].append(median_step(args, "--plan", str(file)))
            peer = ("--contender", "deepspeed", "--python", args.python, "--disk", args.disk)
            turns["deepspeed"].append(median_step(args, *peer))
            print(f"turn {turn + 1} of {args.turns} is done", file=sys.stderr)
    if args.json:
        print(json.dumps(turns))
        return
    for name, seconds in turns.items():
        print(f"{name:<12}{statistics.median(seconds):8.2f} s per step")
    ratios = [theirs / ours for ours, theirs in zip(*turns.values(), strict=True)]
    print(f"deepspeed / shardwise: {statistics.median(ratios):.2f}")


def median_step(args: argparse.Namespace, *options: str) -> float:
    """The median of all steps but the first."""
    command = [
        sys.executable, str(WALL), "--json", "--ranks", "1", "--limit", args.limit,
        "--layers", str(args.layers), "--width", str(args.width), "--steps", str(args.steps),
        *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout[done.stdout.find("\n{\n") + 1 :] if done.stdout[:1] != "{" else done.stdout
    if done.returncode:
        sys.exit(f"{' '.join(options)} failed: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(lines)
    if result["outcome"] != "trains":
        sys.exit(f"{' '.join(options)} {result['outcome']}: {done.stderr.strip()[-500:]}")
    return statistics.median(step["seconds"] for step in result["steps"][1:])


if __name__ == "__main__":
    main()
