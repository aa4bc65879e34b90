"""`shardwise plan`: the fastest plan for a model on a cluster, and why."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.common import JSON_OPTION, interruptible, print_json
from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from shardwise.planner.advice import Advice
    from shardwise.planner.request import Candidate

EXIT_NOTHING_FITS = 1
DRAWN = 3
"""The chart omits presets that need more than this many times the memory."""
WIDTH = 132
"""Characters per line that the tables need so that no figure is broken."""


def plan(
    cluster: Annotated[
        str, typer.Option(help="A name such as dgx-a100, or a file written by shardwise probe.")
    ],
    model: Annotated[
        str, typer.Option(help="llama-7b, gpt-1.3b, transformers:gpt2, or a config.json.")
    ] = "llama-7b",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks. Default: all of the cluster.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step. Default: one per rank.")
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    memory: Annotated[
        str | None, typer.Option(help="Device memory per rank: '20 GiB'. Default: all of it.")
    ] = None,
    path: Annotated[
        str, typer.Option(help="A folder on the nodes' disks; without it no disk is used.")
    ] = "",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of compute and transfers. Default: bfloat16 if the device has it."),
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="No hop carries fewer bits than the dtype has.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .toml file to write the plan to.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="A .svg or .png file: step time against memory.")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Search the legal plans for the fastest that fits, and explain the choice.

    It searches spreads of P, G and OS, what is kept, wires, tiers, activations and micro-batches
    together; every figure is a simulation of the plan's own schedule.

    Examples:

      shardwise plan --model llama2-70b --cluster dgx-a100 --ranks 1024 --seq 4096

      shardwise plan --model llama-13b --cluster 4090-10g --global-batch 256 -o plan.toml

      shardwise probe -o here.toml && shardwise plan --cluster here.toml --model gpt-small --seq 512
    """
    from shardwise.planner.advice import advise
    from shardwise.planner.chart import check_chart
    from shardwise.planning import request

    if chart is not None:
        check_chart(chart)
    if output is not None and output.suffix != ".toml":
        raise UsageError(f"--output {output} is not a .toml file; plans are TOML files.")
    asked = request(
        model,
        cluster,
        seq=seq,
        global_batch=global_batch,
        ranks=ranks,
        memory=memory,
        path=path,
        dtype=dtype,
        lossless=lossless,
    )
    begin = time.perf_counter()
    with interruptible(), _telling() as tell:
        advice = advise(asked, tell)
    took_s = time.perf_counter() - begin
    if advice.best is not None:
        _write(advice, advice.best, output, chart)
    print_json(_answer(advice, took_s)) if as_json else _print(advice, took_s, output, chart)
    if advice.best is None:
        raise typer.Exit(EXIT_NOTHING_FITS)


