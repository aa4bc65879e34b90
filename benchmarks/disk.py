"""The speed of the nvme tier beside fio, on the same disk in the same run.

    python benchmarks/disk.py --path /mnt/nvme [--size 2GiB] [--rounds 5]

The store and fio (direct, libaio, several block sizes and depths) take turns on the same file: they
write it, read it, and do both at once, with 4 bytes read for 3 written, like an optimizer step with
states on the disk. The table shows the median of the rounds, and the median of the rounds' ratios
to the setting of fio with the best median.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path

import torch

from shardwise.core.sizes import parse_bytes
from shardwise.core.ticket import Ticket
from shardwise.tier.aio import BLOCK_BYTES
from shardwise.tier.nvme import NvmeStore
from shardwise.tier.pool import zeros
from shardwise.tier.store import Record

JOBS = ("write", "read", "mixed")
READS, WRITES = 4, 3
"""Windows read and written in the mixed job."""
OURS = "shardwise"


def main() -> None:
    args = _parse()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed; install it (apt-get install fio).")
    with tempfile.TemporaryDirectory(prefix="disk-", dir=args.path) as folder:
        speeds = _measure(args, Path(folder))
    rows = [_row(job, speeds[job]) for job in JOBS]
    print(f"{args.size} bytes, {args.rounds} rounds; MB/s (median)")
    print(f"{'':<8}{OURS:>12}{'fio':>12}{'best of fio':>16}{'ratio':>8}{'lowest':>8}{'highest':>8}")
    for row in rows:
        print(
            f"{row['job']:<8}{row['ours']:>12.0f}{row['fio']:>12.0f}{row['setting']:>16}"
            f"{row['ratio']:>8.2f}{row['lowest']:>8.2f}{row['highest']:>8.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "speeds": speeds}, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--size", type=parse_bytes, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument(
        "--block", type=parse_bytes, default=BLOCK_BYTES, help="block size of the store"
    )
    parser.add_argument("--window", type=parse_bytes, default=32 << 20, help="bytes per move")
    parser.add_argument("--buffers", type=int, default=4, help="windows that move at once")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument(
        "--fio", default="1m:4,1m:16,4m:4,4m:16,4m:1:4", help="block:depth[:threads]"
    )
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Bytes per second, by job, contender and round."""
    speeds: dict[str, dict[str, list[float]]] = {job: defaultdict(list) for job in JOBS}
    contenders = [OURS, *args.fio.split(",")]
    ours = _Ours(args, folder)
    for turn in range(args.rounds + 1):
        for job in JOBS:
            for contender in contenders:
                run = ours.run if contender == OURS else _Fio(contender, args.size, ours.file).run
                speed = run(job)
                if turn:  # the first turn lays out the file
                    speeds[job][contender].append(speed)
        contenders.append(contenders.pop(0))  # so that none always follows the same one
    ours.store.close()
    return speeds


class _Ours:
    """A store with one record, moved in windows as in the runtime."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.store = NvmeStore(
            str(folder), rank=0, threads=args.threads, checksum=args.checksum,
            block_bytes=args.block,
        )  # fmt: skip
        self.file = f"/proc/{os.getpid()}/fd/{self.store._file}"
        """Its name for fio, so that both use the same place on the disk."""
        self._window = args.window
        self._num_windows = args.size // args.window
        self._record = self.store.reserve(self._num_windows * args.window, "the benchmark's record")
        self._buffers = [
            zeros(args.window, torch.uint8, torch.device("cpu")).random_()
            for _ in range(args.buffers)
        ]

    def run(self, job: str) -> float:
        begin = time.perf_counter()
        moving: deque[tuple[torch.Tensor, Ticket]] = deque()
        free = list(self._buffers)
        for index in range(self._num_windows):
            if not free:
                buffer, ticket = moving.popleft()
                ticket.block_host()
                free.append(buffer)
            buffer = free.pop()
            reads = job == "read" or (job == "mixed" and index % (READS + WRITES) % 2 == 0)
            moving.append((buffer, self._move(reads, buffer, self._record, index)))
        for _, ticket in moving:
            ticket.block_host()
        return self._num_windows * self._window / (time.perf_counter() - begin)

    def _move(self, reads: bool, buffer: torch.Tensor, record: Record, index: int) -> Ticket:
        move = self.store.get if reads else self.store.put
        return move(record, buffer, index * self._window)


class _Fio:
    """One setting of fio, such as 4m:16 or 4m:1:4, on an existing file."""

    def __init__(self, setting: str, size: int, file: str) -> None:
        block, depth, threads = (*setting.split(":"), "1")[:3]
        part = size // int(threads)
        self._command = [
            "fio", "--name=disk", f"--filename={file}", f"--bs={block}",
            f"--iodepth={depth}", "--thread", f"--numjobs={threads}", f"--size={part}",
            f"--offset_increment={part}", "--group_reporting", "--ioengine=libaio", "--direct=1",
            "--overwrite=1", f"--rwmixread={round(100 * READS / (READS + WRITES))}",
            "--output-format=json",
        ]  # fmt: skip

    def run(self, job: str) -> float:
        pattern = "--rw=rw" if job == "mixed" else f"--rw={job}"
        done = subprocess.run([*self._command, pattern], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"fio failed: {done.stderr.strip()}")
        [found] = json.loads(done.stdout)["jobs"]
        moved = found["read"]["io_bytes"] + found["write"]["io_bytes"]
        return moved / max(found["read"]["runtime"], found["write"]["runtime"]) * 1e3


def _row(job: str, speeds: dict[str, list[float]]) -> dict[str, float | str]:
    ours = speeds[OURS]
    settings = [setting for setting in speeds if setting != OURS]
    best = max(settings, key=lambda setting: statistics.median(speeds[setting]))
    ratios = [mine / theirs for mine, theirs in zip(ours, speeds[best], strict=True)]
    return {
        "job": job,
        "ours": statistics.median(ours) / 1e6,
        "fio": statistics.median(speeds[best]) / 1e6,
        "setting": best,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


if __name__ == "__main__":
    main()
