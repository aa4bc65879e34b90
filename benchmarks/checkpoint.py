"""Saving and loading a training checkpoint, beside the disk alone and beside DCP with FSDP2.

    python benchmarks/checkpoint.py --disk FOLDER
    python benchmarks/checkpoint.py --disk FOLDER --ranks 4 --layers 6 --json checkpoint.json

The same model is trained for a step under ``zero3``, under ``infinity`` (every state on the disk)
and by FSDP2. Then all save and load in turns, in the same processes, with fio in between (direct,
as many bytes, the best setting counts). Every save waits until its bytes are on the disk, and files
are dropped from the page cache before they are loaded. The tables show medians over rounds, the
memory that a save and a load take above training (peak resident size per rank), what an
asynchronous save costs the steps beside it, and the bytes that are read under another plan.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS, ON_DISK, PEER = "zero3", "infinity", "DCP, FSDP2"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--disk", required=True, help="a folder on a disk")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fio", default="1m:4,4m:4,4m:16", help="block:depth[:threads]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if shutil.which("fio") is None:
        sys.exit("fio is not installed; install it (apt-get install fio).")
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.disk) as folder:
        run(args, folder)
        result = json.loads((Path(folder) / "result.json").read_text())
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def run(args: argparse.Namespace, folder: str) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}",
        f"--master-port={port}", str(Path(__file__).resolve()), "--disk", args.disk,
        "--layers", str(args.layers), "--width", str(args.width), "--rounds", str(args.rounds),
        "--fio", args.fio, "--worker", folder,
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), **os.environ}
    subprocess.run(command, check=True, env=environment)


def report(result: dict[str, Any]) -> None:
    nbytes, seconds, memory = result["bytes"], result["seconds"], result["memory"]
    print(
        f"{result['parameters'] / 1e6:.0f}M parameters, {nbytes / 1e9:.2f} GB per checkpoint, "
        f"{result['ranks']} ranks, {result['rounds']} rounds; medians"
    )
    print(f"{'':<14}{'MB/s':>8}{'x fio':>8}{'x DCP':>8}{'MB above':>10}{'lowest x DCP':>14}")
    for what in ("save", "load"):
        fio = max(result["fio"][what].values(), key=statistics.median)
        for name in (OURS, ON_DISK, PEER):
            took = seconds[name][what]
            beside = [fast / (nbytes / s) for fast, s in zip(fio, took, strict=True)]
            peer = [p / s for p, s in zip(seconds[PEER][what], took, strict=True)]
            print(
                f"{what + ' ' + name:<18}{nbytes / statistics.median(took) / 1e6:>4.0f}"
                f"{1 / statistics.median(beside):>8.2f}{statistics.median(peer):>8.2f}"
                f"{memory[name][what] / 1e6:>10.0f}{min(peer):>14.2f}"
            )
    for name, found in result["asynchronous"].items():
        print(
            f"asynchronous, {name}: save returns after {found['stall_s']:.3f} s, "
            f"{found['stall_s'] / statistics.median(seconds[name]['save']):.1%} of a synchronous "
            f"one; all steps beside it take {found['extra_s']:.2f} s longer, "
            f"{found['extra_s'] / statistics.median(seconds[name]['save']):.1%}; median step "
            f"{found['step_ratio']:.2f} x; {found['above_bytes'] / 1e6:.0f} MB above training"
        )
    for name, found in result["resharded"].items():
        print(f"loaded under {name}: {found['read'] / found['needed']:.3f} x the bytes needed")


# --- the ranks ----------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(args.worker)
    contenders = {OURS: Ours(args, "zero3"), ON_DISK: Ours(args, "infinity"), PEER: Fsdp2(args)}
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"save": [], "load": []} for name in contenders
    }
    memory = {name: {"save": 0, "load": 0} for name in contenders}
    alone: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    nbytes = 0
    for turn in range(args.rounds + 1):
        for name, contender in contenders.items():
            path = folder / f"round-{turn}"
            for what, action in (("save", contender.save), ("load", contender.load)):
                if what == "load":
                    _forget(path)
                took, above = _measured(lambda action=action, path=path: action(path))
                if turn:
                    seconds[name][what].append(took)
                    memory[name][what] = max(memory[name][what], above)
            nbytes = nbytes or _size(path)
            _remove(path)
        if dist.get_rank() == 0:
            for what, speeds in _fio(args, folder, nbytes).items() if turn else ():
                for setting, speed in speeds.items():
                    alone[what].setdefault(setting, []).append(speed)
            print(f"  … round {turn} of {args.rounds}", file=sys.stderr, flush=True)
        dist.barrier()
    result = {
        "parameters": contenders[OURS].parameters,
        "bytes": nbytes,
        "ranks": dist.get_world_size(),
        "rounds": args.rounds,
        "seconds": seconds,
        "memory": memory,
        "fio": alone,
        "asynchronous": {name: beside(contenders[name], folder) for name in (OURS, ON_DISK)},
        "resharded": resharded(args, contenders[OURS], folder),
    }
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts during teardown; everything is written


class Ours:
    """A model under a plan of ours."""

    def __init__(self, args: argparse.Namespace, preset: str) -> None:
        import torch

        import shardwise as sw

        plan = sw.presets.infinity(args.disk) if preset == "infinity" else preset
        with sw.deferred_init():
            self.model = _gpt(args)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        sw.shard(self.model, self.optimizer, plan=plan)
        self.step()

    def step(self) -> None:
        _step(self.model, self.optimizer)

    def save(self, path: Path) -> None:
        import shardwise as sw

        sw.save(path, self.model, self.optimizer)

    def load(self, path: Path) -> int:
        import shardwise as sw

        return sw.load(path, self.model, self.optimizer).bytes_read


class Fsdp2:
    """The same model under FSDP2, saved by torch's distributed checkpoints."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        self.model = _gpt(args)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        _step(self.model, self.optimizer)

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)

    def load(self, path: Path) -> int:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim)
        return 0


