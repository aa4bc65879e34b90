"""What each lossy technique costs in quality, over seeds.

    python benchmarks/quality.py                               # all of it: hours on two cores
    python benchmarks/quality.py --seeds 0 --steps 100 --techniques zero3,zeropp
    python benchmarks/quality.py --results benchmarks/results/quality.jsonl   # continues

Runs that the results file already has (same setting) are not run again.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardwise.bench.quality import BASELINE, Setting, run, summarise, techniques
from shardwise.probing.matmul import REMARK, has_bfloat16

ROOT = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = Setting()
    parser.add_argument("--techniques", default=",".join(techniques()))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--model", default=default.model)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--seq", type=int, default=default.seq)
    parser.add_argument("--global-batch", type=int, default=default.global_batch)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "quality.jsonl")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    setting = Setting(
        model=args.model, steps=args.steps, seq=args.seq, global_batch=args.global_batch
    )
    names = [name.strip() for name in args.techniques.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    errors = Console(stderr=True)
    outcomes = []
    total = len(names) * len(seeds)
    for outcome in run(names, seeds, setting, args.results):
        outcomes.append(outcome)
        errors.print(
            f"{len(outcomes)}/{total} {outcome.technique}, seed {outcome.seed}: "
            f"validation {outcome.val_loss:.4f} ({outcome.seconds:.0f} s)"
        )
    rows = summarise(outcomes)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("technique", "validation loss by seed", f"over {BASELINE}, %", "by seed, %")
    for row in rows:
        table.add_row(
            row.technique,
            "  ".join(f"{loss:.4f}" for loss in row.val_losses),
            f"{row.mean_percent:+.2f}" if row.percent else "",
            "  ".join(f"{percent:+.2f}" for percent in row.percent),
        )
    Console().print(table)
    if not has_bfloat16():
        print(REMARK)


if __name__ == "__main__":
    main()
