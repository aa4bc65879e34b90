"""The result of a benchmark: tables for people, JSON for programs, files to keep."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shardwise.bench.chart import draw
from shardwise.bench.run import HEADER_BYTES, RateResult, Result, Row

LEGEND = (
    "s/step: median of the rounds; rounds: the fastest and the slowest.",
    "x peer: median of the rounds' ratios to the fastest peer.",
    "sent: MB per step that the busiest node sent on its slow link, from the kernel's counters.",
    "plan: MB per step that leave a node according to `shardwise explain`, without headers.",
    f"of plan: sent, less {HEADER_BYTES} bytes of headers per packet, relative to plan.",
)


def to_dict(result: Result) -> dict[str, Any]:
    """The result as plain data for JSON."""
    bench = result.bench
    return {
        "nodes": bench.nodes,
        "ranks_per_node": bench.ranks,
        "model": bench.model,
        "seq": bench.seq,
        "dtype": bench.dtype,
        "latency_us": bench.latency_us,
        "steps": bench.steps,
        "warmup": bench.warmup,
        "rounds": bench.rounds,
        "header_bytes": HEADER_BYTES,
        "remarks": result.remarks,
        "absent": result.absent,
        "rates": [
            {
                "rate": str(at.rate),
                "bits_per_s": at.rate.bits_per_s,
                "best_peer": peer.contender if (peer := at.best_peer(bench.peer_names)) else None,
                "contenders": [_row_dict(at, row, peer) for row in at.rows],
            }
            for at in result.rates
        ],
    }


def print_tables(result: Result, console: Console) -> None:
    """Print one table per rate, and a legend."""
    bench = result.bench
    console.print(
        f"[bold]{bench.model}[/bold], {bench.dtype}, sequence {bench.seq}, "
        f"{bench.nodes} nodes × {bench.ranks} ranks, {bench.rounds} rounds of {bench.steps} steps",
        soft_wrap=True,
    )
    for remark in result.remarks:
        console.print(remark, style="yellow", soft_wrap=True)
    for at in result.rates:
        console.print(_table(result, at))
    for line in LEGEND:
        console.print(line, style="dim", soft_wrap=True)


def save(result: Result, directory: Path) -> list[Path]:
    """Write the result and its chart; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    data, chart = directory / "cluster.json", directory / "cluster.svg"
    data.write_text(json.dumps(to_dict(result), indent=2), encoding="utf-8")
    chart.write_text(draw(result), encoding="utf-8")
    return [data, chart]


def _row_dict(at: RateResult, row: Row, peer: Row | None) -> dict[str, Any]:
    nodes = sorted(row.sent_bytes)
    return {
        "name": row.contender,
        "seconds_per_step": row.seconds,
        "median_s": row.median_s,
        "ratio_to_best_peer": at.ratio(row, peer) if peer else None,
        "sent_bytes_per_step": [row.sent_per_step(node) for node in nodes],
        "payload_bytes_per_step": [row.payload_per_step(node) for node in nodes],
        "received_bytes_per_step": [row.received_bytes[node] / row.steps for node in nodes],
        "predicted_bytes_per_step": row.predicted_bytes,
        "payload_to_predicted": row.payload_to_predicted,
        "loss": row.loss,
    }


def _table(result: Result, at: RateResult) -> Table:
    peers = result.bench.peer_names
    best = at.best_peer(peers)
    named = "unshaped" if at.rate.bits_per_s is None else str(at.rate)
    latency = result.bench.latency_us
    table = Table(
        title=f"link {named}" + (f", latency {latency / 1000:g} ms" if latency else ""),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("contender", no_wrap=True)
    for heading in ("s/step", "rounds", "x peer", "sent", "plan", "of plan", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in result.bench.contenders:
        if name in result.absent:
            table.add_row(name, "", result.absent[name], style="dim")
    for row in at.rows:
        ratio, predicted = row.payload_to_predicted, row.predicted_bytes
        table.add_row(
            row.contender,
            f"{row.median_s:.2f}",
            f"{min(row.seconds):.2f}-{max(row.seconds):.2f}",
            f"{at.ratio(row, best):.2f}" if best else "-",
            _mega(row.most_sent),
            "-" if predicted is None else _mega(predicted),
            "-" if ratio is None else f"{ratio:.3f}",
            f"{row.loss:.4f}",
            style="dim" if row.contender in peers else None,
        )
    return table


def _mega(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f}"
