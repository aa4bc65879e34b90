"""What encoded hops launch on a device: a few kernels and collectives a unit, whatever its size.

A unit is gathered and reduced under the wires of the presets by four real ranks, and the same on
CPU, where links read each other's memory; sums are in the same order, so their bits are the same.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.carry import Carrier, Carriers, Leg, Outer
from shardwise.comm.grid import Grid, Place
from shardwise.comm.lane import InlineLane
from shardwise.comm.link import CollectiveLink
from shardwise.core.layout import ModelSpec, ParamSpec, UnitSpec, lay_out
from shardwise.core.topology import Interval, Topology
from shardwise.core.wire import Format
from shardwise.device.abilities import HOST
from shardwise.plans import hops, presets
from shardwise.plans.memory import memory
from shardwise.plans.ops import Hop
from shardwise.plans.plan import Plan, Rungs, resolve
from shardwise.wire import kernels
from tests.accelerator.accelerators import Seen, chosen
from tests.accelerator.training import Case, train
from tests.models import TinyGPT

LEVELS = Topology.parse("node=2,world=2")
GATHER_LAUNCHES, REDUCTION_LAUNCHES = 6, 12
NUMEL = 4 * (2 * 4096 - 256 + 48)
"""Two chunks of a granule's columns, and a ragged end."""
LEAST_CHUNK = 4096
"""Of this process's and the ranks' chunks, so that a small unit has as many as a large one."""
EXPECTED = {
    # encode and exchange and sum, for two hops and two chunks
    "zeropp": {"wire encode": 4, "simccl all_to_all": 4, "wire sum": 4},
    # in the node the backend sums bfloat16 in place; the outer lane gets a copy
    "lean": {
        "simccl reduce_scatter": 1, "copy D2D": 2,
        "wire encode": 2, "simccl all_to_all": 2, "wire sum": 2,
    },
}  # fmt: skip


@dataclass
class Flat:
    """A flat on its way up and down, without a model."""

    rungs: Rungs
    rank: int
    numel: int
    reduce_dtype: torch.dtype
    lost: torch.Tensor | None = None
    unit_name: str = "unit"

    @property
    def granule(self) -> int:
        return self.numel // self.rungs.granules

    def format(self, hop: Hop) -> Format | None:
        return hop.format

    def interval(self, rung: int) -> Interval:
        return self.rungs.ladder.interval(self.rank, rung, self.numel)

    def rows(self, rung: int, top: int) -> slice:
        part = self.interval(rung).relative_to(self.interval(top).start)
        return slice(part.start // self.granule, part.stop // self.granule)

    def residual(self, hop: Hop) -> torch.Tensor | None:
        return self.lost if hop.format is not None and hop.format.feedback else None


def unit_of(dtype: torch.dtype) -> UnitSpec:
    unit = lay_out("unit", [ParamSpec("weight", (NUMEL,), str(dtype)[6:])], LEVELS.world)
    assert unit.flats[0].numel == NUMEL
    return unit


class Ways:
    """The hops of a plan's one unit on a device, or on the CPU."""

    def __init__(self, plan: Plan, device: torch.device, rank: int, dtype: torch.dtype) -> None:
        self.device, self.grid = device, Grid.build(Place(rank, LEVELS), device)
        unit = unit_of(dtype)
        self.rungs, self.plan = resolve(plan, LEVELS, "unit"), plan
        self.flat = Flat(self.rungs, rank, NUMEL, dtype)
        self.sizes = [(unit.flats[0], str(dtype)[6:])]
        steps = self.rungs.ladder.steps
        self.grid.connect(steps, steps[-1:])
        self.outer = Outer(self.grid.outer, device)
        self.carriers = Carriers(Carrier(device), Carrier(device), self.outer)
        if "feedback" in plan.grads.wire:
            self.flat.lost = torch.zeros(steps[-1].size - 1, self.flat.granule, device=device)

    def legs(self, wire: str, bottom: int, *, down: bool) -> list[Leg]:
        found = hops.hops_between(self.sizes, self.rungs, 0, bottom, wire)
        steps = self.rungs.ladder.steps
        lanes = ["reduce"] * (len(found) - 1) + ["outer"] if down else ["gather"] * len(found)
        legs = [
            Leg(hop, self.grid.link(lane, steps[hop.step]), 7 + hop.step)
            for hop, lane in zip(found, lanes, strict=True)
        ]
        return legs if down else legs[::-1]

    def gather(self, full: torch.Tensor) -> None:
        legs = self.legs(self.plan.params.wire, self.rungs.params, down=False)
        work = lambda _: self.carriers.gathers.climb(self.flat, full, 0, legs)  # noqa: E731
        self.grid.gathers.submit(work).order_stream()

    def reduce(self, grads: torch.Tensor, sums: torch.Tensor, *, add: bool) -> None:
        legs = self.legs(self.plan.grads.wire, self.rungs.bottom, down=True)

        def work(_: object) -> None:
            self.carriers.reduces.descend(
                self.flat, grads, 0, legs, sums, scale=0.25, add=add, outer=self.outer
            )

        self.grid.reduces.submit(work).order_stream()
        self.outer.last.order_stream()


def values_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) * 1e-2
    made[::97] = 0
    return made.to(dtype)


