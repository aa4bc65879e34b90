"""The memory wall: the largest model that trains under a limit that the kernel enforces.

    python benchmarks/wall.py --disk /a/folder/on/a/disk  # 1.36B, two ranks of 2 GiB
    python benchmarks/wall.py --disk DIR --ranks 1
    python benchmarks/wall.py --disk DIR --budget "1.2 GiB"     # buffers are freed earlier
    python benchmarks/wall.py --disk DIR --layers 1 --width 1024 --vocab 262144 --tile 4194304
                                                         # one layer exceeds all memory
    python benchmarks/wall.py --contender fsdp2 --layers 16 --width 896   # peers, at their sizes
    python benchmarks/wall.py --contender deepspeed --python PYTHON --disk DIR ...

Every rank is a process in its own control group from its first instruction, so the interpreter and
its libraries count as well. Steps are real: forward, backward and AdamW in float32 on text, always
on the same few rows, so that the loss must fall.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE = 2e-6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--contender", default="shardwise", choices=list(BUILDERS))
    parser.add_argument("--plan", default="", help="a plan file instead of the preset infinity")
    parser.add_argument("--disk", default="", help="a folder on a disk, for states")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", default="2 GiB", help="for each rank")
    parser.add_argument("--budget", default="", help="tiers.device_bytes of the plan")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--tile", type=int, help="tiling.numel of the plan; 0: no tiles")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return
    result = run(args)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    if "parameters" not in result:  # it ended before it had a model
        sys.exit(f"{args.contender}: {result['outcome']}; the output of its ranks is above")
    print(
        f"{args.contender}: {result['parameters'] / 1e6:.0f}M parameters, states "
        f"{result['state_bytes'] / 2**30:.1f} GiB, {args.ranks} x {args.limit}: {result['outcome']}"
    )
    for step in result["steps"]:
        print(f"  step {step['step']}: loss {step['loss']:.4f}, {step['seconds']:.1f} s")
    if result.get("predicted_bytes"):
        ratio = result["peak_bytes"] / result["predicted_bytes"]
        print(
            f"  peak above the interpreter's own {result['base_bytes'] / 1e6:.0f} MB: "
            f"{result['peak_bytes'] / 1e6:.0f} MB, predicted "
            f"{result['predicted_bytes'] / 1e6:.0f} ({ratio:.2f})"
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, each under its limit, and report how they ended."""
    from shardwise.bench.limit import MemoryLimit
    from shardwise.core.sizes import parse_bytes

    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        limits, processes = [], []
        for rank in range(args.ranks):
            limit = MemoryLimit(f"shardwise-wall-{os.getpid()}-{rank}", parse_bytes(args.limit))
            limits.append(stack.enter_context(limit))
            job = {**vars(args), "rank": rank, "out": str(out)}
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(args.ranks),
                "LOCAL_WORLD_SIZE": str(args.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                "MALLOC_ARENA_MAX": "2",
                "PYTHONPATH": str(ROOT),
            }
            command = [args.python, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
            processes.append(subprocess.Popen(command, env=environment, preexec_fn=limit.join))
        codes = _wait(processes)
        peak = max(limit.peak_bytes for limit in limits)
        result: dict[str, Any] = {"steps": [], **_read(out / "about.json")}
        for line in (out / "steps.jsonl").read_text().splitlines() if codes else ():
            result["steps"].append(json.loads(line))
        result |= _read(out / "end.json")
        result["charged_peak_bytes"] = peak
        result["outcome"] = _outcome(codes)
        return result


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes; when one rank fails, the others are ended as well."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            time.sleep(1)
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                process.wait()
        time.sleep(0.2)
    return [process.wait() for process in processes]


def _outcome(codes: list[int]) -> str:
    if not any(codes):
        return "trains"
    return "killed by the limit" if -9 in codes else f"failed (exit codes {codes})"


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


# --- a rank -------------------------------------------------------------------------------------


def work(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.model.gpt import GPT, GPTConfig

    out = Path(job["out"])
    (out / "steps.jsonl").touch()
    dist.init_process_group("gloo")
    config = GPTConfig(
        num_layers=job["layers"],
        width=job["width"],
        num_heads=job["width"] // 64,
        vocab=job["vocab"],
    )
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config).parameters())
    if job["rank"] == 0:
        about = {"parameters": parameters, "state_bytes": 16 * parameters}
        (out / "about.json").write_text(json.dumps(about))
    text = Path(torch.__file__).read_bytes()
    tokens = torch.tensor(list(text[: job["ranks"] * (job["seq"] + 1)])).view(job["ranks"], -1)
    mine = tokens[job["rank"] : job["rank"] + 1]
    if job["contender"] == "shardwise":  # loads its libraries, so that only states are counted
        tiny = GPTConfig(num_layers=2, width=64, num_heads=1)
        step, _ = build_shardwise(job, GPT, tiny)
        step(mine[:, :-1], mine[:, 1:])
        del step
        gc.collect()
    base = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    torch.manual_seed(0)  # so that plans can be compared
    step, predicted = BUILDERS[job["contender"]](job, GPT, config)
    if job["tile"]:  # initialised in a file, whose pages the system can reclaim
        Path("/proc/self/clear_refs").write_text("5")
    for number in range(1, job["steps"] + 1):
        begin = time.perf_counter()
        loss = torch.tensor(step(mine[:, :-1], mine[:, 1:]))
        dist.all_reduce(loss)
        if job["rank"] == 0:
            seconds = time.perf_counter() - begin
            line = {"step": number, "loss": loss.item() / job["ranks"], "seconds": seconds}
            with (out / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"step {number}: loss {line['loss']:.4f}, {seconds:.1f} s", file=sys.stderr)
    peak = torch.tensor(float(_status("VmHWM") - base))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if job["rank"] == 0:
        end = {"base_bytes": base, "peak_bytes": int(peak), "predicted_bytes": predicted}
        (out / "end.json").write_text(json.dumps(end))
    dist.barrier()


