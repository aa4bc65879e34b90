"""Step time and peak memory beside DDP and FSDP2, interleaved in one run on the same model.

    python benchmarks/step.py                      # 2 ranks, float32
    python benchmarks/step.py --ranks 4 --dtype bfloat16 --json step.json

All contenders live in the same processes and take turns, a few steps each, for several rounds, so
that a noisy machine is noisy for all of them alike; times are wall times of K steps with all
communication drained, and the table shows medians and the median of the per-round ratios. Peak
memory is measured apart, one contender at a time in fresh processes, as peak resident size above
what the process had before it built a model.
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
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported

RATIOS = [
    ("zero3", "torch-fsdp2"),
    ("hsdp", "torch-hsdp"),
    ("zero1", "torch-ddp"),
    ("zero2", "torch-ddp"),
    ("ddp", "torch-ddp"),
]


@dataclass
class Contender:
    """Something that trains: one step on a batch, and a drain of what is still under way."""

    name: str
    step: Callable[[object], float]
    drain: Callable[[], None]


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
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contenders", default=None, help="comma-separated; default: all")
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
                   "--contenders", ",".join(names)]  # fmt: skip
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
        "   (a rank, above the bare process)"
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
    dist.init_process_group("gloo")
    what, out = args.worker.split(":", 1)
    result = _time_all(args, names) if what == "time" else _measure_memory(args, names[0])
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    # gloo sometimes aborts in its own teardown; everything is written, so leave at once.
    os._exit(0)


def _time_all(args: argparse.Namespace, names: list[str]) -> dict[str, list[float]]:
    import torch.distributed as dist

    contenders = [_build(args, name) for name in names]
    batches = [_batch(args, i) for i in range(args.steps)]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.rounds + 1):
        for contender in contenders:
            dist.barrier()
            begin = time.perf_counter()
            for batch in batches:
                loss = contender.step(batch)
            contender.drain()
            dist.barrier()
            if turn:  # the first turn warms up, and records the order
                times[contender.name].append((time.perf_counter() - begin) / args.steps)
        if dist.get_rank() == 0:
            _progress(f"round {turn} of {args.rounds}, loss {loss:.4f}")
    return times


def _measure_memory(args: argparse.Namespace, name: str) -> dict[str, float]:
    import torch

    _warm_up()
    base = _rss_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    contender = _build(args, name)
    for i in range(4):
        contender.step(_batch(args, i))
    contender.drain()
    peak = torch.tensor([_rss_bytes("VmHWM") - base], dtype=torch.float64)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    row = {"peak_mb": peak.item() / 1e6}
    return row


def _warm_up() -> None:
    """Loads every library that any contender uses, so that only models and states are counted."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    from torch import nn

    import shardwise.api
    import shardwise.train.models  # noqa: F401

    layer = nn.TransformerEncoderLayer(64, 2, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(1, 8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _rss_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} not found")


def _batch(args: argparse.Namespace, index: int) -> object:
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(index * 1000 + dist.get_rank())
    return torch.randint(256, (1, args.seq + 1), generator=generator)


def _model(args: argparse.Namespace):
    import torch

    from shardwise.train.config import ModelConfig
    from shardwise.train.models import build_model

    torch.manual_seed(0)
    return build_model(ModelConfig(name=args.model))


def _optimizer(model):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _build(args: argparse.Namespace, name: str) -> Contender:
    builders = {"torch-ddp": _build_ddp, "torch-fsdp2": _build_fsdp2, "torch-hsdp": _build_fsdp2}
    return builders.get(name, _build_ours)(args, name)


def _plain_step(model, optimizer) -> Callable[[object], float]:
    def step(batch) -> float:
        loss = model(batch[:, :-1], labels=batch[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _build_ddp(args: argparse.Namespace, name: str) -> Contender:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = _model(args)
    if args.dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contender(name, _plain_step(wrapped, _optimizer(wrapped)), lambda: None)


def _build_fsdp2(args: argparse.Namespace, name: str) -> Contender:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _model(args)
    if name == "torch-hsdp":
        inner = int(args.levels.split(",")[0].split("=")[1])
        mesh = init_device_mesh(
            "cpu", (args.ranks // inner, inner), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh("cpu", (args.ranks,))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if args.dtype == "bfloat16"
        else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Contender(name, _plain_step(model, _optimizer(model)), lambda: None)


def _build_ours(args: argparse.Namespace, name: str) -> Contender:
    import shardwise as sw
    from shardwise.api import runtime_of

    with sw.deferred_init():
        model = _model(args)
    optimizer = _optimizer(model)
    sw.shard(model, optimizer, plan=_plan(args, name), levels=args.levels)
    return Contender(name, _plain_step(model, optimizer), runtime_of(model).grid.gathers.drain)


def _plan(args: argparse.Namespace, name: str):
    import shardwise as sw

    precision = sw.Precision(compute="bfloat16") if args.dtype == "bfloat16" else None
    return sw.presets.PRESETS[name](precision=precision)


def _predict(args: argparse.Namespace, name: str) -> float:
    """What ``shardwise explain`` says."""
    from shardwise.plan import dump_plan

    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.toml"
        plan.write_text(dump_plan(_plan(args, name)))
        command = [sys.executable, "-m", "shardwise", "explain", str(plan), "--model", args.model,
                   "--levels", args.levels, "--seq", str(args.seq), "--json"]  # fmt: skip
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(answer.stdout)["memory"]["total"])


if __name__ == "__main__":
    main()
