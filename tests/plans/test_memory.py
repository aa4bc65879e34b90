"""Memory terms against hand-written sums."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layout import ModelSpec, ParamSpec, lay_out
from shardwise.core.topology import Topology
from shardwise.core.work import Saved
from shardwise.plans import presets
from shardwise.plans.memory import Memory, memory
from shardwise.plans.ops import Kind
from shardwise.plans.plan import Override, Plan, Precision, StatePlan, resolve
from shardwise.plans.schedule import UnitOps
from shardwise.plans.validate import legal_plans

GRID = Topology.parse("node=2,world=2")
ROOT, SMALL, LARGE = 640, 1280, 2560
"""Padded sizes of the units: all are multiples of 16 * 4, so nothing is added."""
TOTAL = ROOT + SMALL + LARGE


def model_of(*numels: int, dtype: str = "float32", frozen: int = 0) -> ModelSpec:
    units = []
    for index, numel in enumerate(numels):
        params = [ParamSpec("weight", (numel,), dtype)]
        if frozen:
            params.append(ParamSpec("frozen", (frozen,), dtype, requires_grad=False))
        units.append(lay_out(f"u.{index}", params, GRID.world))
    return ModelSpec(tuple(units))


MODEL = model_of(ROOT, SMALL, LARGE)


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (presets.ddp(), (1, 1, 1)),
        (presets.zero1(), (1, 4, 4)),
        (presets.zero2(), (1, 4, 4)),
        (presets.zero3(), (4, 4, 4)),
        (presets.hsdp(), (2, 2, 2)),
        (presets.amsp(), (2, 4, 4)),
    ],
)
def test_states_are_cut_by_their_spread(plan: Plan, parts: tuple[int, int, int]) -> None:
    found = memory(plan, MODEL, GRID)
    assert (found.params, found.grads, found.optim) == (
        4 * TOTAL // parts[0],
        4 * TOTAL // parts[1],
        8 * TOTAL // parts[2],
    )
    assert found.grad_buffers == 4 * (ROOT + SMALL + LARGE)
    assert found.kept == 0


@pytest.mark.parametrize(
    ("keep", "kept", "gathered"),
    [
        ("none", 0, ROOT + SMALL + LARGE),
        ("node", (SMALL + LARGE) // 2, ROOT + SMALL + LARGE),
        ("full", SMALL + LARGE, ROOT),
    ],
)
def test_what_is_kept_and_gathered(keep: str, kept: int, gathered: int) -> None:
    found = memory(presets.zero3(keep=keep), MODEL, GRID)
    assert (found.kept, found.gathered) == (4 * kept, 4 * gathered)


@pytest.mark.parametrize(("prefetch", "buffers"), [(0, 1), (1, 2), (7, 2)])
def test_prefetch_holds_no_more_buffers_than_units(prefetch: int, buffers: int) -> None:
    model = model_of(ROOT, LARGE, LARGE)
    found = memory(replace(presets.zero3(), prefetch=prefetch), model, GRID)
    assert found.gathered == 4 * (ROOT + buffers * LARGE)


def test_resident_parameters_need_no_buffer() -> None:
    assert memory(presets.zero2(), MODEL, GRID).gathered == 0
    plan = replace(
        presets.zero3(), overrides=(Override(unit="u.2", params=StatePlan(spread="none")),)
    )
    found = memory(plan, MODEL, GRID)
    assert found.params == 4 * ((ROOT + SMALL) // 4 + LARGE)
    assert found.gathered == 4 * (ROOT + SMALL)


@pytest.mark.parametrize(
    ("plan", "grads"),
    [
        (presets.zero1(), TOTAL // 4 + TOTAL),
        (presets.zero2(), TOTAL // 4),
        (presets.amsp(), TOTAL // 4 + TOTAL // 2),
        (presets.ddp(), TOTAL),
    ],
)
def test_accumulation_rests_on_the_rung_of_gradients(plan: Plan, grads: int) -> None:
    assert memory(plan, MODEL, GRID, accumulates=True).grads == 4 * grads


def test_mixed_precision_adds_a_master() -> None:
    precision = Precision(compute="bfloat16")
    found = memory(presets.zero3(precision=precision), MODEL, GRID)
    assert found == Memory(
        params=2 * TOTAL // 4,
        kept=0,
        gathered=2 * (ROOT + SMALL + LARGE),
        grads=4 * TOTAL // 4,
        grad_buffers=2 * (ROOT + SMALL + LARGE),
        optim=3 * 4 * TOTAL // 4,
        allowance=2 * LARGE + 3 * 4 * TOTAL // 4 // 8,
    )
    wide = Precision(compute="bfloat16", reduce="float32", master="float64")
    found = memory(presets.zero3(precision=wide), MODEL, GRID, optim_words=1)
    assert found.grad_buffers == 4 * (ROOT + SMALL + LARGE)
    assert found.optim == 2 * 8 * TOTAL // 4


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    trained, mixed = MODEL, model_of(ROOT, SMALL, LARGE, frozen=640)
    for plan in (presets.ddp(), presets.zero3()):
        one, other = memory(plan, trained, GRID), memory(plan, mixed, GRID)
        assert (one.grads, one.grad_buffers, one.optim) == (
            other.grads,
            other.grad_buffers,
            other.optim,
        )
        assert other.params > one.params


@pytest.mark.parametrize(
    ("grads", "bytes_by_use"),
    [
        # Sums of both lanes; int8 sent and arrived in the node; int4 of half of it between nodes.
        ("int4,node=int8", {"sums": 2 * 4 // 2, "node": 2 * 260 / 256, "world": 2 * 68 / 128 / 2}),
        # The backend sums the inner hop in place: half of the values wait for the outer lane.
        ("int4,node=bf16", {"copies": 2 * 4 // 2, "world": 2 * 68 / 128 / 2}),
        # Values are cast for a hop in another dtype.
        ("int4,node=fp16", {"sums": 2 * 4 // 2, "cast": 2, "world": 2 * 68 / 128 / 2}),
        ("bf16", {}),
    ],
)
def test_chunks_of_reductions_on_accelerators(grads: str, bytes_by_use: dict[str, float]) -> None:
    """Two chunks at most, so that half of the largest flat is in flight."""
    numel = 1 << 27
    model, precision = model_of(0, numel), Precision(compute="bfloat16")
    plan = replace(presets.zero3(precision=precision), grads=StatePlan(spread="world", wire=grads))
    found = memory(plan, model, GRID, accelerated=True)
    assert found.wires == sum(numel // 2 * each for each in bytes_by_use.values())
    on_cpu = memory(plan, model, GRID).wires  # chunks stay small there
    assert on_cpu < 100 << 20


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_activations_that_rest_elsewhere_need_room_there(tier: str) -> None:
    saved = Saved(
        total=10**7, root=10**5, checkpoints=10**6, small=10**3, largest_unit=10, largest_input=1
    )
    plan = presets.zero3()
    here, away = (
        memory(replace(plan, activations=setting), MODEL, GRID, saved=saved)
        for setting in ("recompute", tier)
    )
    assert (getattr(here, tier), getattr(away, tier)) == (0, 10**6 - 10**3)
    assert away.total < here.total


@pytest.mark.parametrize(
    ("plan", "params"),
    [
        (presets.zero3(), 0),
        (presets.hsdp(), 0),
        (presets.zero3(keep="full"), 0),
        (presets.amsp(), 2 * TOTAL // 2),  # P and OS have other shards
        (presets.ddp(), 2 * TOTAL),  # P is whole, and computes
        (replace(presets.zero3(), optim=StatePlan(spread="world", tier="cpu")), 2 * TOTAL // 4),
    ],
)
def test_on_accelerators_a_shard_that_is_the_master_is_there_once(plan: Plan, params: int) -> None:
    plan = replace(plan, precision=Precision(compute="bfloat16"))
    found = memory(plan, MODEL, GRID, accelerated=True)
    assert found.params == params
    assert found.optim + found.cpu >= 3 * 4 * TOTAL // 4
    assert memory(plan, MODEL, GRID).params > 0
    for unit in MODEL.units:
        here = plan.on_accelerator()
        ops = UnitOps(unit, resolve(here, GRID, unit.name), here).update()
        refreshed = any(op.kind is Kind.REFRESH for op in ops)
        updates_on_host = plan.optim.tier == "cpu"  # which writes P itself
        assert refreshed == (params > 0 and not updates_on_host)


@pytest.mark.parametrize("accumulates", [False, True])
def test_on_accelerators_the_peak_has_what_is_there_together(accumulates: bool) -> None:
    saved = Saved(
        total=10**6,
        root=10**4,
        checkpoints=10**5,
        small=0,
        largest_unit=2 * 10**5,
        largest_input=10**3,
    )
    options = {"saved": saved, "accelerated": True, "accumulates": accumulates}
    found = memory(presets.zero2(), MODEL, GRID, **options)
    states = 4 * TOTAL + 8 * TOTAL // 4 + accumulates * TOTAL
    # The first unit's backward, with half of the gradients of a unit and of the root.
    assert found.total == states + 10**6 - 10**4 + 2 * 10**5 // 4 + 4 * LARGE // 2 + 4 * ROOT // 2
    # All gradients in the end are more than few activations in the beginning.
    few = replace(saved, total=3 * 10**3, root=10**2, largest_unit=10**3)
    options["saved"] = few
    found = memory(presets.ddp(), MODEL, GRID, **options)
    passing = 10**3 + 10**3 // 4 + 4 * LARGE // 2 + 4 * ROOT
    assert found.total == (4 + 4 + 8) * TOTAL + found.grad_buffers + passing


def test_total_is_the_sum() -> None:
    assert Memory(params=1, kept=2, gathered=4, grads=8, grad_buffers=16, optim=32).total == 63


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_cutting_further_never_needs_more(numels: list[int]) -> None:
    model = model_of(*numels)
    chain = [presets.ddp(), presets.zero1(), presets.zero2(), presets.zero3()]
    resting = [
        found.params + found.grads + found.optim
        for found in (memory(plan, model, GRID, accumulates=True) for plan in chain)
    ]
    assert resting == sorted(resting, reverse=True)


@pytest.mark.parametrize("plan", legal_plans(GRID), ids=lambda plan: plan.name)
def test_every_legal_plan_has_a_size(plan: Plan) -> None:
    found = memory(plan, MODEL, GRID, accumulates=True)
    assert found.total >= found.params > 0


def test_what_is_kept_in_full_counts_wherever_parameters_rest() -> None:
    """Also where they are not cut: they come from their tier and stay until backward."""
    plan = presets.zero3(keep="full")
    away = replace(plan, params=replace(plan.params, spread="none", tier="cpu"))
    inner = sum(flat.numel for unit in MODEL.units[1:] for flat in unit.flats)
    assert memory(away, MODEL, GRID).kept == memory(plan, MODEL, GRID).kept == 4 * inner
    resident = replace(plan, params=replace(plan.params, spread="none"), keep="none")
    assert memory(resident, MODEL, GRID).kept == 0
