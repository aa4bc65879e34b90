"""`shardwise explain`: what a plan does in a step, on which links, and what it needs in memory."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.common import JSON_OPTION, print_json
from shardwise.cli.events import Row, rows
from shardwise.core.layout import ModelSpec, UnitSpec
from shardwise.core.sizes import format_bytes, format_count
from shardwise.core.topology import Topology
from shardwise.core.work import Work
from shardwise.model.named import facts_of
from shardwise.plans.expected import schedule
from shardwise.plans.file import dump_plan, load_plan
from shardwise.plans.memory import Memory, memory
from shardwise.plans.ops import Phase
from shardwise.plans.plan import Plan, Rungs, resolve
from shardwise.plans.traffic import Traffic, Use, step_traffic
from shardwise.plans.validate import check, spreads

if TYPE_CHECKING:
    from rich.table import Table

MEMORY_TERMS = (
    "params",
    "kept",
    "gathered",
    "grads",
    "grad_buffers",
    "optim",
    "staging",
    "wires",
    "activations",
    "allowance",
    "total",
)
TIER_TERMS = ("cpu", "nvme")
"""What rests on other tiers; none of the total."""


def explain(
    plan: Annotated[str, typer.Argument(help="A preset's name or a plan's TOML file.")],
    model: Annotated[
        str,
        typer.Option(help="gpt-small, llama3-8b, transformers:gpt2, or a config.json."),
    ] = "gpt-small",
    levels: Annotated[
        str, typer.Option(help="Grid of ranks, innermost first: node=2,world=2.")
    ] = "node=2,world=2",
    accumulate: Annotated[
        int, typer.Option(min=1, help="Micro-batches a step, all but the last under no_sync.")
    ] = 1,
    phase: Annotated[
        Phase | None,
        typer.Option(help="The pass whose schedule is shown; by default the one that steps."),
    ] = None,
    micro_batch: Annotated[
        int, typer.Option(min=1, help="Sequences a rank and micro-batch, for activations.")
    ] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens a sequence, for activations.")] = 128,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show what a plan does: where states rest, each pass, bytes on each link, memory a rank.

    Examples:

      shardwise explain zero3 --levels node=8,world=16 --model gpt-xl

      shardwise explain amsp --accumulate 4 --phase middle
    """
    chosen = load_plan(plan)
    topology = Topology.parse(levels)
    check(chosen, topology)
    explanation = Explanation(
        plan=chosen,
        topology=topology,
        model=_describe(model, chosen, topology),
        accumulate=accumulate,
        phase=phase or (Phase.ONLY if accumulate == 1 else Phase.LAST),
        work=facts_of(model).work(micro_batch, seq, chosen, topology),
    )
    check(chosen, topology, explanation.model)
    if as_json:
        print_json(to_dict(explanation))
    else:
        _print(explanation)


@dataclass(frozen=True)
class Explanation:
    """A plan on a topology with a model, and the questions asked about it."""

    plan: Plan
    topology: Topology
    model: ModelSpec
    accumulate: int
    phase: Phase
    work: Work

    @property
    def traffic(self) -> Traffic:
        return step_traffic(self.plan, self.model, self.topology, accumulate=self.accumulate)

    @property
    def memory(self) -> Memory:
        return memory(
            self.plan,
            self.model,
            self.topology,
            accumulates=self.accumulate > 1,
            saved=self.work.saved,
        )

    def rows(self) -> Iterator[Row]:
        """The operations of the pass, of one unit of each group."""
        events = schedule(
            self.plan, self.model, self.topology, self.phase, input_bytes=self.work.input_bytes
        )
        groups = group_units(self.plan, self.model, self.topology)
        shown = {group.middle: (group.label, len(group.names)) for group in groups}
        return rows(events, self.model, shown)


