"""Speed and error of the wire formats on one core, beside a plain copy of the same memory.

    python benchmarks/codecs.py [--sizes 262144,16777216] [--rounds 9] [--json out.json]

Speeds are gigabytes of float32 (or bfloat16) input or output per second of the thread's CPU time,
which other processes disturb less than wall time; ``--wall`` measures wall time instead. All ways
take turns in the same process, and the table shows medians. A second table has the bits per element
and the relative RMS error of Gaussian values, of values with heavy tails like those of gradients
(Student's t with three degrees of freedom), and of Gaussian values around a mean of one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwise.core.wire import Format
from shardwise.wire import make_codec

FORMATS = ("fp32", "bf16", "fp16", "int8", "int8/symmetric", "int4", "int4/symmetric")
ERROR_FORMATS = (*FORMATS[1:], "int4/64", "int4/64/symmetric")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VERBS = ("encode", "decode", "add")
ERROR_NUMEL = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--sizes", default="65536,1048576,16777216", help="elements, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall", action="store_true", help="wall time instead of CPU time")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.perf_counter if args.wall else time.thread_time
    sizes = [int(size) for size in args.sizes.split(",")]
    speeds = [row for numel in sizes for row in measure(numel, args.rounds, clock)]
    errors = [error_row(text) for text in ERROR_FORMATS]
    if args.json:
        args.json.write_text(json.dumps({"speeds": speeds, "errors": errors}, indent=1))
    console = Console(width=max(100, Console().width))
    console.print(
        table(
            "GB/s of values on one core (relative to the copy)",
            [row | {verb: f"{row[verb]:.2f} ({row[verb] / row['copy']:.2f})" for verb in VERBS}
             | {"copy": f"{row['copy']:.2f}"} for row in speeds],
        )
    )  # fmt: skip
    console.print(table("Bits per element, and relative RMS error", errors))


def measure(numel: int, rounds: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Speeds at one size: a row per dtype of the values and format."""
    rows: list[dict[str, Any]] = []
    # Short calls are repeated, so that the clock's resolution does not matter.
    repeats = max(1, (1 << 22) // numel)
    for name, dtype in DTYPES.items():
        values = (torch.randn(numel) * 1e-3).to(dtype)
        out, total = torch.zeros_like(values), torch.zeros(numel)
        ways: dict[tuple[str, str], Callable[[], object]] = {
            ("copy", "copy"): lambda values=values, out=out: out.copy_(values)
        }
        for text in FORMATS:
            ways |= ways_of(text, values, out, total)
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):  # the first warms up
            for way, call in ways.items():
                start = clock()
                for _ in range(repeats):
                    call()
                times[way].append((clock() - start) / repeats)
        volume = numel * dtype.itemsize / 1e9
        speed = {way: volume / statistics.median(spent[1:]) for way, spent in times.items()}
        copy = speed["copy", "copy"]
        for text in FORMATS:
            row: dict[str, Any] = {"elements": numel, "values": name, "format": text}
            rows.append(row | {verb: speed[text, verb] for verb in VERBS} | {"copy": copy})
    return rows


def ways_of(
    text: str, values: Tensor, out: Tensor, total: Tensor
) -> dict[tuple[str, str], Callable[[], object]]:
    """What is timed for one format."""
    codec = make_codec(Format.parse(text), values.numel())
    payload = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
    return {
        (text, "encode"): lambda: codec.encode(values, payload),
        (text, "decode"): lambda: codec.decode(payload, out),
        (text, "add"): lambda: codec.add(payload, total),
    }


def error_row(text: str) -> dict[str, Any]:
    """Bits and errors of one format."""
    torch.manual_seed(0)
    gaussian = torch.randn(ERROR_NUMEL)
    heavy = torch.distributions.StudentT(3.0).sample((ERROR_NUMEL,))
    spec = Format.parse(text)
    row: dict[str, Any] = {"format": text, "bits": spec.bits}
    samples = {"Gaussian": gaussian, "heavy tails": heavy, "around one": 1 + 0.02 * gaussian}
    for name, values in samples.items():
        codec, out = make_codec(spec, ERROR_NUMEL), torch.empty_like(values)
        payload = torch.empty(codec.nbytes(ERROR_NUMEL), dtype=torch.uint8)
        codec.encode(values, payload)
        codec.decode(payload, out)
        row[name] = float(f"{(out - values).norm() / values.norm():.3g}")
    return row


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    grid = Table(*rows[0], title=title)
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row.values())
        grid.add_row(*cells)
    return grid


if __name__ == "__main__":
    main()