@contextmanager
def _telling() -> "Iterator[Callable[[str], None]]":
    """Progress of the search, on a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("planning") as status:
        yield lambda what: status.update(what)


def _write(advice: "Advice", best: "Candidate", output: Path | None, chart: Path | None) -> None:
    from shardwise.planner.chart import draw_front, write_chart
    from shardwise.plans.file import dump_plan

    if output is not None:
        head = (
            f"# {advice.request.facts.name} on {advice.request.cluster.name}, "
            f"{advice.request.cluster.topology}: micro-batch {best.batch.micro}, "
            f"{best.batch.accumulate} per step; predicted step {best.step_s:.3f} s.\n"
        )
        try:
            text = head + dump_plan(replace(best.plan, name="planned"))
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}.") from None
    if chart is not None:
        points = [
            (name, c.estimate.memory.total, c.step_s, False)
            for name, c in advice.presets.items()
            if c.estimate.memory.total < DRAWN * advice.request.limit
        ]
        points += [
            (
                "planned" if c is best else partitioning(c),
                c.estimate.memory.total,
                c.step_s,
                c is best,
            )
            for c in [best, *(c for c in advice.front if c is not best)]
        ]
        title = f"{advice.request.facts.name} on {advice.request.cluster.name}"
        write_chart(chart, draw_front(points, title, advice.request.limit))


def partitioning(candidate: "Candidate") -> str:
    """The spreads of P, G and OS of a plan, in short."""
    plan = candidate.plan
    return f"{plan.params.spread}/{plan.grads.spread}/{plan.optim.spread}"


# --- for programs ---------------------------------------------------------------------------------


def _answer(advice: "Advice", took_s: float) -> dict[str, Any]:
    smallest, peak = advice.result.smallest, advice.peak
    return {
        "model": advice.request.facts.name,
        "cluster": advice.request.cluster.name,
        "ranks": advice.request.cluster.world,
        "memory_bytes": advice.request.limit,
        "plans": advice.result.num_plans,
        "simulated": advice.result.num_simulated,
        "proven": advice.result.proven,
        "took_s": took_s,
        "best": _row(advice, advice.best) if advice.best else None,
        "binds": advice.binds,
        "peak": {"when": peak.name, "bytes": peak.causes()} if peak else None,
        "choices": [asdict(choice) for choice in advice.choices],
        "ranked": [_row(advice, c) for c in advice.result.ranked],
        "front": [_row(advice, c) for c in advice.front],
        "presets": {name: _row(advice, c) for name, c in advice.presets.items()},
        "left_out": advice.left_out,
        "what_if": [
            {"change": w.change, "step_s": w.step_s, "speed_up": w.speed_up}
            for w in advice.what_ifs
        ],
        "smallest": _row(advice, smallest) if smallest else None,
        "lacking": [
            {"tier": o.tier, "needed_bytes": o.needed, "available_bytes": o.available}
            for o in advice.lacking()
        ],
        "remedies": list(advice.remedies),
    }


def _row(advice: "Advice", candidate: "Candidate") -> dict[str, Any]:
    import tomllib

    from shardwise.plans.file import dump_plan

    estimate = candidate.estimate
    return {
        "plan": tomllib.loads(dump_plan(candidate.plan)),
        "micro_batch": candidate.batch.micro,
        "accumulate": candidate.batch.accumulate,
        "step_s": estimate.step_s,
        "tokens_per_s": estimate.tokens_per_s,
        "flops_per_s": estimate.flops_per_s,
        "exposed_s": estimate.exposed,
        "memory_bytes": estimate.memory.total,
        "cpu_bytes": estimate.memory.cpu,
        "nvme_bytes": estimate.memory.nvme,
        "fits": candidate.fits(advice.request),
    }


# --- for people -----------------------------------------------------------------------------------


def _print(advice: "Advice", took_s: float, output: Path | None, chart: Path | None) -> None:
    from rich.console import Console

    from shardwise.planner.request import NEAR

    console = Console(highlight=False)
    if console.width < WIDTH and not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    request = advice.request
    console.print(
        f"[bold]{request.facts.name}[/bold] ({format_count(request.facts.numel)} parameters) on "
        f"[bold]{request.cluster.name}[/bold], {request.cluster.topology}: "
        f"{request.global_batch} sequences of {request.seq} per step, "
        f"{format_bytes(request.limit)} per rank",
        f"{advice.result.num_plans:,} plans, {advice.result.num_simulated:,} simulated; "
        f"everything below took {took_s:.0f} s\n",
        sep="\n",
    )
    if advice.best is None:
        _print_nothing_fits(console, advice)
        return
    rows = [advice.best] if advice.best is not advice.result.best else []
    table = _plans_table(advice, [*rows, *advice.result.ranked])
    console.print(
        f"[bold]The fastest plans that fit[/bold] (within {NEAR:.0%} they count as equal: lossless "
        "ones come first, then those that need less memory)",
        table,
    )
    console.print("[bold]Where the step's time goes[/bold]")
    for use, seconds in advice.best.estimate.exposed.items():
        if seconds > 0.001 * advice.best.step_s:
            share = seconds / advice.best.step_s
            bar = "█" * round(40 * share)
            console.print(f"  {use:<8} {seconds:9.3f} s {share:5.0%} {bar}", markup=False)
    _print_peak(console, advice)
    proof = "no other partitioning is faster by more than 2 %" if advice.result.proven else (
        "the search ended after finding nothing better for a while"
    )  # fmt: skip
    console.print(f"\nBottleneck: {advice.binds}. Among the plans searched, {proof}.")
    for what_if in advice.what_ifs:
        gain = f"{what_if.speed_up:.2f} times as fast" if what_if.speed_up > 1.005 else "no faster"
        console.print(f"  with {what_if.change}: {what_if.step_s:.3f} s, {gain}")
    if advice.choices:
        console.print(
            "\n[bold]Why it wins[/bold]: the best alternative to each choice",
            _choices_table(advice),
        )
    console.print(
        "\n[bold]With less memory[/bold] (the fastest plan for each amount)",
        _plans_table(advice, list(advice.front)),
    )
    console.print("[bold]Presets[/bold], at the same batch", _presets_table(advice, advice.best))
    for name, reason in advice.left_out.items():
        console.print(f"  {name} is left out: {reason}", markup=False)
    for path, what in ((output, "plan"), (chart, "chart")):
        if path is not None:
            console.print(f"{what} written to {path}", markup=False)


def _print_nothing_fits(console: "Console", advice: "Advice") -> None:
    smallest = advice.result.smallest
    if smallest is None:
        console.print("[bold red]Nothing fits[/bold red], and no plan could be simulated.")
        return
    console.print("[bold red]Nothing fits.[/bold red] The plan that needs least:")
    console.print(_plans_table(advice, [smallest]))
    for lack in advice.lacking():
        missing = format_bytes(lack.needed - lack.available)
        console.print(
            f"  {lack.tier}: needs {format_bytes(lack.needed)} per rank, has "
            f"{format_bytes(lack.available)}: {missing} too little"
        )
    _print_peak(console, advice)
    if advice.remedies:
        console.print("Each of these alone would make it fit:")
        for remedy in advice.remedies:
            console.print(f"  {remedy}", markup=False)
    else:
        console.print("Neither more ranks nor shorter sequences alone would make it fit.")


def _print_peak(console: "Console", advice: "Advice") -> None:
    if advice.peak is None:
        return
    total = advice.peak.memory.total
    terms = [
        f"{words} {nbytes / total:.0%}"
        for words, nbytes in advice.peak.causes().items()
        if nbytes > 0.02 * total
    ]
    console.print(
        f"\nMemory peaks in {advice.peak.name} at {format_bytes(total)}: {', '.join(terms)}.",
        markup=False,
    )


def _choices_table(advice: "Advice") -> "Table":
    from shardwise.planner.request import NEAR

    table = _table("choice", "taken", "instead", "because", "step", words=4)
    for choice in advice.choices:
        because = f"{choice.grown} +{choice.grown_s:.3f} s" if choice.grown_s > 0.0005 else ""
        if not choice.fits:
            because = "too large"
        elif abs(choice.over - 1) < NEAR:
            because = "as fast"
        table.add_row(choice.what, choice.mine, choice.instead, because, f"x {choice.over:.2f}")
    return table


def _table(*columns: str, words: int) -> "Table":
    """A table whose first ``words`` columns are words, the others figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < words else "right", overflow="fold")
    return table