@dataclass(frozen=True)
class UnitGroup:
    """Neighbouring units of equal shape under equal plans, shown as one."""

    names: tuple[str, ...]
    first: UnitSpec
    rungs: Rungs

    @property
    def middle(self) -> str:
        """The unit that stands for all: what is done ahead of the first ones is done otherwise."""
        return self.names[len(self.names) // 2]

    @property
    def label(self) -> str:
        """``h.*`` for h.0, h.1, ...; the root of a model has no name of its own."""
        if len(self.names) == 1:
            return self.names[0] or "(root)"
        parts = [name.split(".") for name in self.names]
        if len({len(part) for part in parts}) > 1:
            return f"{self.names[0]} ... {self.names[-1]}"
        columns = zip(*parts, strict=True)
        return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)

    @property
    def title(self) -> str:
        return self.label if len(self.names) == 1 else f"{len(self.names)} × {self.label}"


def group_units(plan: Plan, model: ModelSpec, topology: Topology) -> list[UnitGroup]:
    """The units of a model with equal neighbours collapsed; the root stays alone."""

    def shape(item: tuple[int, UnitSpec]) -> object:
        index, unit = item
        flats = tuple((flat.numel, flat.dtype, flat.requires_grad) for flat in unit.flats)
        return index == 0, flats, resolve(plan, topology, unit.name)

    groups = []
    for _, members in groupby(enumerate(model.units), key=shape):
        units = [unit for _, unit in members]
        names = tuple(unit.name for unit in units)
        groups.append(UnitGroup(names, units[0], resolve(plan, topology, units[0].name)))
    return groups


def to_dict(explanation: Explanation) -> dict[str, Any]:
    """The explanation in JSON's types."""
    plan, topology = explanation.plan, explanation.topology
    groups = group_units(plan, explanation.model, topology)
    traffic = explanation.traffic
    return {
        "plan": tomllib.loads(dump_plan(plan)),
        "levels": str(topology),
        "accumulate": explanation.accumulate,
        "units": [
            {
                "unit": group.label,
                "count": len(group.names),
                "numel": group.first.numel,
                "rests": {
                    state: {"rung": rung, "parts": group.rungs.ladder.parts[rung]}
                    for state, rung in _rests(group.rungs).items()
                },
            }
            for group in groups
        ],
        "phase": explanation.phase.value,
        "schedule": [row.to_dict() for row in explanation.rows()],
        "traffic": [
            {"use": flow.use.value, "level": flow.level, "sent_bytes": flow.sent_bytes}
            for flow in traffic.flows
        ],
        "leaving": [
            {"level": leaving.level, "ranks": leaving.num_ranks, "sent_bytes": leaving.sent_bytes}
            for leaving in traffic.leaving(topology)
        ],
        "memory": {
            term: getattr(explanation.memory, term) for term in (*MEMORY_TERMS, *TIER_TERMS)
        },
    }


def _describe(name: str, plan: Plan, topology: Topology) -> ModelSpec:
    return facts_of(name).spec(plan, topology)


def _rests(rungs: Rungs) -> dict[str, int]:
    return {"P": rungs.params, "G": rungs.grads, "OS": rungs.optim, "keep": rungs.keep}


def _print(explanation: Explanation) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    plan, topology, model = explanation.plan, explanation.topology, explanation.model
    groups = group_units(plan, model, topology)
    console.print(
        f"Plan [bold]{escape(plan.name)}[/bold] on {topology} ({_ranks(topology.world)}), "
        f"{len(model.units)} units, {format_count(model.numel)} parameters\n"
    )
    console.print("[bold]Where states rest[/bold]", _resolved_table(explanation, groups))
    for rungs, members in groupby(groups, key=lambda group: group.rungs):
        titles = ", ".join(group.title for group in members)
        console.print(f"[bold]Ladder[/bold] of {titles}")
        for line in ladder_lines(rungs, topology):
            console.print(f"  {line}", markup=False)
    console.print(
        f"\n[bold]A pass, phase '{explanation.phase}'[/bold], with what a rank sends for one unit",
        _schedule_table(explanation),
    )
    batches = f" of {explanation.accumulate} micro-batches" if explanation.accumulate > 1 else ""
    console.print(
        f"[bold]Bytes that each rank sends[/bold] in a step{batches}", _traffic_table(explanation)
    )
    for leaving in explanation.traffic.leaving(topology):
        console.print(
            f"  leaving one {leaving.level} ({_ranks(leaving.num_ranks)}): "
            f"{format_bytes(leaving.sent_bytes)} a step"
        )
    console.print("\n[bold]Memory a rank[/bold]", _memory_table(explanation))


