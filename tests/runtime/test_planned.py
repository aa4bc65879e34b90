"""What was planned is what happens: the same operations in the same order, to the byte.

A run's record is measured: links count what crosses them and stores what they move (``core/meter``),
for the operation that they do it for. The schedule is what ``plans/expected.py`` expects of the
same issuer, which in the run is driven by the hooks of a real forward and backward.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.topology import Topology
from shardwise.core.wire import Format
from shardwise.model.units import describe
from shardwise.plans.expected import Training
from shardwise.plans.ops import Kind, Op, Phase
from shardwise.plans.order import Issuer
from shardwise.plans.plan import Plan, Precision, StatePlan, Tiers, Tiling
from shardwise.plans.schedule import UnitOps
from shardwise.plans.validate import violations
from shardwise.runtime.activations import offload
from shardwise.runtime.execute import Done
from shardwise.runtime.unit import State
from shardwise.tier.pool import PAGE_BYTES
from tests.models import TinyGPT, UntiedGPT, adamw, batch, lm_loss, make, mine

LEVELS = {1: "world=1", 4: "node=2,world=2"}
PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "amsp", "zeropp", "lean", "infinity")
MIXED = Precision(compute="bfloat16", reduce="bfloat16", master="float32")
DIM = 24
"""The width of the models' blocks."""
SINGLE = (Phase.ONLY,)
ACCUMULATED = (Phase.FIRST, Phase.MIDDLE, Phase.LAST)

Row = tuple[str, str, tuple[tuple[str, int], ...], int, int]
"""An operation: kind, unit, each hop's level and bytes, bytes read and written."""