def beside(contender: Ours, folder: Path) -> dict[str, float]:
    """What an asynchronous save costs the steps that run beside it."""
    import shardwise as sw

    alone = statistics.median([_timed(contender.step) for _ in range(5)])
    path = folder / "beside"
    before, _ = _status("VmRSS"), _reset_peak()
    begin = time.perf_counter()
    pending = sw.save(path, contender.model, contender.optimizer, asynchronous=True)
    stall = _slowest(time.perf_counter() - begin)
    steps = [_timed(contender.step)]
    while not path.exists():
        steps.append(_timed(contender.step))
    pending.wait()
    above = int(_slowest(float(_status("VmHWM") - before)))
    _remove(path)
    return {
        "stall_s": stall,
        "extra_s": stall + sum(step - alone for step in steps),
        "step_ratio": statistics.median(steps) / alone,
        "steps": len(steps),
        "above_bytes": above,
    }


def resharded(args: argparse.Namespace, saved: Ours, folder: Path) -> dict[str, dict[str, float]]:
    """The bytes that all ranks read under other plans, and those that their shards need."""
    from shardwise.api import runtime_of

    path, found = folder / "resharded", {}
    saved.save(path)
    for plan in ("zero1", "zero2"):
        other = Ours(args, plan)
        read = _total(other.load(path))
        flats = [flat for unit in runtime_of(other.model).units for flat in unit.flats]
        needed = sum(4 * flat.part_at.numel + 8 * flat.optim_at.numel for flat in flats)
        found[plan] = {"read": read, "needed": _total(needed)}
    _remove(path)
    return found


# --- measuring ----------------------------------------------------------------------------------


def _measured(action: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the slowest rank, and the memory that the largest took above what it had."""
    before, _ = _status("VmRSS"), _reset_peak()
    took = _timed(action)
    return took, int(_slowest(float(_status("VmHWM") - before)))


def _timed(action: Callable[[], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    action()
    return _slowest(time.perf_counter() - begin)


def _slowest(value: float) -> float:
    import torch
    import torch.distributed as dist

    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _total(value: float) -> float:
    import torch
    import torch.distributed as dist

    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found)
    return found.item()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _forget(path: Path) -> None:
    """Write a folder's files to the disk and drop them from the page cache."""
    import torch.distributed as dist

    dist.barrier()
    for file in path.rglob("*") if dist.get_rank() == 0 else ():
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)
    dist.barrier()


def _remove(path: Path) -> None:
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def _fio(args: argparse.Namespace, folder: Path, nbytes: int) -> dict[str, dict[str, float]]:
    """Bytes per second of the disk alone, by setting."""
    sys.path.insert(0, str(HERE))
    from disk import _Fio

    file, size = str(folder / "fio"), nbytes >> 22 << 22
    settings = args.fio.split(",")
    _Fio(settings[0], size, file).run("write")  # lays out the file
    found: dict[str, dict[str, float]] = {"save": {}, "load": {}}
    for setting in settings:
        found["save"][setting] = _Fio(setting, size, file).run("write")
        found["load"][setting] = _Fio(setting, size, file).run("read")
    Path(file).unlink()
    return found


def _gpt(args: argparse.Namespace) -> Any:
    import torch

    from shardwise.model.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(
        GPTConfig(num_layers=args.layers, width=args.width, num_heads=args.width // 64, vocab=32768)
    )


def _step(model: Any, optimizer: Any) -> None:
    import torch

    tokens = torch.arange(128).view(1, 128)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported
    main()