def ladder_lines(rungs: Rungs, topology: Topology) -> Iterator[str]:
    """A picture of the ladder from the full buffer down, with what rests on each rung."""
    names = spreads(topology)
    for rung, parts in enumerate(rungs.ladder.parts):
        resting = [state for state, at in _rests(rungs).items() if at == rung]
        if rungs.keep == rungs.params and "keep" in resting:
            resting.remove("keep")
        name = "full" if parts == 1 else names[parts]
        mark = f"  <- {', '.join(resting)}" if resting else ""
        yield f"rung {rung}  {name:<10} 1/{parts:<6}{mark}".rstrip()
        if rung < rungs.bottom:
            step = rungs.ladder.steps[rung]
            yield f"  |     {_ranks(step.size)} on {step.level}, {step.stride} apart"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _table(*columns: str, numbers_from: int = 1) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if index >= numbers_from else "left", overflow="fold"
        )
    return table


def _resolved_table(explanation: Explanation, groups: list[UnitGroup]) -> "Table":
    names = spreads(explanation.topology)
    table = _table("units", "parameters", "P", "G", "OS", "keep")
    for group in groups:
        rungs = group.rungs
        cells = []
        for state, rung in _rests(rungs).items():
            parts = rungs.ladder.parts[rung]
            if state == "keep" and rung == rungs.params:
                cells.append("none")
            elif state == "keep" and rung == 0:
                cells.append("full")
            else:
                tier = _tier(explanation.plan.for_unit(group.names[0]), state)
                cells.append(f"{names[parts]} 1/{parts}" + (f" on {tier}" if tier else ""))
        table.add_row(group.title, format_count(group.first.numel), *cells)
    return table


def _tier(plan: Plan, state: str) -> str:
    """The tier where a state rests, unless that is the device."""
    states = {"P": plan.params, "G": plan.grads, "OS": plan.optim}
    tier = states[state].tier if state in states else "device"
    return "" if tier == "device" else tier


def _schedule_table(explanation: Explanation) -> "Table":
    table = _table("what", "units", "when", "hops", "tier", numbers_from=5)
    for row in explanation.rows():
        title = row.title if row.count == 1 else f"{row.count} × {row.title}"
        table.add_row(row.op.kind, title, row.when, row.hops, row.tier)
    return table


def _traffic_table(explanation: Explanation) -> "Table":
    traffic, levels = explanation.traffic, explanation.topology.levels
    table = _table("for", *(f"on {level.name}" for level in levels), "total")
    for use in Use:
        sent = [traffic.sent_bytes(use=use, level=level.name) for level in levels]
        if sum(sent):
            table.add_row(use, *map(format_bytes, [*sent, sum(sent)]))
    totals = [traffic.sent_bytes(level=level.name) for level in levels]
    table.add_section()
    table.add_row("total", *map(format_bytes, [*totals, sum(totals)]))
    return table


def _memory_table(explanation: Explanation) -> "Table":
    needed = explanation.memory
    table = _table("for", "bytes", "share")
    for term in MEMORY_TERMS:
        if term == "total":
            terms = sum(getattr(needed, each) for each in MEMORY_TERMS if each != "total")
            if absent := terms - needed.total:  # the total is less than their sum
                table.add_row("not there at the peak", f"-{format_bytes(absent)}", "")
            table.add_section()
        num_bytes = getattr(needed, term)
        share = num_bytes / needed.total if needed.total else 0
        table.add_row(term.replace("_", " "), format_bytes(num_bytes), f"{share:.0%}")
    for tier in TIER_TERMS:
        if num_bytes := getattr(needed, tier):
            table.add_row(f"resting on {tier}", format_bytes(num_bytes), "")
    return table
