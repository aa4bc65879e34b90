"""The parts of the report, in their order, for the accelerators of this machine."""

from collections.abc import Callable
from typing import Any

import torch

from shardwise.bench.gpu import single
from shardwise.bench.gpu.report import Part, Row
from shardwise.bench.gpu.training import FSDP2
from shardwise.device.abilities import separate_memory
from shardwise.device.choice import local_device, make_current
from shardwise.device.facts import describe, find_abilities, first_line, versions
from shardwise.train import launch

CONTENDERS = (FSDP2, "zero3", "zeropp", "infinity")
_LARGEST_SHARE = 32
"""Collectives grow to this share of a device's memory."""
_MOST_BYTES = 1 << 30


def all_parts(model: str, seq: int, largest_bytes: int | None = None) -> list[Part]:
    """Every part; ``largest_bytes`` limits the sizes of collectives."""
    device = make_current(local_device())
    assert separate_memory(device)
    count = torch.accelerator.device_count()
    most = largest_bytes or min(_MOST_BYTES, _total_bytes(device) // _LARGEST_SHARE)
    return [
        Part("Versions", _versions),
        Part("Devices", lambda: _devices(device.type, count)),
        Part("Abilities", lambda: _abilities(device)),
        Part("Copies between host and device", lambda: single.copies(device), 5),
        Part("Streams", lambda: single.stream_order(device), 2),
        Part("Matrix products", lambda: single.products(device), 5),
        Part("Codecs", lambda: single.codecs(device), 60),
        Part("Collectives", lambda: _collectives(count, most), 60),
        Part(f"Training {model}", lambda: _training(model, seq, count), 180),
    ]


def _total_bytes(device: torch.device) -> int:
    return int(torch.accelerator.get_memory_info(device)[1])


def _versions() -> list[Row]:
    return [{"what": name, "version": version} for name, version in versions().items()]


def _devices(kind: str, count: int) -> list[Row]:
    return [describe(torch.device(kind, index)) for index in range(count)]


def _abilities(device: torch.device) -> list[Row]:
    return [
        {"ability": found.name, "there": found.there, "remark": found.remark}
        for found in find_abilities(device)
    ]


def _collectives(count: int, most: int) -> list[Row]:
    if count == 1:
        return [{"collective": "none, because there is one device"}]
    entry = "shardwise.bench.gpu.collectives:measure"
    rows: list[Row] = launch.run(entry, {"largest_bytes": most}, workers=count)
    return rows


def _training(model: str, seq: int, count: int) -> list[Row]:
    """All contenders in one job; if it fails, each in its own: an error of a device ends a process,
    and must not hide what the others do."""

    def run(*contenders: str) -> list[dict[str, Any]]:
        arguments = {
            "model": model, "seq": seq, "contenders": contenders, "levels": _levels(count),
        }  # fmt: skip
        rows: list[dict[str, Any]] = launch.run(
            "shardwise.bench.gpu.training:train", arguments, workers=count
        )
        return rows

    try:
        rows = run(*CONTENDERS)
    except Exception:  # of any kind: found again below
        rows = [row for name in CONTENDERS for row in _alone(run, name)]
    fsdp2 = next((row.get("step_s") for row in rows if row["contender"] == FSDP2), None)
    for row in rows:
        if fsdp2 and "step_s" in row:
            row["to_fsdp2"] = row["step_s"] / fsdp2
        if row.get("predicted_bytes"):
            row["to_predicted"] = row["peak_bytes"] / row["predicted_bytes"]
    return list(rows)


def _alone(run: Callable[..., list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    try:
        return run(name)
    except Exception as error:  # of any kind: the report goes on
        return [{"contender": name, "error": first_line(error)}]


def _levels(count: int) -> str | None:
    """Two levels where that is possible, so that hops between them run as well."""
    return f"node={count // 2},world=2" if count >= 4 and count % 2 == 0 else None
