"""What was planned is what happens: the same operations in the same order, to the byte.

A run's record is measured: links count what crosses them and stores what they move (``core/meter``),
for the operation that they do it for. The schedule is what ``plans/expected.py`` expects of the
same issuer, which in the run is driven by the hooks of a real forward and backward.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.topology import Topology
from shardwise.model.units import describe
from shardwise.plans.expected import Training
from shardwise.plans.ops import Kind, Op, Phase
from shardwise.plans.plan import Plan, Precision, Tiers, Tiling
from shardwise.plans.validate import violations
from shardwise.runtime.execute import Done
from tests.models import TinyGPT, UntiedGPT, adamw, batch, lm_loss, make, mine

LEVELS = {1: "world=1", 4: "node=2,world=2"}
PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "amsp", "zeropp", "lean", "infinity")
MIXED = Precision(compute="bfloat16", reduce="bfloat16", master="float32")
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
    return op.kind.value, op.unit, hops, op.reads, op.writes


def measured(done: Done) -> Row:
    op, sent = done.op, done.sent_bytes
    assert len(sent) == len(op.hops), (op, done.meter.sent)
    hops = tuple((hop.level, nbytes) for hop, nbytes in zip(op.hops, sent, strict=True))
    return op.kind.value, op.unit, hops, done.meter.read, done.meter.written


def expected(model, plan: Plan, levels: str, passes: tuple[Phase, ...]) -> list[Row]:
    topology = Topology.parse(levels)
    training = Training(plan, describe(model, plan, topology), topology)
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
        runtime.grid.drain()
        runtime.grid.reduces.drain()
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
    """All presets, on the device and with every state, or some, on the disk; all that can be kept;
    wires; mixed precision; updates in backward."""
    topology = Topology.parse(levels)
    found: list[Plan] = []

    def add(plan: Plan, **changes) -> None:
        plan = replace(plan, min_unit_numel=1000, **changes)
        if plan.rests_on("nvme") and not plan.tiers.path:
            plan = replace(plan, tiers=replace(plan.tiers, path=path))
        if not violations(plan, topology):
            found.append(plan)

    for name in PRESETS:
        plan = sw.presets.PRESETS[name]()
        for keep, until in (
            (plan.keep, "backward"), ("node", "backward"), ("full", "backward"),
            ("node", "step"), ("full", "step"),
        ):  # fmt: skip
            add(plan, keep=keep, keep_until=until)
        add(plan, prefetch=0)
        add(plan, prefetch=2)
        add(plan, precision=MIXED)
        add(plan, precision=MIXED, activations="recompute")
        for away in (("params",), ("grads",), ("optim",), ("params", "grads", "optim")):
            tiers = {state: replace(getattr(plan, state), tier="nvme") for state in away}
            add(plan, **tiers)
            add(plan, precision=MIXED, **tiers)
            add(plan, prefetch=2, keep="node", keep_until="step", **tiers)
            if away != ("params",):
                add(plan, tiers=Tiers(path=path, update="backward"), **tiers)
    return found


def check_all(path: str, levels: str, part: int, parts: int) -> list[str]:
    chosen = plans(path, levels)[part::parts]
    assert len(chosen) > 10
    return [line for plan in chosen for line in check(plan, levels)]
