"""`shardwise simulate`: a plan's step on a cluster, over a range of ranks, links or batches."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.common import JSON_OPTION, print_json
from shardwise.core.errors import PlanError, UsageError
from shardwise.core.sizes import parse_rate

if TYPE_CHECKING:
    from shardwise.core.cluster import Cluster
    from shardwise.core.trace import Count
    from shardwise.cost.simulate import Estimate
    from shardwise.planner.request import Overflow
    from shardwise.plans.facts import Facts
    from shardwise.plans.plan import Plan

UPDATES = ("update", "copies")
"""Uses that tables show as one: neither is the model's own work, nor a transfer."""
WIDTH = 108
"""Characters per line that the table needs so that no figure is broken."""
LOG_FACTOR = 8
"""Ranges that span at least this factor are drawn on a logarithmic axis."""


def simulate(
    plan: Annotated[str, typer.Argument(help="A preset's name or a plan's TOML file.")],
    cluster: Annotated[
        str, typer.Option(help="A name such as dgx-a100, or a file written by shardwise probe.")
    ],
    model: Annotated[
        str, typer.Option(help="llama-7b, gpt-1.3b, transformers:gpt2, or a config.json.")
    ] = "llama-7b",
    ranks: Annotated[
        str, typer.Option(help="Number of ranks: 8,64,512. Default: all of the cluster.")
    ] = "",
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            help="Of each member's link on a level: world=10gbit,25gbit or node=300GB/s; "
            "may be repeated."
        ),
    ] = None,
    micro_batch: Annotated[str, typer.Option(help="Sequences per rank: 1,2,4.")] = "1",
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of compute and transfers. Default: the plan's, or bfloat16 if the device has it."
        ),
    ] = None,
    flat: Annotated[
        bool,
        typer.Option(
            "--flat", help="Price each collective as one ring over all ranks, not hop by hop."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .svg or .png file for a chart of the range."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A .json file for a trace of the step, for Chrome or Perfetto."),
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Predict a plan's step time and memory, over a range of ranks, bandwidths or micro-batches.

    One of --ranks, --bandwidth and --micro-batch may have several values.

    Examples:

      shardwise simulate zero3 --model llama-7b --cluster a800-amsp --ranks 8,64,512

      shardwise simulate lean --cluster dgx-a100 --bandwidth world=10gbit,100gbit -o chart.svg

      shardwise simulate amsp --cluster dgx-h100 --ranks 64 --trace step.json
    """
    from shardwise.cost.file import load_cluster
    from shardwise.model.named import facts_of
    from shardwise.planner.chart import check_chart
    from shardwise.planning import with_precision
    from shardwise.plans.file import load_plan

    described = load_cluster(cluster)
    cases, varies = _cases(described, ranks, bandwidth or [], micro_batch)
    if trace is not None and len(cases) > 1:
        raise UsageError(f"--trace shows one step; give one value of --{varies}.")
    if output is not None:
        if len(cases) < 2:
            raise UsageError("A chart needs a range; give --ranks, --bandwidth or --micro-batch "
                             "several values.")  # fmt: skip
        check_chart(output)
    chosen = with_precision(load_plan(plan), described, dtype)
    simulation = Simulation(chosen, facts_of(model), described.name, varies, accumulate, seq, flat)
    rows = [simulation.run(case, spans=trace is not None) for case in cases]
    written = _write(simulation, rows, output, trace)
    if as_json:
        print_json(simulation.to_dict(rows))
    else:
        _print(simulation, rows, written)


@dataclass(frozen=True)
class Case:
    """One value of the range."""

    label: str
    at: float
    """Its position on the chart's axis."""
    cluster: "Cluster"
    micro_batch: int


@dataclass(frozen=True)
class Row:
    """The result of a case."""

    case: Case
    estimate: "Estimate"
    overflows: "list[Overflow]"


@dataclass(frozen=True)
class Simulation:
    """What all cases have in common."""

    plan: "Plan"
    facts: "Facts"
    cluster: str
    varies: str
    """``ranks``, ``micro-batch``, or ``bandwidth`` and a level."""
    accumulate: int
    seq: int
    flat: bool

    def run(self, case: Case, *, spans: bool) -> Row:
        from shardwise.planner.request import Request, overflows
        from shardwise.planning import simulate as simulate_plan

        estimate = simulate_plan(
            self.plan,
            self.facts,
            case.cluster,
            micro_batch=case.micro_batch,
            accumulate=self.accumulate,
            seq=self.seq,
            flat=self.flat,
            spans=spans,
        )
        sequences = case.micro_batch * self.accumulate * case.cluster.world
        request = Request(
            facts=self.facts, cluster=case.cluster, global_batch=sequences, seq=self.seq
        )
        return Row(case, estimate, list(overflows(estimate.memory, request)))

    @property
    def title(self) -> str:
        collectives = ", flat collectives" if self.flat else ""
        return f"{self.plan.name}: {self.facts.name} on {self.cluster}{collectives}"

    def to_dict(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The result as plain data for JSON."""
        from shardwise.plans.file import dump_plan

        return {
            "plan": tomllib.loads(dump_plan(self.plan)),
            "model": self.facts.name,
            "cluster": self.cluster,
            "varies": self.varies,
            "accumulate": self.accumulate,
            "seq": self.seq,
            "flat": self.flat,
            "rows": [_row_dict(row) for row in rows],
        }


def _row_dict(row: Row) -> dict[str, Any]:
    estimate, case = row.estimate, row.case
    return {
        "ranks": case.cluster.world,
        "micro_batch": case.micro_batch,
        "bandwidth": {level.name: level.bandwidth for level in case.cluster.levels},
        "step_s": estimate.step_s,
        "tokens_per_s": estimate.tokens_per_s,
        "flops_per_s": estimate.flops_per_s,
        "exposed": estimate.exposed,
        "memory": {
            "device": estimate.memory.total,
            "cpu": estimate.memory.cpu,
            "nvme": estimate.memory.nvme,
        },
        "fits": not row.overflows,
    }


# --- the range ------------------------------------------------------------------------------------


def _cases(
    cluster: "Cluster", ranks: str, bandwidths: Sequence[str], micro_batch: str
) -> tuple[list[Case], str]:
    """The cases in the order given, and the name of the option that differs between them."""
    worlds = _counts(ranks, "--ranks") if ranks else [cluster.world]
    batches = _counts(micro_batch, "--micro-batch")
    links = [_links(text) for text in bandwidths]
    level, rates = next((link for link in links if len(link[1]) > 1), ("", [""]))
    ranges = [f"--bandwidth {name}" for name, texts in links if len(texts) > 1]
    ranges += ["--ranks"] if len(worlds) > 1 else []
    ranges += ["--micro-batch"] if len(batches) > 1 else []
    if len(ranges) > 1:
        raise UsageError(
            f"{' and '.join(ranges)} have several values each; give only one of them a range."
        )
    for name, texts in links:
        if len(texts) == 1:
            cluster = cluster.with_bandwidth(name, parse_rate(texts[0]))
    cases = []
    for world in worlds:
        for batch in batches:
            for rate in rates:
                at, label = float(world), f"{world:,}"
                here = cluster.with_world(world)
                if rate:
                    at, label = parse_rate(rate), rate.strip()
                    here = here.with_bandwidth(level, at)
                elif len(batches) > 1:
                    at, label = float(batch), str(batch)
                cases.append(Case(label, at, here, batch))
    return cases, ranges[0].removeprefix("--") if ranges else "ranks"


def _counts(text: str, option: str) -> list[int]:
    values = [item.strip() for item in text.split(",")]
    if not all(value.isdecimal() and int(value) for value in values):
        raise UsageError(f"{option} '{text}' is not a list of numbers; write for example 8,64,512.")
    return [int(value) for value in values]


def _links(text: str) -> tuple[str, list[str]]:
    """A level and the rates of its links; raises if one cannot be read."""
    level, equals, rates = text.partition("=")
    if not equals or not level.strip():
        raise UsageError(f"--bandwidth '{text}' is not LEVEL=RATE; write for example world=25gbit.")
    values = rates.split(",")
    for value in values:
        try:
            parse_rate(value)
        except PlanError as error:
            raise UsageError(f"In --bandwidth '{text}', {error}") from None
    return level.strip(), values


# --- files ----------------------------------------------------------------------------------------


def _write(
    simulation: Simulation, rows: Sequence[Row], output: Path | None, trace: Path | None
) -> list[Path]:
    """Write the requested files and return their paths."""
    from shardwise.core.trace import Trace
    from shardwise.planner.chart import write_chart

    if output is not None:
        write_chart(output, _chart(simulation, rows))
    if trace is not None:
        recorded = Trace()
        recorded.spans = rows[0].estimate.spans
        recorded.counts = _memory_counts(simulation, rows[0])
        try:
            recorded.save(trace, predicted=True)
        except OSError as error:
            raise UsageError(f"{trace} cannot be written: {error.strerror}.") from None
    return [path for path in (output, trace) if path is not None]


def _memory_counts(simulation: Simulation, row: Row) -> "list[Count]":
    """What the device holds at the start of each unit's compute."""
    from shardwise.core.trace import Count
    from shardwise.plans.along import along

    topology, plan = row.case.cluster.topology, row.estimate.plan
    saved = simulation.facts.work(row.case.micro_batch, simulation.seq, plan, topology).saved
    moments = along(
        plan,
        simulation.facts.spec(plan, topology),
        topology,
        saved,
        accumulates=simulation.accumulate > 1,
        accelerated=row.case.cluster.device.is_accelerator,
    )
    held = {moment.name: moment.causes() for moment in moments}
    spans = [span for span in row.estimate.spans if span.track == "compute"]
    return [Count("memory", s.begin_s, held[s.name]) for s in spans if s.name in held]


def _chart(simulation: Simulation, rows: Sequence[Row]) -> str:
    """Operations per second of a rank, beside what they would be if all transfers were hidden."""
    from shardwise.planner.chart import draw_lines

    is_rate = simulation.varies.startswith("bandwidth")
    at = [row.case.at * (8e-9 if is_rate else 1) for row in rows]  # links are sold in Gbit/s
    reached = [row.estimate.flops_per_s / 1e12 for row in rows]
    alone = [row.estimate.flops / _own_seconds(row.estimate) / 1e12 for row in rows]
    unit = ", Gbit/s" if is_rate else ""
    return draw_lines(
        [
            (simulation.plan.name, list(zip(at, reached, strict=True))),
            ("without transfers", list(zip(at, alone, strict=True))),
        ],
        simulation.title,
        simulation.varies + unit,
        "TFLOP/s per rank",
        log_x=max(at) >= LOG_FACTOR * min(at),
    )


def _own_seconds(estimate: "Estimate") -> float:
    return sum(estimate.exposed[use] for use in ("compute", "copies", "update"))


# --- for people -----------------------------------------------------------------------------------


def _print(simulation: Simulation, rows: Sequence[Row], written: Sequence[Path]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from shardwise.core.sizes import format_bytes, format_count

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(simulation.title, style="bold", markup=False)
    shares = [_shares(row.estimate) for row in rows]
    uses = [use for use in shares[0] if any(share[use] >= 5e-3 for share in shares)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = (simulation.varies, "s/step", "tokens/s", "TFLOP/s", *uses, "memory", "fits")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row, share in zip(rows, shares, strict=True):
        estimate = row.estimate
        table.add_row(
            row.case.label,
            f"{estimate.step_s:.3g}",
            format_count(estimate.tokens_per_s),
            f"{estimate.flops_per_s / 1e12:.3g}",
            *(f"{share[use]:.0%}" for use in uses),
            format_bytes(estimate.memory.total),
            "no" if row.overflows else "yes",
        )
    console.print(table)
    console.print(
        "TFLOP/s and memory are per rank. Percentages are of the step; transfers count only where "
        "exposed, update includes copies.",
        style="dim",
    )
    for row in rows:
        for short in row.overflows:
            console.print(
                f"{row.case.label}: needs {format_bytes(short.needed)} on {short.tier}, which has "
                f"{format_bytes(short.available)}.",
                markup=False,
            )
    for path in written:
        console.print(f"written: {path}", markup=False, soft_wrap=True)


def _shares(estimate: "Estimate") -> dict[str, float]:
    """The share of a step that each use takes."""
    seconds = {use: s for use, s in estimate.exposed.items() if use not in UPDATES}
    seconds["update"] = sum(estimate.exposed[use] for use in UPDATES)
    return {use: value / estimate.step_s for use, value in seconds.items()}