def wired(name: str, grads: str = "") -> Plan:
    plan = getattr(presets, name)()
    return replace(plan, grads=replace(plan.grads, wire=grads)) if grads else plan


@dataclass
class Found:
    """What a rank saw, and what it has afterwards."""

    full: torch.Tensor
    sums: torch.Tensor
    lost: torch.Tensor | None
    held_bytes: int
    gather: Seen | None = None
    reduction: Seen | None = None


def run(plan: Plan, dtype: torch.dtype, *, accelerated: bool, delay: str = "none") -> Found:
    """Gathers once and reduces twice, on the device or on the CPU."""
    hops.ACCELERATED_CHUNK_NUMEL = LEAST_CHUNK
    rank, accelerator = dist.get_rank(), chosen()
    device = accelerator.device if accelerated else HOST
    ways = Ways(plan, device, rank, dtype)
    full = torch.zeros(NUMEL, dtype=dtype)
    part = ways.flat.interval(ways.rungs.params).relative_to(0)
    full[part] = values_of(9, dtype)[part]
    full = full.to(device)
    sums = torch.ones(ways.flat.interval(ways.rungs.bottom).numel, device=device)
    first, second = (values_of(10 * step + rank, dtype).to(device) for step in range(2))
    seen: list[Seen | None] = [None, None]
    if accelerated:
        accelerator.delay(delay)
        with accelerator.watch() as seen[0]:
            ways.gather(full)
        ways.reduce(first, sums, add=False)
        with accelerator.watch() as seen[1]:
            ways.reduce(second, sums, add=True)
        accelerator.delay("none")
    else:
        ways.gather(full)
        ways.reduce(first, sums, add=False)
        ways.reduce(second, sums, add=True)
    lost = None if ways.flat.lost is None else ways.flat.lost.cpu()
    found = Found(full.cpu(), sums.cpu(), lost, ways.carriers.held_bytes, *seen)
    ways.grid.close()
    return found


@pytest.mark.parametrize("name", ["zeropp", "lean"])
def test_a_unit_takes_few_launches(sim_four, name: str) -> None:
    for found in sim_four.run(run, wired(name), torch.bfloat16, accelerated=True):
        for seen, limit in (
            (found.gather, GATHER_LAUNCHES),
            (found.reduction, REDUCTION_LAUNCHES),
        ):
            assert seen.launch_count <= limit, seen.launches
            assert not seen.races
            assert not seen.host_waits
        if chosen().type == "sim":
            assert found.reduction.launches == EXPECTED[name]


class CountedKernel:
    """A ``PayloadKernel`` that does nothing but count."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def encode(self, *_: Any, **__: Any) -> None:
        self._counts["encode"] += 1

    def decode(self, *_: Any) -> None:
        self._counts["decode"] += 1

    def sum(self, *_: Any, **__: Any) -> None:
        self._counts["sum"] += 1


class CountedLink(CollectiveLink):
    """A member of a group that is not there."""

    def __init__(self, size: int, counts: Counter[str]) -> None:
        self.size, self.coordinate, self._counts = size, 1, counts

    def gather(self, *_: Any) -> None:
        self._counts["all-gather"] += 1

    def reduce(self, *_: Any, **__: Any) -> None:
        self._counts["reduce-scatter"] += 1

    def exchange(self, *_: Any) -> None:
        self._counts["all-to-all"] += 1


class CountedOperations(TorchDispatchMode):
    """Counts torch's operations that launch something."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launches = any(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns)
        if launches and not func.__name__.startswith(("empty", "promote_types")):
            self._counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "gather", "reduction"),
    [("zeropp", 4, REDUCTION_LAUNCHES), ("lean", 1, 9), ("zero3", 2, 2)],
)
def test_a_unit_of_200_million_on_16_ranks_takes_few_launches(
    monkeypatch: pytest.MonkeyPatch, name: str, gather: int, reduction: int
) -> None:
    """Counted without values: on torch's meta device, with links and kernels that only count."""
    device, levels, counts = torch.device("meta"), Topology.parse("node=8,world=2"), Counter()
    monkeypatch.setattr(kernels, "MAKERS", {"meta": lambda spec: CountedKernel(counts)})
    plan, numel = wired(name), 202_383_360
    (spec,) = lay_out("unit", [ParamSpec("weight", (numel,), "bfloat16")], 16).flats
    rungs = resolve(plan, levels, "unit")
    flat = Flat(rungs, 3, spec.numel, torch.bfloat16)
    outer = Outer(InlineLane(), device)
    carrier, full = Carrier(device), torch.empty(spec.numel, dtype=torch.bfloat16, device=device)
    sums = torch.empty(flat.interval(rungs.bottom).numel, device=device)

    def legs(wire: str, bottom: int) -> list[Leg]:
        found = hops.hops_between([(spec, "bfloat16")], rungs, 0, bottom, wire)
        return [Leg(hop, CountedLink(hop.size, counts), 0) for hop in found]

    with CountedOperations(counts):
        carrier.climb(flat, full, 0, legs(plan.params.wire, rungs.params)[::-1])
        assert counts.total() == gather, counts
        counts.clear()
        down = legs(plan.grads.wire, rungs.bottom)
        carrier.descend(flat, full, 0, down, sums, scale=1 / 16, add=True, outer=outer)
    # A real link also adds zero3's sum to what is there, which is one launch more.
    assert counts.total() == reduction, counts


