"""How well the planner predicts and chooses, against training on an emulated cluster; needs root.

    python benchmarks/planner.py                        # over two hours: two grids, four rates
    python benchmarks/planner.py --grids 2x2 --rates 200mbit --rounds 1
    python benchmarks/planner.py --memory               # peak memory instead of time
    python benchmarks/planner.py --predict              # new predictions of the same turns: no root

Each rate is probed, predicted and measured together. Results are appended to a file, and probes and
chosen plans are stored beside it; the tables show all results in the file.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardwise.bench.accuracy.figures import summarise
from shardwise.bench.accuracy.results import Comparison, Footprint, read, write
from shardwise.bench.accuracy.run import compare, footprints, predict_again
from shardwise.bench.accuracy.setup import CHOSEN, FIXED, Setup, plans
from shardwise.bench.cluster import Rate

ROOT = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--grids", default="2x2,4x1", help="nodes x ranks")
    parser.add_argument("--rates", default="none,1gbit,200mbit,50mbit")
    parser.add_argument("--model", help="default: gpt-mini; for memory gpt-small")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--plans", default=",".join(plans()))
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--results", type=Path, help="default: results/planner*.jsonl")
    parser.add_argument(
        "--clusters",
        type=Path,
        default=ROOT / "results" / "planner",
        help="a folder for the probed clusters and the chosen plans",
    )
    parser.add_argument(
        "--show", action="store_true", help="only print the tables of the existing results"
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="predict the existing results again, from the stored clusters",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.plans.split(",")) - set(plans()):
        parser.error(f"unknown plans {', '.join(unknown)}; use some of {', '.join(plans())}")
    name = "planner-memory.jsonl" if args.memory else "planner.jsonl"
    args.results = args.results or ROOT / "results" / name
    args.results.parent.mkdir(parents=True, exist_ok=True)
    errors = Console(stderr=True, highlight=False)
    model = args.model or ("gpt-small" if args.memory else "gpt-mini")
    if args.predict:
        before = read(args.results, Comparison)
        again = list(predict_again(before, args.clusters, model=model, seq=args.seq))
        args.results.unlink()
        for one in again:
            write(args.results, one)
    elif not args.show:
        args.clusters.mkdir(parents=True, exist_ok=True)
        setup = Setup(
            model=model,
            seq=args.seq,
            grids=tuple(_grid(text) for text in args.grids.split(",")),
            rates=tuple(Rate.parse(text) for text in args.rates.split(",")),
            rounds=args.rounds,
            names=tuple(args.plans.split(",")),
        )
        if args.memory:
            made = footprints(setup, errors.print)
        else:
            made = compare(setup, errors.print, args.clusters)
        for one in made:
            write(args.results, one)
    found = read(args.results, Footprint if args.memory else Comparison)
    if args.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        (_print_memory if args.memory else _print)(found)


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
        f"rank correlation {accuracy.rank_correlation:.3f} over all clusters, at least "
        f"{accuracy.least_correlation:.3f} on each, {accuracy.agreement:.3f} between both halves "
        f"of the measured steps; from the first probe alone, median error "
        f"{accuracy.first_median_error:.1%}, worst {accuracy.first_worst_error:.1%}"
    )
    table = Table(
        "cluster", "error, median", "worst", "rank correlation", "of halves", "regret", *FIXED,
        title=f"predictions by cluster; measured times of plans relative to {CHOSEN}",
    )  # fmt: skip
    for key in clusters:
        some = [one for one in found if (one.grid, one.rate) == key]
        by_name = {one.plan: one.measured_s for one in some}
        ratios = [
            f"{by_name[name] / by_name[CHOSEN]:.2f}" if name in by_name else "" for name in FIXED
        ]
        here = summarise(some)
        table.add_row(
            " at ".join(key),
            f"{here.median_error:.1%}",
            f"{here.worst_error:.1%}",
            f"{here.rank_correlation:.2f}",
            f"{here.agreement:.2f}",
            f"{here.regrets[key]:.2f}",
            *ratios,
        )
    console.print(table)


def _print_memory(found: list[Footprint]) -> None:
    table = Table("grid", "plan", "predicted, MB", "measured, MB", "error")
    for one in found:
        predicted, peak = one.predicted_bytes / 1e6, one.peak_bytes / 1e6
        table.add_row(one.grid, one.plan, f"{predicted:.0f}", f"{peak:.0f}", f"{one.error:+.0%}")
    console = Console()
    console.print(table)
    errors = [abs(one.error) for one in found]
    console.print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
