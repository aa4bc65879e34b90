"""How well the planner predicts and chooses, against training on an emulated cluster; needs root.

    python benchmarks/planner.py                        # half an hour: two grids, four rates
    python benchmarks/planner.py --grids 2x2 --rates 200mbit --rounds 1

Every rate is probed, predicted and measured in one go. Results are appended to a file; the tables
are made of all that it has.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardwise.bench.accuracy import (
    CHOSEN,
    FIXED,
    Comparison,
    Setup,
    compare,
    plans,
    read,
    summarise,
    write,
)
from shardwise.bench.cluster import Rate

ROOT = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--grids", default="2x2,4x1", help="nodes x ranks")
    parser.add_argument("--rates", default="none,1gbit,200mbit,50mbit")
    parser.add_argument("--model", default="gpt-mini")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", default=",".join(plans()))
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "planner.jsonl")
    parser.add_argument("--clusters", type=Path, help="a folder for the probed clusters")
    parser.add_argument("--show", action="store_true", help="only the tables of what is there")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.clusters:
        args.clusters.mkdir(parents=True, exist_ok=True)
    errors = Console(stderr=True, highlight=False)
    if not args.show:
        setup = Setup(
            model=args.model,
            seq=args.seq,
            grids=tuple(_grid(text) for text in args.grids.split(",")),
            rates=tuple(Rate.parse(text) for text in args.rates.split(",")),
            rounds=args.rounds,
            names=tuple(args.plans.split(",")),
        )
        for one in compare(setup, errors.print, args.clusters):
            write(args.results, one)
    found = read(args.results)
    if args.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        _print(found)


def _grid(text: str) -> tuple[int, int]:
    nodes, _, ranks = text.partition("x")
    return int(nodes), int(ranks)


def _print(found: list[Comparison]) -> None:
    console = Console()
    clusters = list(dict.fromkeys((one.grid, one.rate) for one in found))
    for key in clusters:
        some = [one for one in found if (one.grid, one.rate) == key]
        table = Table(
            "plan", "predicted, s", "measured, s", "error", "exposed", title=" at ".join(key)
        )
        for one in sorted(some, key=lambda one: one.measured_s):
            exposed = ", ".join(
                f"{use} {seconds:.2f}"
                for use, seconds in one.exposed.items()
                if seconds > 0.02 * one.predicted_s
            )
            table.add_row(
                one.plan,
                f"{one.predicted_s:.3f}",
                f"{one.measured_s:.3f}",
                f"{one.error:+.0%}",
                exposed,
            )
        console.print(table)
    accuracy = summarise(found)
    console.print(
        f"median error {accuracy.median_error:.1%}, worst {accuracy.worst_error:.1%}, "
        f"rank correlation at least {accuracy.rank_correlation:.3f}"
    )
    table = Table(
        "cluster", "regret", *FIXED, title=f"measured time of {CHOSEN}, and of others over it"
    )
    for key in clusters:
        by_name = {one.plan: one.measured_s for one in found if (one.grid, one.rate) == key}
        ratios = [
            f"{by_name[name] / by_name[CHOSEN]:.2f}" if name in by_name else "" for name in FIXED
        ]
        table.add_row(" at ".join(key), f"{accuracy.regrets[key]:.2f}", *ratios)
    console.print(table)


if __name__ == "__main__":
    main()