def _rows(job: dict[str, Any]) -> tuple[Any, Any]:
    """Inputs and labels with the shapes of a step, for the memory model."""
    import torch

    rows = torch.zeros(1, job["seq"], dtype=torch.int64)
    return rows, rows


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} not found")


def build_shardwise(job: dict[str, Any], kind: Any, config: Any) -> Any:
    import torch

    import shardwise as sw
    from shardwise.api import runtime_of
    from shardwise.core.sizes import parse_bytes
    from shardwise.core.topology import Topology
    from shardwise.model.activations import saved_bytes
    from shardwise.model.units import describe
    from shardwise.plans.file import load_plan
    from shardwise.plans.memory import memory

    plan = load_plan(job["plan"]) if job["plan"] else sw.presets.infinity(job["disk"])
    if job["budget"]:
        budget = parse_bytes(job["budget"])
        plan = replace(plan, tiers=replace(plan.tiers, device_bytes=budget))
    if job["tile"] is not None:
        plan = replace(plan, tiling=replace(plan.tiling, numel=job["tile"]))
    with sw.deferred_init():
        model = kind(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    topology = Topology.parse(f"node={job['ranks']}")
    saved = saved_bytes(lambda: kind(config), lambda model: model(*_rows(job)), plan, topology)
    spec = describe(model, plan, topology)
    predicted = memory(plan.without_accelerator(), spec, topology, saved=saved).total
    sw.shard(model, optimizer, plan=plan)

    def step(tokens: Any, labels: Any) -> float:
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime_of(model).homes.settle()
        return float(loss.detach())

    return step, predicted


def build_fsdp2(job: dict[str, Any], kind: Any, config: Any) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = kind(config)
    mesh = init_device_mesh("cpu", (job["ranks"],))
    offload = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens: Any, labels: Any) -> float:
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, None


def build_deepspeed(job: dict[str, Any], kind: Any, config: Any) -> Any:
    """ZeRO-3 with the optimizer states on NVMe; its parameters on NVMe do not run on CPU."""
    import deepspeed

    nvme = {"device": "nvme", "nvme_path": job["disk"], "buffer_count": 4, "fast_init": False}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": nvme,
            "sub_group_size": 10_000_000,
            "stage3_max_live_parameters": 30_000_000,
            "stage3_prefetch_bucket_size": 5_000_000,
            "reduce_bucket_size": 5_000_000,
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = kind(config)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )

    def step(tokens: Any, labels: Any) -> float:
        loss = engine(tokens, labels=labels).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, None


BUILDERS = {"shardwise": build_shardwise, "fsdp2": build_fsdp2, "deepspeed": build_deepspeed}


if __name__ == "__main__":
    main()