def _plans_table(advice: "Advice", candidates: "list[Candidate]") -> "Table":
    from shardwise.planner.choices import wires

    # Host memory and disk have a column only where some plan uses them.
    beside = [
        (words, term)
        for words, term in (("host", "cpu"), ("disk", "nvme"))
        if any(getattr(candidate.estimate.memory, term) for candidate in candidates)
    ]
    table = _table(
        "P / G / OS", "keep", "wires", "tiers", "activations", "batch",
        "step", "exposed", "TFLOP/s", "memory", *(words for words, _ in beside), words=6,
    )  # fmt: skip
    least = {"keep": 8, "wires": 5}  # only these may shrink, down to these widths
    for column in table.columns:
        column.no_wrap = column.header not in least
        column.min_width = least.get(str(column.header))
    for candidate in candidates:
        plan, estimate = candidate.plan, candidate.estimate
        states = (plan.params, plan.grads, plan.optim)
        tiers = [state.tier for state in states]
        exceptions = f", {len(plan.overrides)} units differ" if plan.overrides else ""
        table.add_row(
            partitioning(candidate) + exceptions,
            plan.keep + (" until step" if plan.keep_until == "step" else ""),
            wires(plan),
            "device" if set(tiers) == {"device"} else "/".join(tiers),
            plan.activations,
            f"{candidate.batch.micro} x {candidate.batch.accumulate}",
            f"{estimate.step_s:.3f} s",
            _exposed(candidate),
            f"{estimate.flops_per_s / 1e12:.1f}",
            format_bytes(estimate.memory.total),
            *(format_bytes(getattr(estimate.memory, term)) for _, term in beside),
        )
    return table


def _exposed(candidate: "Candidate") -> str:
    """The share of a step that is neither compute nor update."""
    from shardwise.cost.simulate import EXPOSED

    seconds = sum(candidate.estimate.exposed[use] for use in EXPOSED)
    return f"{seconds / candidate.step_s:.0%}"


def _presets_table(advice: "Advice", best: "Candidate") -> "Table":
    table = _table("preset", "", "step", "over the best", "exposed", "memory", words=2)
    for name, candidate in sorted(advice.presets.items(), key=lambda item: item[1].step_s):
        table.add_row(
            name + (", recomputing" if candidate.plan.activations == "recompute" else ""),
            "fits" if candidate.fits(advice.request) else "too large",
            f"{candidate.step_s:.3f} s",
            f"{candidate.step_s / best.step_s:.2f}",
            _exposed(candidate),
            format_bytes(candidate.estimate.memory.total),
        )
    return table