class LastTrained(TinyGPT):
    """A model of which only the last block is trained: backward does not reach the others."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)


def planned(op: Op) -> Row:
    hops = tuple((hop.level, hop.sent_bytes) for hop in op.hops)
    disk = op.on("nvme")
    return op.kind.value, op.unit, hops, disk.reads, disk.writes


def measured(done: Done) -> Row:
    op, sent = done.op, done.sent_bytes
    assert len(sent) == len(op.hops), (op, done.meter.sent)
    hops = tuple((hop.level, nbytes) for hop, nbytes in zip(op.hops, sent, strict=True))
    return op.kind.value, op.unit, hops, done.meter.read, done.meter.written


class Deep(TinyGPT):
    """So deep that the inputs of the first blocks leave their buffers."""

    def __init__(self) -> None:
        super().__init__(layers=6)


def input_bytes(plan: Plan) -> int:
    """The input of a block in a call, in whole pages."""
    tokens, _ = mine(*batch(0))
    dtype = getattr(torch, plan.precision.compute or "float32")
    return math.ceil(tokens.numel() * DIM * dtype.itemsize / PAGE_BYTES) * PAGE_BYTES


def expected(model, plan: Plan, levels: str, passes: tuple[Phase, ...]) -> list[Row]:
    topology = Topology.parse(levels)
    spec = describe(model, plan, topology)
    # Module trees do not say that a head comes last.
    order = sorted(spec.order, key=lambda name: "head" in name)
    training = Training(plan, spec, topology, order, input_bytes=input_bytes(plan))
    return [planned(op) for phase in passes for event in training.run(phase) for op in event.ops]


class Run:
    """A sharded model, and the record of what it does."""

    def __init__(self, plan: Plan, levels: str, kind=TinyGPT) -> None:
        self.plan, self.levels = plan, levels
        self.model = make(kind, torch.float32)
        self.plain = make(kind, torch.float32)
        self.optimizer = adamw(self.model)
        sw.shard(self.model, self.optimizer, plan=plan, levels=levels)
        self.done: list[Done] = []
        runtime_of(self.model).observers.append(self.done.append)

    def step(self, micro_batches: int) -> list[Row]:
        for i in range(micro_batches):
            if i < micro_batches - 1:
                with sw.no_sync(self.model):
                    self.loss(i).backward()
            else:
                self.loss(i).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.rows()

    def evaluate(self, *, training: bool) -> list[Row]:
        self.model.train(training)
        with torch.no_grad():
            self.loss(0)
        self.model.train()
        return self.rows()

    def loss(self, index: int) -> torch.Tensor:
        return lm_loss(self.model, *mine(*batch(index)))

    def rows(self) -> list[Row]:
        """What was done since the last call, once all of it is over."""
        runtime = runtime_of(self.model)
        runtime.grid.block_host_until_idle()
        runtime.grid.reduces.so_far().block_host()
        runtime.homes.settle()
        rows, self.done[:] = [measured(done) for done in self.done], []
        return rows

    def expected(self, *passes: Phase) -> list[Row]:
        return expected(self.plain, self.plan, self.levels, passes)


def difference(got: list[Row], wanted: list[Row]) -> str:
    """The first rows that differ; empty if none do."""
    for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return f"row {index}: measured {one}, planned {other}"
    if len(got) != len(wanted):
        more = (got if len(got) > len(wanted) else wanted)[min(len(got), len(wanted))]
        return f"{len(got)} rows measured, {len(wanted)} planned; first of the others: {more}"
    return ""


def check(plan: Plan, levels: str, kind=TinyGPT, *, ordered: bool = True) -> list[str]:
    """All phases of a plan; a line for each that differs."""
    run = Run(plan, levels, kind)
    run.step(1)  # recorded
    run.step(1)
    compared = {
        "one micro-batch": (run.step(1), run.expected(*SINGLE)),
        "three micro-batches": (run.step(3), run.expected(*ACCUMULATED)),
        "three again": (run.step(3), run.expected(*ACCUMULATED)),
    }
    run.evaluate(training=False)  # recorded
    for name, training in (("eval", False), ("train mode without gradients", True)):
        compared[name] = run.evaluate(training=training), run.expected(Phase.EVAL)
    sw.unshard(run.model)
    found = []
    for name, (got, wanted) in compared.items():
        text = difference(*((got, wanted) if ordered else map(sorted, (got, wanted))))
        if text:
            found.append(f"{plan.name} keep={plan.keep} until {plan.keep_until}, {name}: {text}")
    return found


def plans(path: str, levels: str) -> list[Plan]:
    """All presets, on the device and with all states, or some, on the disk; all that can be kept;
    wires; mixed precision; updates in backward."""
    topology = Topology.parse(levels)
    found: list[Plan] = []

    def add(plan: Plan, **changes) -> None:
        plan = replace(plan, min_unit_numel=1000, **changes)
        if plan.rests_on("nvme") and not plan.tiers.path:
            plan = replace(plan, tiers=replace(plan.tiers, path=path))
        if not violations(plan, topology) and plan not in found:
            found.append(plan)

    for name in PRESETS:
        plan = sw.presets.PRESETS[name]()
        add(plan)
        for keep in ("node", "full"):
            add(plan, keep=keep)
            add(plan, keep=keep, keep_until="step")
        add(plan, prefetch=2, precision=MIXED, activations="recompute")
        for away in (("params",), ("grads",), ("optim",), ("params", "grads", "optim")):
            tiers = {state: replace(getattr(plan, state), tier="nvme") for state in away}
            add(plan, **tiers)
            add(plan, precision=MIXED, **tiers)
            if len(away) > 1:
                add(plan, prefetch=0, keep="node", keep_until="step", **tiers)
            if away != ("params",):
                add(plan, tiers=Tiers(path=path, update="backward"), **tiers)
    for name in ("zero3", "hsdp", "amsp"):
        plan = sw.presets.PRESETS[name]()
        wires = {"params": "int8", "grads": "int4/feedback,node=int8"}
        if name == "amsp":
            wires["optim"] = "int4/delta"
        add(plan, **{s: replace(getattr(plan, s), wire=wire) for s, wire in wires.items()})
    return found


def check_all(path: str, levels: str, part: int, parts: int) -> list[str]:
    chosen = plans(path, levels)[part::parts]
    assert len(chosen) > 10
    return [line for plan in chosen for line in check(plan, levels)]


PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_planned_is_measured_on_two_levels(four, tmp_path, part):
    for lines in four.run(check_all, str(tmp_path), LEVELS[4], part, PARTS, limit_s=240):
        assert not lines, "\n".join(lines)


def test_planned_is_measured_on_one_rank(one, tmp_path):
    (lines,) = one.run(check_all, str(tmp_path), LEVELS[1], 0, 1, limit_s=240)
    assert not lines, "\n".join(lines)


def check_models(path: str) -> list[str]:
    """Models that backward does not reach all of, and layers in tiles."""
    zero3 = replace(sw.presets.zero3(), min_unit_numel=1000)
    lines = []
    for name in ("zero3", "amsp", "zeropp"):
        plan = replace(sw.presets.PRESETS[name](), min_unit_numel=1000)
        lines += check(plan, LEVELS[4], LastTrained)
    lines += check(replace(zero3, keep="full"), LEVELS[4], LastTrained)
    tiled = replace(zero3, tiling=Tiling(numel=480, loss=False))
    lines += check(tiled, LEVELS[4], UntiedGPT)
    lines += check(replace(tiled, activations="recompute"), LEVELS[4], UntiedGPT)
    states = {s: replace(getattr(zero3, s), tier="nvme") for s in ("params", "grads", "optim")}
    away = replace(tiled, keep="node", tiers=Tiers(path=path), activations="recompute", **states)
    lines += check(away, LEVELS[4], UntiedGPT)
    # Tied weights in tiles, whose loss the user computes outside of the model: when, nobody knows.
    tied = replace(zero3, tiling=Tiling(numel=480))
    return lines + check(tied, LEVELS[4], TinyGPT, ordered=False)


def check_inputs(path: str, levels: str) -> list[str]:
    """Inputs of blocks on the disk, of which the last ones stay in their buffers."""
    before, offload.SMALL_BYTES = offload.SMALL_BYTES, 1
    away = {s: StatePlan(spread="world", tier="nvme") for s in ("params", "grads", "optim")}
    inputs = {"activations": "nvme", "min_unit_numel": 1000, "tiers": Tiers(path=path)}
    zero3 = replace(sw.presets.zero3(), **inputs)
    try:
        lines = [line for kind in (TinyGPT, Deep) for line in check(zero3, levels, kind)]
        lines += check(replace(zero3, precision=MIXED, prefetch=2, **away), levels, Deep)
        lines += check(replace(zero3, **away, keep="full"), levels, LastTrained)
        tiles = Tiling(numel=480, loss=False)
        return lines + check(replace(zero3, tiling=tiles, **away), levels, UntiedGPT)
    finally:
        offload.SMALL_BYTES = before


def test_planned_is_measured_for_inputs_on_a_disk(four, tmp_path):
    for lines in four.run(check_inputs, str(tmp_path), LEVELS[4]):
        assert not lines, "\n".join(lines)


def test_planned_is_measured_for_inputs_on_a_disk_on_one_rank(one, tmp_path):
    (lines,) = one.run(check_inputs, str(tmp_path), LEVELS[1])
    assert not lines, "\n".join(lines)


def test_planned_is_measured_for_frozen_and_tiled_models(four, tmp_path):
    for lines in four.run(check_models, str(tmp_path)):
        assert not lines, "\n".join(lines)


def check_optimizers(path: str) -> None:
    """Other optimizers keep less per element than Adam's kin: the run plans with what they keep."""
    states = {s: StatePlan(tier="nvme") for s in ("params", "grads", "optim")}
    plan = Plan(name="nvme", tiers=Tiers(path=path), min_unit_numel=1000, **states)
    words = {}
    for momentum in (0.0, 0.9):
        run = Run(plan, LEVELS[1])
        sw.unshard(run.model)
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=momentum)
        sw.shard(run.model, run.optimizer, plan=plan, levels=LEVELS[1])
        runtime_of(run.model).observers.append(run.done.append)
        for _ in range(3):
            run.step(1)
        run.loss(0).backward()
        run.optimizer.step()
        runtime_of(run.model).homes.settle()
        assert [measured(done) for done in run.done] == [planned(done.op) for done in run.done]
        words[momentum] = sum(
            done.op.on("nvme").reads for done in run.done if done.op.kind is Kind.UPDATE
        )
        sw.unshard(run.model)
    assert words[0.9] * 2 == words[0.0] * 3  # gradients and parameters, with momentum one more


