"""Another checkout beside this one: step times and peak memory in one run, taking turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/beside.py /tmp/before
    python benchmarks/beside.py /tmp/before --ranks 4 --dtype bfloat16 --contenders zero3,hsdp,amsp

Each turn trains the same contenders for a few steps with one of the checkouts, in fresh processes.
A contender's step is divided by that of a peer (torch FSDP2, DDP) in the same turn, so that a
machine that is slower for a while is slower for both; the table has the medians over turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PEERS = {
    "zero3": "torch-fsdp2",
    "zero1": "torch-ddp",
    "zero2": "torch-ddp",
    "ddp": "torch-ddp",
    "hsdp": "torch-hsdp",
    "amsp": "torch-hsdp",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", default="zero3,zero1,zero2,ddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.contenders.split(",")
    common = ["--ranks", str(args.ranks), "--dtype", args.dtype, "--rounds", str(args.rounds)]
    checkouts = {"before": args.before.resolve(), "now": HERE}
    ratios: dict[str, dict[str, list[float]]] = {
        name: {which: [] for which in checkouts} for name in names
    }
    memory: dict[str, dict[str, float]] = {name: {} for name in names}
    for turn in range(args.turns):
        for which, checkout in checkouts.items():
            found = run(checkout, names, common, with_memory=turn == 0)
            for name in names:
                seconds = found["seconds_per_step"]
                ratio = statistics.median(seconds[name]) / statistics.median(seconds[PEERS[name]])
                ratios[name][which].append(ratio)
                if turn == 0:
                    memory[name][which] = found["memory"][name]["peak_mb"]
            print(f"turn {turn + 1} of {args.turns}, {which}: done", file=sys.stderr)
    report(ratios, memory)
    if args.json:
        args.json.write_text(json.dumps({"ratios": ratios, "peak_mb": memory}, indent=1))


def run(checkout: Path, names: list[str], common: list[str], *, with_memory: bool) -> dict:
    """One turn of a checkout's own ``benchmarks/step.py``."""
    peers = sorted({PEERS[name] for name in names})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [
            sys.executable, str(checkout / "benchmarks" / "step.py"), "--json", str(out),
            "--contenders", ",".join([*peers, *names]), *common,
        ]  # fmt: skip
        if not with_memory:
            command.append("--no-memory")
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def report(ratios: dict[str, dict[str, list[float]]], memory: dict[str, dict[str, float]]) -> None:
    print(f"{'':<8}{'before':>18}{'now':>18}{'now/before':>12}{'MB before':>11}{'now':>7}")
    for name, by_checkout in ratios.items():
        before, now = (statistics.median(by_checkout[which]) for which in ("before", "now"))
        peer = PEERS[name].removeprefix("torch-")
        print(
            f"{name:<8}{before:>10.3f} × {peer:<5}{now:>10.3f} × {peer:<5}{now / before:>12.3f}"
            f"{memory[name]['before']:>11.0f}{memory[name]['now']:>7.0f}"
        )


if __name__ == "__main__":
    main()
