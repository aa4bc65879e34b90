"""Step time and peak memory beside DDP and FSDP2, interleaved in one run on the same model.

    python benchmarks/step.py                      # 2 ranks, float32
    python benchmarks/step.py --ranks 4 --dtype bfloat16 --json step.json

All contenders are in the same processes and take turns, a few steps each, for several rounds, so
that a noisy machine affects all of them alike. Times are wall times of K steps with all
communication drained, and the table shows medians and the median of the per-round ratios. Peak
memory is measured separately, one contender at a time in fresh processes, as the peak resident size
above that of the process before it built a model.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.bench.messages import Setting

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported

RATIOS = [
    ("zero3", "torch-fsdp2"),
    ("hsdp", "torch-hsdp"),
    ("zero1", "torch-ddp"),
    ("zero2", "torch-ddp"),
    ("ddp", "torch-ddp"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--levels", default=None, help="default: node=RANKS/2,world=2 for 4, else node=RANKS"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contenders", default=None, help="comma-separated; default: all")
    parser.add_argument(
        "--native-bf16",
        action="store_true",
        help="let torch emulate bfloat16 where the CPU has none",
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.levels = args.levels or (
        f"node={args.ranks // 2},world=2" if args.ranks >= 4 else f"node={args.ranks},world=1"
    )
    names = args.contenders.split(",") if args.contenders else _default_contenders(args.ranks)
    if args.worker:
        _work(args, names)
        return
    result: dict[str, object] = {"options": {k: str(v) for k, v in vars(args).items()}}
    if _in_float32(args):
        from shardwise.probing.matmul import REMARK

        result["remark"] = REMARK
        print(REMARK)
    if not args.no_time:
        times = _launch(args, names, "time")
        result["seconds_per_step"] = times
        _print_times(times)
    if not args.no_memory:
        memory = {}
        for name in names:
            memory[name] = _launch(args, [name], "memory")
            if not name.startswith("torch-"):
                memory[name]["predicted_mb"] = _predict(args, name) / 1e6
            _progress(f"memory of {name}: {memory[name]['peak_mb']:.0f} MB")
        result["memory"] = memory
        _print_memory(memory)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def _in_float32(args: argparse.Namespace) -> bool:
    """Whether bfloat16 products are computed in float32."""
    from shardwise.probing.matmul import has_bfloat16

    return args.dtype == "bfloat16" and not args.native_bf16 and not has_bfloat16()


def _default_contenders(ranks: int) -> list[str]:
    names = ["torch-ddp", "torch-fsdp2", "ddp", "zero1", "zero2", "zero3"]
    return names + (["torch-hsdp", "hsdp", "amsp"] if ranks >= 4 else [])


# --- the parent ---------------------------------------------------------------------------------


def _launch(args: argparse.Namespace, names: list[str], what: str) -> dict:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}",
                   "--master-addr=127.0.0.1", f"--master-port={port}", __file__,
                   "--worker", f"{what}:{out}",
                   "--ranks", str(args.ranks), "--levels", args.levels, "--dtype", args.dtype,
                   "--model", args.model,
                   "--seq", str(args.seq), "--steps", str(args.steps), "--rounds", str(args.rounds),
                   "--contenders", ",".join(names),
                   *(["--native-bf16"] if args.native_bf16 else [])]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, timeout=1800)
        return json.loads(out.read_text())


def _print_times(times: dict[str, list[float]]) -> None:
    print(f"\n{'contender':<14}{'s/step':>9}{'spread':>16}   ratio to peer (median of rounds)")
    for name, values in times.items():
        peer = dict(RATIOS).get(name)
        line = f"{name:<14}{statistics.median(values):>9.3f}{min(values):>8.3f}–{max(values):<7.3f}"
        if peer in times:
            ratio = statistics.median(a / b for a, b in zip(values, times[peer], strict=True))
            line += f"   {ratio:.2f} × {peer}"
        print(line)


def _print_memory(memory: dict[str, dict[str, float]]) -> None:
    print(
        f"\n{'contender':<14}{'peak MB':>9}{'predicted':>11}{'ratio':>8}"
        "   (per rank, above the bare process)"
    )
    for name, row in memory.items():
        predicted = row.get("predicted_mb")
        line = f"{name:<14}{row['peak_mb']:>9.0f}"
        if predicted:
            line += f"{predicted:>11.0f}{row['peak_mb'] / predicted:>8.2f}"
        print(line)


def _progress(text: str) -> None:
    print(f"  … {text}", file=sys.stderr, flush=True)


# --- the ranks ----------------------------------------------------------------------------------


def _work(args: argparse.Namespace, names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if _in_float32(args):
        from shardwise.probing.matmul import compute_in_float32

        compute_in_float32()
    dist.init_process_group("gloo")
    what, out = args.worker.split(":", 1)
    result = _time_all(args, names) if what == "time" else _measure_memory(args, names[0])
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    # gloo sometimes aborts during teardown; everything is written, so exit at once.
    os._exit(0)


def _time_all(args: argparse.Namespace, names: list[str]) -> dict[str, list[float]]:
    import torch.distributed as dist

    from shardwise.bench.contenders import batch, build

    setting = _setting(args)
    contenders = [build(name, setting) for name in names]
    batches = [batch(setting, i) for i in range(args.steps)]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.rounds + 1):
        for contender in contenders:
            dist.barrier()
            begin = time.perf_counter()
            for tokens in batches:
                loss = contender.step(tokens)
            contender.drain()
            dist.barrier()
            if turn:  # the first turn warms up, and records the order
                times[contender.name].append((time.perf_counter() - begin) / args.steps)
        if dist.get_rank() == 0:
            _progress(f"round {turn} of {args.rounds}, loss {loss:.4f}")
    return times


def _measure_memory(args: argparse.Namespace, name: str) -> dict[str, float]:
    from shardwise.bench.memory import peak_bytes

    return {"peak_mb": peak_bytes(name, asdict(_setting(args))) / 1e6}


def _setting(args: argparse.Namespace) -> "Setting":
    from shardwise.bench.messages import Setting

    return Setting(
        model=args.model, dtype=args.dtype, seq=args.seq, levels=args.levels, deferred=True
    )


def _predict(args: argparse.Namespace, name: str) -> float:
    """The prediction of ``shardwise explain``."""
    from shardwise.bench.contenders import plan_of
    from shardwise.plans import dump_plan

    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.toml"
        plan.write_text(dump_plan(plan_of(name, _setting(args))))
        command = [sys.executable, "-m", "shardwise", "explain", str(plan), "--model", args.model,
                   "--levels", args.levels, "--seq", str(args.seq), "--json"]  # fmt: skip
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(answer.stdout)["memory"]["total"])


if __name__ == "__main__":
    main()