@pytest.mark.parametrize("delay", ["main", "side", "random"])
@pytest.mark.parametrize("name", ["zeropp", "lean"])
def test_late_streams_change_nothing(sim_four, name: str, delay: str) -> None:
    both = (
        sim_four.run(run, wired(name), torch.bfloat16, accelerated=True, delay=each)
        for each in ("none", delay)
    )
    for early, late in zip(*both, strict=True):
        assert not late.reduction.require("races")
        assert not late.gather.races
        assert torch.equal(early.sums, late.sums)
        assert torch.equal(early.full, late.full)


@pytest.mark.parametrize(
    ("name", "grads", "dtype"),
    [
        ("zeropp", "", torch.bfloat16),
        ("zeropp", "", torch.float32),
        ("zeropp", "int4/symmetric/feedback,node=int8/symmetric", torch.float32),
        ("zeropp", "int4/feedback,node=int8", torch.bfloat16),
        ("zeropp", "bf16/feedback,node=int8", torch.float32),
        ("zeropp", "world=int8/64", torch.float32),
        ("lean", "int8,node=fp32", torch.float32),
        ("lean", "fp32,node=int8", torch.bfloat16),
    ],
)
def test_values_are_those_of_the_cpu(sim_four, four, name: str, grads: str, dtype) -> None:
    """Wherever nothing is summed in a shorter dtype than on the CPU."""
    plan = wired(name, grads)
    there = sim_four.run(run, plan, dtype, accelerated=True)
    here = four.run(run, plan, dtype, accelerated=False)
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one.full, other.full)
        assert torch.equal(one.sums, other.sums)
        assert not one.reduction.races
        if other.lost is not None:
            assert other.lost.any()
            assert torch.equal(one.lost, other.lost)


@pytest.mark.parametrize("grads", ["", "bf16", "int4,node=fp16"])
def test_a_cast_is_summed_by_the_backend_in_its_own_dtype(sim_four, four, grads: str) -> None:
    plan = wired("lean", grads)
    there = sim_four.run(run, plan, torch.bfloat16, accelerated=True)
    here = four.run(run, plan, torch.bfloat16, accelerated=False)
    for one, other in zip(there, here, strict=True):
        assert one.reduction.launches.get("simccl reduce_scatter", 1) >= 1
        assert (one.sums - other.sums).abs().max() <= 0.01 * (other.sums - 1).abs().max()
        assert one.reduction.launch_count <= REDUCTION_LAUNCHES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "grads"),
    [
        ("zeropp", ""),
        ("lean", ""),
        ("zeropp", "bf16,node=int8"),
        ("lean", "int4,node=fp16"),
        ("zeropp", "int8"),
    ],
)
def test_working_memory_is_what_the_model_says(
    sim_four, monkeypatch: pytest.MonkeyPatch, name: str, grads: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(hops, "ACCELERATED_CHUNK_NUMEL", LEAST_CHUNK)
    plan = wired(name, grads)
    plan = replace(plan, optim=replace(plan.optim, wire=""))  # there is no refresh here
    said = memory(plan, ModelSpec((unit_of(dtype),)), LEVELS, accelerated=True).wires
    for found in sim_four.run(run, plan, dtype, accelerated=True):
        # Of two chunks in flight the second is a little shorter.
        assert 0.95 * said <= found.held_bytes <= said


@pytest.mark.parametrize("delay", ["none", "random"])
@pytest.mark.parametrize("name", ["zeropp", "lean"])
def test_presets_with_lossy_wires_train_without_a_race(sim_four, name: str, delay: str) -> None:
    case = Case(
        name, wired(name), "node=2,world=2", TinyGPT, torch.float32, micro_batches=2, delay=delay
    )
    for outcome in sim_four.run(train, case):
        assert outcome.loss_difference <= 0.5  # 2 % of the losses of two micro-batches
        assert not outcome.seen.races
        assert outcome.extra_gathers == 0