def test_a_run_plans_with_what_its_optimizer_keeps(one, tmp_path):
    one.run(check_optimizers, str(tmp_path))


# --- what is not in the schedule does not happen --------------------------------------------------


@contextmanager
def mutated(change: Callable[[Op], list[Op]]) -> Iterator[None]:
    """Inside, every operation that a unit is asked for is what ``change`` makes of it."""
    original = UnitOps._once

    def once(self: UnitOps, make: str, *args: object) -> tuple[Op, ...]:
        return tuple(new for op in original(self, make, *args) for new in change(op))

    UnitOps._once = once
    try:
        yield
    finally:
        UnitOps._once = original


def after_two_steps(change: Callable[[Op], list[Op]]) -> tuple[list[Row], set[str], float]:
    """The record of a second step, the units that are gathered after its forward, and a norm."""
    with mutated(change):
        run = Run(replace(sw.presets.zero3(), min_unit_numel=1000), LEVELS[4])
        run.step(1)
        loss = run.loss(0)
        units = runtime_of(run.model).units
        gathered = {unit.name for unit in units if unit.state is not State.RESTING}
        loss.backward()
        norm = sum(grad.norm().item() for grad in sw.full_grads(run.model).values())
        rows = run.rows()
        sw.unshard(run.model)
    return rows, gathered, norm


