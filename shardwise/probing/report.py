"""Prints a probed cluster as tables. Imports no torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.core.cluster import Cluster, Curve, LinkSpec
from shardwise.core.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FLOAT32_BYTES = 4


def print_cluster(cluster: Cluster, console: "Console") -> None:
    """Print what was measured as tables."""
    device = cluster.device
    console.print(f"[bold]{cluster.name}[/bold]: {device.name}, "
                  f"{format_bytes(device.memory_bytes)} per rank")  # fmt: skip
    for level in cluster.levels:
        if level.gather is not None and level.reduce is not None:
            console.print(_hops(level))
    console.print(_passes(device.forward, device.backward))
    console.print(_codecs(device.encode, device.decode))
    facts = {
        "update (AdamW)": f"{format_count(_best(device.update))} elements/s",
        "copy in memory": f"{format_bytes(_best(device.copy))}/s",
    }
    if cluster.host is not None:
        facts["host memory"] = f"{format_bytes(cluster.host.memory_bytes)} per node"
        facts["host to device"] = f"{format_bytes(cluster.host.bandwidth)}/s"
    if cluster.disk is not None:
        disk = cluster.disk
        facts["disk per node"] = (
            f"reads {format_bytes(disk.read)}/s, writes {format_bytes(disk.write)}/s, "
            f"{format_bytes(disk.size_bytes)} free"
        )
    table = _table("memory and disk", "", numbers_from=2)
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def _hops(level: LinkSpec) -> "Table":
    assert level.gather is not None
    assert level.reduce is not None
    table = _table(f"level {level.name}", "gather", "", "reduce", "")
    table.title = (
        f"{level.size} members over {level.source}; hops keep processors {level.busy:.0%} busy"
    )
    table.title_justify = "left"
    rows: dict[float, list[str]] = {}
    for column, curve in enumerate((level.gather, level.reduce)):
        for amount, seconds in _timed(curve):
            cells = rows.setdefault(amount, [""] * 4)
            cells[2 * column] = _seconds(seconds)
            cells[2 * column + 1] = f"{format_bytes(amount / seconds)}/s"
    for amount, cells in sorted(rows.items()):
        table.add_row(f"{format_bytes(amount)} sent by each rank", *cells)
    return table


def _passes(forward: Mapping[str, Curve], backward: Mapping[str, Curve]) -> "Table":
    table = _table("transformer block", "forward", "", "backward", "")
    for dtype in forward:
        both = zip(_timed(forward[dtype]), _timed(backward[dtype]), strict=False)
        for (flops, seconds), (back_flops, back_seconds) in both:
            table.add_row(
                f"{dtype}, {format_count(flops)} operations",
                _seconds(seconds),
                f"{flops / seconds / 1e9:.1f} GFLOP/s",
                _seconds(back_seconds),
                f"{back_flops / back_seconds / 1e9:.1f} GFLOP/s",
            )
    return table


def _codecs(encode: Mapping[str, Curve], decode: Mapping[str, Curve]) -> "Table":
    table = _table("codec (float32 bytes)", "encode", "decode")
    for kind in encode:
        rates = (FLOAT32_BYTES * _best(curves[kind]) for curves in (encode, decode))
        table.add_row(kind, *(f"{format_bytes(rate)}/s" for rate in rates))
    return table


def _timed(curve: Curve) -> list[tuple[float, float]]:
    """The points of a curve, without the origin that curves of rates have."""
    return [point for point in curve.points if min(point) > 0]


def _best(curve: Curve) -> float:
    """The rate of the largest amount."""
    amount, seconds = curve.points[-1]
    return amount / seconds


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _table(*columns: str, numbers_from: int = 1) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if index >= numbers_from else "left", overflow="fold"
        )
    return table
