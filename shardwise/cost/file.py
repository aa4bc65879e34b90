"""Clusters as TOML files, as in the catalogue and from ``shardwise probe``; every key is checked.

A speed is either a rate with its source, or a measured curve: a list of [amount, seconds].
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.core.cluster import Cluster, ClusterError, Curve, Device, Disk, Host, LinkSpec
from shardwise.core.errors import PlanError
from shardwise.core.sizes import parse_bytes
from shardwise.core.wire import CAST_BYTES, CODE_BITS

UPDATE_BYTES = 28
"""Bytes that AdamW moves in memory per element: it reads the master, two moments and the gradient
(16) and writes the first three (12). The copy in the compute dtype is priced separately."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Points = list[tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]]


class _Table(BaseModel):
    """Base of every table: unknown keys are errors, whole numbers may stand for floats."""

    model_config = ConfigDict(extra="forbid")


class LevelTable(_Table):
    """``[[levels]]``, innermost first."""

    name: str
    size: Annotated[int, Field(ge=1)]
    bandwidth: Rate | None = None
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    gather: Points | None = None
    reduce: Points | None = None
    busy: Share | None = None
    source: str = ""


class DeviceTable(_Table):
    """``[device]``: rates (``flops``, ``memory_bandwidth``), or measured curves, or both."""

    name: str
    kind: Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
    """``cpu``, whose memory is the host's, or torch's name of an accelerator."""
    memory: int | str
    flops: dict[str, Rate] = {}
    """By dtype: operations per second that a transformer reaches without communication."""
    memory_bandwidth: Rate | None = None
    forward: dict[str, Points] = {}
    backward: dict[str, Points] = {}
    update: Points | None = None
    copies: Points | None = None
    encode: dict[str, Points] = {}
    decode: dict[str, Points] = {}
    share: Share = 1.0
    source: str = ""


class HostTable(_Table):
    """``[host]``."""

    memory: int | str
    bandwidth: Rate
    update_rate: Rate | None = None
    """Elements per second that one rank's AdamW updates there."""
    update: Points | None = None
    source: str = ""


class DiskTable(_Table):
    """``[disk]``."""

    size: int | str
    read: Rate
    write: Rate
    source: str = ""


class ClusterTable(_Table):
    """The whole file."""

    name: str
    levels: list[LevelTable]
    device: DeviceTable
    host: HostTable | None = None
    disk: DiskTable | None = None
    source: str = ""


_POINT = re.compile(r"\[\s+([^\s,\[\]]+),\s+([^\s,\[\]]+),\s+\]")
"""A pair of numbers as tomli_w writes it, on four lines; we write one point of a curve per line."""