def check_mutations() -> None:
    rows, gathered, norm = after_two_steps(lambda op: [op])
    assert gathered == {"root"}

    def encoded(op: Op) -> list[Op]:
        """Gradients travel in fewer bits than planned."""
        hops = tuple(replace(hop, format=Format.parse("int8")) for hop in op.hops)
        return [replace(op, hops=hops)] if op.kind is Kind.REDUCE else [op]

    def kept(op: Op) -> list[Op]:
        """One unit is not freed."""
        frees = op.kind is Kind.FREE and op.unit == "blocks.1"
        return [replace(op, kind=Kind.KEEP)] if frees else [op]

    assert after_two_steps(kept)[1] == {"root", "blocks.1"}, "what is not freed stays"
    fewer, _, lossy = after_two_steps(encoded)
    assert norm != lossy == pytest.approx(norm, rel=0.05)
    reduced, wanted = ([row for row in some if row[0] == "reduce"] for some in (fewer, rows))
    for one, other in zip(reduced, wanted, strict=True):
        assert all(few < many for (_, few), (_, many) in zip(one[2], other[2], strict=True))
    in_order = Issuer.step
    Issuer.step = lambda self, **options: in_order(self, **options)[::-1]
    try:
        backwards = stepped()
    finally:
        Issuer.step = in_order
    assert backwards == stepped()[::-1]


def stepped() -> list[str]:
    """The units that a step refreshes, in order."""
    run = Run(replace(sw.presets.zero1(), min_unit_numel=1000), LEVELS[4])
    rows = run.step(1)
    sw.unshard(run.model)
    return [row[1] for row in rows if row[0] == "refresh"]


def test_a_mutation_of_the_schedule_changes_what_runs(four):
    four.run(check_mutations)
