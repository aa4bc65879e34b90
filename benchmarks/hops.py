"""The speed of one hop: gloo's collectives, point-to-point messages, and reading peers' memory.

    python benchmarks/hops.py [--ranks 4] [--numel 16000000]

This measurement is the reason for the choice of a link (shardwise/comm/link.py). All ways take
turns in the same processes; the table shows the median wall time of an exchange in milliseconds.
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
from pathlib import Path

WAYS = ("gloo collective", "point to point", "peers' memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _work(args)
        return
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}",
             "--master-addr=127.0.0.1", f"--master-port={port}", __file__, "--worker", str(out),
             "--numel", str(args.numel), "--rounds", str(args.rounds)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=900,
        )  # fmt: skip
        rows = json.loads(out.read_text())
    print(f"\n{args.ranks} ranks, {args.numel:,} elements; milliseconds (median of {args.rounds})")
    print(f"{'':<22}" + "".join(f"{way:>18}" for way in WAYS))
    for label, times in rows.items():
        print(f"{label:<22}" + "".join(f"{times[way]:>18.1f}" for way in WAYS))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _work(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.comm.link import Labels, PeerLink, pieces
    from shardwise.comm.local import LocalLink, readable
    from shardwise.wire.codec import CastCodec

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    group, ranks, labels = dist.group.WORLD, tuple(range(world)), Labels()
    assert group is not None
    if not readable(group, ranks, rank):
        raise SystemExit("Processes may not read each other's memory here: nothing to compare.")
    links = {
        "point to point": PeerLink(group, ranks, rank, labels, 60.0),
        "peers' memory": LocalLink(group, ranks, rank, labels, 60.0),
    }
    rows: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        numel = args.numel // world * world
        buffer = torch.ones(numel, dtype=dtype)
        own, out = pieces(buffer, world)[rank], torch.zeros(numel // world)
        codec = CastCodec(dtype, buffer.device)

        def gather(way: str, buffer: torch.Tensor = buffer, own: torch.Tensor = own) -> None:
            if way in links:
                links[way].gather(buffer, 1)
                links[way].finish()
            else:
                dist.all_gather_into_tensor(buffer, own.clone())

        def reduce(
            way: str,
            buffer: torch.Tensor = buffer,
            own: torch.Tensor = own,
            out: torch.Tensor = out,
            codec: CastCodec = codec,
        ) -> None:
            if way in links:
                payload = buffer.view(torch.uint8)
                links[way].reduce(payload, own, out, 2, codec, scale=0.5, add=False)
                links[way].finish()
            else:
                dist.reduce_scatter_tensor(own.clone(), buffer)

        for verb in (gather, reduce):
            name = str(dtype).removeprefix("torch.")
            rows[f"{verb.__name__} {name}"] = _time(verb, args.rounds)
    if rank == 0:
        args.worker.write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts during teardown


def _time(verb, rounds: int) -> dict[str, float]:
    import torch.distributed as dist

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS:
            dist.barrier()
            begin = time.perf_counter()
            verb(way)
            dist.barrier()
            if turn:
                times[way].append((time.perf_counter() - begin) * 1e3)
    return {way: statistics.median(values) for way, values in times.items()}


if __name__ == "__main__":
    main()