def catalogue() -> dict[str, Path]:
    """The clusters that come with shardwise, by name."""
    folder = Path(str(resources.files("shardwise.cost") / "catalogue"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_cluster(source: Cluster | str | os.PathLike[str]) -> Cluster:
    """A cluster by its name in the catalogue or the path of a .toml file; a Cluster as it is."""
    if isinstance(source, Cluster):
        return source
    known = catalogue()
    path = known.get(str(source), Path(source))
    if path.suffix != ".toml":
        from difflib import get_close_matches

        near = get_close_matches(str(source), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(known)}."
        raise ClusterError(
            f"Cluster '{source}' is neither in the catalogue nor the path of a .toml file; {hint}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"Cluster file {path} cannot be read ({reason}); make one with shardwise probe -o, "
            f"or use one of {', '.join(known)}."
        ) from None
    return parse_cluster(text, origin=str(path))


def parse_cluster(text: str, *, origin: str = "cluster.toml") -> Cluster:
    """A cluster from the text of a file; ``origin`` is the file's name in errors."""
    try:
        table = ClusterTable.model_validate(tomllib.loads(text))
        return _cluster(table)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"Cluster file {origin} is not TOML: {error}; correct it.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ClusterError(
            f"In cluster file {origin}, '{key}': {first['msg'].lower()}; correct it there."
        ) from None
    except PlanError as error:
        raise ClusterError(f"In cluster file {origin}: {error}") from None


def dump_cluster(cluster: Cluster) -> str:
    """A cluster as TOML, with every curve as a list of points."""
    table = _plain(cluster)
    for name, key in (("device", "memory"), ("host", "memory"), ("disk", "size")):
        if name in table:
            table[name][key] = table[name].pop(f"{key}_bytes")
    table["device"]["copies"] = table["device"].pop("copy")
    return _POINT.sub(r"[\1, \2]", tomli_w.dumps(table))


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return [[float(amount), float(seconds)] for amount, seconds in value.points]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    items = {field.name: getattr(value, field.name) for field in fields(value)}
    return {key: _plain(item) for key, item in items.items() if item not in (None, "", {})}


def _cluster(table: ClusterTable) -> Cluster:
    levels = tuple(
        LinkSpec(
            **level.model_dump(exclude={"gather", "reduce", "busy"}),
            busy=_busy(level),
            gather=_curve(level.gather),
            reduce=_curve(level.reduce),
        )
        for level in table.levels
    )
    host = disk = None
    if table.host is not None:
        update = _curve(table.host.update)
        if update is None and table.host.update_rate is not None:
            update = Curve.of_rate(table.host.update_rate)
        host = Host(
            memory_bytes=parse_bytes(table.host.memory, "host.memory"),
            bandwidth=table.host.bandwidth,
            update=update,
            source=table.host.source,
        )
    if table.disk is not None:
        disk = Disk(
            size_bytes=parse_bytes(table.disk.size, "disk.size"),
            read=table.disk.read,
            write=table.disk.write,
            source=table.disk.source,
        )
    return Cluster(
        name=table.name,
        levels=levels,
        device=_device(table.device),
        host=host,
        disk=disk,
        source=table.source,
    )


def _busy(level: LevelTable) -> float:
    if level.busy is None and level.size > 1:
        raise ClusterError(
            f"level '{level.name}' does not tell how busy its transfers keep the compute device; "
            "add busy, between 0 (not at all) and 1."
        )
    return level.busy or 0.0


def _device(table: DeviceTable) -> Device:
    """A device from its measured curves, or from rates: copies run at the memory's bandwidth."""
    rates = {dtype: Curve.of_rate(rate) for dtype, rate in table.flops.items()}
    memory = table.memory_bandwidth
    update, copies = _curve(table.update), _curve(table.copies)
    encode = {kind: Curve(tuple(points)) for kind, points in table.encode.items()}
    decode = {kind: Curve(tuple(points)) for kind, points in table.decode.items()}
    if memory is not None:
        update = update or Curve.of_rate(memory / UPDATE_BYTES)
        copies = copies or Curve.of_rate(memory / 2)
        for kind, size in _wire_sizes().items():
            moved = Curve.of_rate(memory / (4 + size))  # four bytes in or out, and the payload
            encode.setdefault(kind, moved)
            decode.setdefault(kind, moved)
    forward = {**rates, **{k: Curve(tuple(points)) for k, points in table.forward.items()}}
    backward = {**rates, **{k: Curve(tuple(points)) for k, points in table.backward.items()}}
    if not forward or not backward or update is None or copies is None:
        raise ClusterError(
            f"Device '{table.name}' needs flops (or measured forward and backward) and "
            "memory_bandwidth (or measured update and copies)."
        )
    return Device(
        name=table.name,
        kind=table.kind,
        memory_bytes=parse_bytes(table.memory, "device.memory"),
        forward=forward,
        backward=backward,
        update=update,
        copy=copies,
        encode=encode,
        decode=decode,
        share=table.share,
        source=table.source,
    )


def _wire_sizes() -> dict[str, float]:
    """Bytes per element by kind of wire format, without scales."""
    blocked = {kind: bits / 8 for kind, bits in CODE_BITS.items()}
    return {**{kind: float(size) for kind, size in CAST_BYTES.items()}, **blocked}


def _curve(points: Points | None) -> Curve | None:
    return Curve(tuple(points)) if points is not None else None
