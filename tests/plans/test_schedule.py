"""The schedule's bytes against closed formulas, and its events against a small state machine."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.layout import ModelSpec, ParamSpec, lay_out
from shardwise.core.topology import Level, Topology
from shardwise.plans import presets
from shardwise.plans.expected import Event, Training, schedule
from shardwise.plans.ops import Kind, Move, Op, Phase, Place, Trigger
from shardwise.plans.order import REDUCTIONS_IN_FLIGHT
from shardwise.plans.plan import Plan, Precision, resolve
from shardwise.plans.presets import PRESETS
from shardwise.plans.traffic import Traffic, Use, step_phases, step_traffic
from shardwise.plans.validate import legal_plans

GRID = Topology.parse("node=2,world=2")

TOPOLOGIES = (
    st.lists(st.integers(1, 6), min_size=2, max_size=4)
    .filter(lambda sizes: prod(sizes) <= 160)
    .map(lambda sizes: Topology(tuple(map(Level, ("node", "rack", "site", "world"), sizes))))
)
NUMELS = st.lists(st.integers(0, 3000), min_size=1, max_size=4)
"""Of the root first; units may be smaller than the world, and empty."""


def model_of(numels: list[int], world: int, *, frozen: int = 0) -> ModelSpec:
    units = []
    for index, numel in enumerate(numels):
        params = [ParamSpec("weight", (numel,), "float32")]
        if frozen:
            params.append(ParamSpec("frozen", (frozen,), "float32", requires_grad=False))
        units.append(lay_out(f"u.{index}", params, world))
    return ModelSpec(tuple(units))


class Ring:
    """Closed formulas: what a rank sends when a flat crosses levels, full or one by one."""

    def __init__(self, model: ModelSpec, topology: Topology) -> None:
        sizes = [sum(flat.numel for flat in unit.flats) for unit in model.units]
        self.topology = topology
        self.all = sum(sizes)
        self.inner = self.all - sizes[0]
        self.root = sizes[0]

    def on(self, index: int, numel: int) -> int:
        """One level: all but one of its parts, below the levels inside it."""
        levels = self.topology.levels
        inside = prod(level.size for level in levels[:index])
        return (levels[index].size - 1) * numel // (inside * levels[index].size)

    def across(self, numel: int) -> int:
        """All levels: (n - 1) / n, whatever the levels."""
        return (self.topology.world - 1) * numel // self.topology.world

    def outside(self, numel: int) -> int:
        """All levels but the innermost."""
        return self.across(numel) - self.on(0, numel)


def sent(traffic: Traffic) -> list[int]:
    return [traffic.sent_bytes(use=use) for use in Use]


@given(NUMELS, TOPOLOGIES)
def test_presets_send_what_their_formulas_say(numels: list[int], topology: Topology) -> None:
    model = model_of(numels, topology.world)
    ring = Ring(model, topology)
    whole, inner = 4 * ring.across(ring.all), 4 * ring.across(ring.inner)
    node, node_inner = 4 * ring.on(0, ring.all), 4 * ring.on(0, ring.inner)
    outside = 4 * ring.outside(ring.all)
    expected = {
        "ddp": [0, 0, whole, whole, 0],
        "zero1": [0, 0, whole, 0, whole],
        "zero2": [0, 0, whole, 0, whole],
        "zero3": [whole, inner, whole, 0, 0],
        "fsdp": [whole, inner, whole, 0, 0],
        "hsdp": [node, node_inner, whole, outside, 0],
        "mics": [node, node_inner, whole, outside, 0],
        "amsp": [node, node_inner, whole, 0, outside],
        "infinity": [whole, inner, whole, 0, 0],
    }
    assert set(expected) == set(presets.PRESETS) - {"zeropp", "lean"}
    for name, formula in expected.items():
        assert sent(step_traffic(presets.PRESETS[name](), model, topology)) == formula, name


def test_few_bits_on_the_slow_link() -> None:
    """The volumes of ZeRO++, relative to zero3, of a model whose blocks are all full."""
    topology = Topology.parse("node=2,world=2")
    model = model_of([0, 1 << 20, 1 << 20], topology.world)
    precision = Precision(compute="bfloat16", reduce="bfloat16", master="float32")

    def slow(plan: Plan, use: Use | None = None) -> int:
        return step_traffic(plan, model, topology).sent_bytes(use=use, level="world")

    zero3, zeropp = presets.zero3(precision=precision), presets.zeropp(precision=precision)
    lean = presets.lean(precision=precision)
    assert slow(zeropp, Use.GATHER_BACKWARD) == 0
    for plan, use, bits in (
        (zeropp, Use.GATHER_FORWARD, 8 * 260 / 256),
        (zeropp, Use.REDUCE, 8 * 68 / 128),
        (lean, Use.REDUCE, 8 * 68 / 128),
        (lean, Use.REFRESH, 8 * 68 / 128),
    ):
        # The root of this model is all padding, which is one short block.
        expected = slow(zero3, Use.REDUCE) * bits / 16
        assert slow(plan, use) == pytest.approx(expected, rel=1e-3), (plan.name, use)
    assert slow(zeropp) / slow(zero3) < 0.27
    assert slow(lean) / slow(zero3) < 0.18


@given(NUMELS, TOPOLOGIES)
def test_a_format_of_the_same_width_sends_the_same(numels: list[int], topology: Topology) -> None:
    model = model_of(numels, topology.world)
    for name in ("zero3", "hsdp", "amsp", "ddp"):
        plan = presets.PRESETS[name]()
        states = {
            state: replace(getattr(plan, state), wire="fp32")
            for state in ("params", "grads", "optim")
        }
        assert sent(step_traffic(replace(plan, **states), model, topology)) == sent(
            step_traffic(plan, model, topology)
        )


@given(NUMELS, TOPOLOGIES)
def test_each_hop_carries_its_level(numels: list[int], topology: Topology) -> None:
    model = model_of(numels, topology.world)
    ring = Ring(model, topology)
    traffic = step_traffic(presets.zero3(), model, topology)
    for index, level in enumerate(topology.levels):
        assert traffic.sent_bytes(use=Use.REDUCE, level=level.name) == 4 * ring.on(index, ring.all)
        backward = traffic.sent_bytes(use=Use.GATHER_BACKWARD, level=level.name)
        assert backward == 4 * ring.on(index, ring.inner)


@given(NUMELS, TOPOLOGIES)
def test_what_is_kept_spares_the_slow_links(numels: list[int], topology: Topology) -> None:
    model = model_of(numels, topology.world)
    ring = Ring(model, topology)
    forward = 4 * ring.across(ring.all)
    secondary = step_traffic(presets.zero3(keep="node"), model, topology)
    assert sent(secondary)[:2] == [forward, 4 * ring.on(0, ring.inner)]
    full = step_traffic(presets.zero3(keep="full"), model, topology)
    assert sent(full)[:2] == [forward, 0]


@given(NUMELS, TOPOLOGIES, st.integers(2, 5))
def test_accumulation(numels: list[int], topology: Topology, count: int) -> None:
    model = model_of(numels, topology.world)
    ring = Ring(model, topology)
    whole, inner = 4 * ring.across(ring.all), 4 * ring.across(ring.inner)
    node, outside = 4 * ring.on(0, ring.all), 4 * ring.outside(ring.all)

    def flows(plan: Plan) -> list[int]:
        return sent(step_traffic(plan, model, topology, accumulate=count))

    assert flows(presets.ddp()) == [0, 0, whole, whole, 0]
    assert flows(presets.zero1()) == [0, 0, whole, 0, whole]
    assert flows(presets.zero2()) == [0, 0, count * whole, 0, whole]
    assert flows(presets.zero3()) == [count * whole, count * inner, count * whole, 0, 0]
    assert flows(presets.amsp())[2:] == [count * node + outside, 0, outside]


@given(NUMELS, TOPOLOGIES, st.integers(2, 5))
def test_keeping_until_step_gathers_on_slow_links_once(
    numels: list[int], topology: Topology, count: int
) -> None:
    model = model_of(numels, topology.world)
    ring = Ring(model, topology)
    plan = replace(presets.zero3(keep="node"), keep_until="step")
    node, outside = 4 * ring.on(0, ring.inner), 4 * ring.outside(ring.inner)
    root = 4 * ring.across(ring.root)
    forward, backward, *_ = sent(step_traffic(plan, model, topology, accumulate=count))
    assert forward == root + outside + count * node
    assert backward == count * node
    plan = replace(presets.zero3(keep="full"), keep_until="step")
    forward, backward, *_ = sent(step_traffic(plan, model, topology, accumulate=count))
    assert (forward, backward) == (4 * ring.across(ring.all), 0)


def test_dtypes_of_each_use() -> None:
    model = model_of([640, 1280], GRID.world)
    ring = Ring(model, GRID)
    precision = Precision(compute="bfloat16", reduce="float32", master="float64")
    flows = sent(step_traffic(presets.hsdp(precision=precision), model, GRID))
    node, outside = ring.on(0, ring.all), ring.outside(ring.all)
    whole = 4 * ring.across(ring.all)
    assert flows == [2 * node, 2 * ring.on(0, ring.inner), whole, 4 * outside, 0]
    flows = sent(step_traffic(presets.zero1(precision=precision), model, GRID))
    assert flows == [0, 0, whole, 0, 2 * ring.across(ring.all)]


def test_frozen_parameters_are_gathered_but_never_reduced() -> None:
    frozen, trained = model_of([64, 128], 4, frozen=6400), model_of([64, 128], 4)
    for plan in (presets.zero3(), presets.zero1(), presets.hsdp()):
        assert (
            sent(step_traffic(plan, frozen, GRID))[2:]
            == (sent(step_traffic(plan, trained, GRID))[2:])
        )
    more = Ring(frozen, GRID).all - Ring(trained, GRID).all
    assert sent(step_traffic(presets.zero3(), frozen, GRID))[0] == (
        sent(step_traffic(presets.zero3(), trained, GRID))[0] + 4 * Ring(frozen, GRID).across(more)
    )


def test_a_unit_without_parameters_does_nothing() -> None:
    model = ModelSpec((lay_out("", [], 4), *model_of([64, 64], 4).units))
    for plan in (presets.zero3(), presets.ddp()):
        busy = {op.unit for event in schedule(plan, model, GRID) for op in event.ops}
        assert busy == {"u.0", "u.1"}


def test_gathers_climb_and_reductions_descend() -> None:
    events = schedule(presets.zero3(), model_of([64, 64], 4), GRID)
    ops = [op for event in events for op in event.ops if op.hops]
    levels = {(op.kind, tuple(hop.level for hop in op.hops)) for op in ops}
    assert levels == {(Kind.GATHER, ("world", "node")), (Kind.REDUCE, ("node", "world"))}
    assert [op.sent_bytes for op in ops[:1]] == [48 * 4]


def test_what_leaves_a_node_is_all_its_ranks_send_outside() -> None:
    topology = Topology.parse("island=2,node=2,world=3")
    model = model_of([1200], topology.world)
    traffic = step_traffic(presets.zero3(), model, topology)
    island, node = traffic.leaving(topology)
    assert (island.level, island.num_ranks) == ("island", 2)
    assert (node.level, node.num_ranks) == ("node", 4)
    assert node.sent_bytes == 4 * traffic.sent_bytes(level="world")
    assert island.sent_bytes == 2 * (
        traffic.sent_bytes(level="world") + traffic.sent_bytes(level="node")
    )


def test_phases_of_a_step() -> None:
    assert step_phases(1) == {Phase.ONLY: 1}
    assert sum(step_phases(2).values()) == 2
    assert step_phases(2)[Phase.MIDDLE] == 0


class Machine:
    """What a rank holds, as operations change it: nothing is used, freed or reduced that is not
    there, nothing gathered twice, and a kept rung only serves what it was kept of."""

    def __init__(self, names: list[str], resident: set[str]) -> None:
        self.resident = resident
        self.full = {name: name in resident for name in names}
        self.kept = dict.fromkeys(names, False)
        self.in_flight = 0

    def run(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.in_flight -= event.finish
            assert self.in_flight >= 0
            for op in event.ops:
                self.do(op)
            if event.wait is not None:
                assert self.full[event.wait]
            if event.trigger is Trigger.GRADS_READY:
                self.in_flight += 1
                assert self.in_flight <= REDUCTIONS_IN_FLIGHT
            if event.trigger in (Trigger.BEFORE_FORWARD, Trigger.BEFORE_BACKWARD):
                assert event.wait == event.unit
            if event.trigger is Trigger.END_BACKWARD:
                assert self.in_flight == 0

    def do(self, op: Op) -> None:
        unit = op.unit
        if op.kind is Kind.GATHER:
            assert not self.full[unit]
            assert op.source is not Place.KEPT or self.kept[unit]
            self.full[unit] = True
        elif op.kind is Kind.KEEP:
            assert self.full[unit]
            assert not self.kept[unit]
            self.kept[unit] = True
        elif op.kind is Kind.DROP:
            assert op.source is Place.SHARD or self.kept[unit]
            self.kept[unit] = False
        elif op.kind is Kind.FREE:
            assert self.full[unit]
            assert unit not in self.resident
            self.full[unit] = False
        elif op.kind is Kind.UPDATE:
            assert not self.kept[unit]
            assert self.full[unit] == (unit in self.resident)


PASSES = (
    (Phase.EVAL,),
    (Phase.ONLY, Phase.EVAL, Phase.ONLY),
    (Phase.FIRST, Phase.MIDDLE, Phase.MIDDLE, Phase.LAST),
)


@pytest.mark.parametrize("plan", legal_plans(GRID), ids=lambda plan: plan.name)
@pytest.mark.parametrize("keep_until", ["backward", "step"])
def test_every_legal_plan_gathers_before_use_and_frees_after(plan: Plan, keep_until: str) -> None:
    plan = replace(plan, keep_until=keep_until)
    model = model_of([64, 640, 640, 640, 640], GRID.world)
    names = [unit.name for unit in model.units]
    resident = {name for name in names if not resolve(plan, GRID, name).params}
    for passes, prefetch in product(PASSES, (0, 1, 3)):
        training = Training(replace(plan, prefetch=prefetch), model, GRID)
        machine = Machine(names, resident)
        for phase in passes:
            machine.run(training.run(phase))
            if phase in (Phase.ONLY, Phase.LAST, Phase.EVAL):
                assert {name for name, is_full in machine.full.items() if is_full} == resident
                assert not any(machine.kept.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_leaves_what_it_has_found(name: str) -> None:
    """So that the second is like the first, and the simulator can run one of them twice."""
    plan = PRESETS[name]()
    for changed in (plan, replace(plan, keep_until="step", activations="recompute")):
        training = Training(changed, model_of([64, 640, 640, 640], GRID.world), GRID)
        for phases in (PASSES[1], PASSES[2]):
            first, second = ([training.run(phase) for phase in phases] for _ in range(2))
            assert first == second


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_is_gathered_ahead_belongs_to_the_trigger_that_sets_it_off(prefetch: int) -> None:
    plan = replace(presets.zero3(), prefetch=prefetch)
    events = schedule(plan, model_of([64] * 6, 4), GRID)
    sets_off = {
        op.unit: (event.trigger, event.unit)
        for event in events
        for op in event.ops
        if op.kind is Kind.GATHER and event.trigger.in_forward
    }
    begins, uses = (Trigger.BEGIN_FORWARD, "u.0"), Trigger.BEFORE_FORWARD
    ahead = [begins] * prefetch + [(uses, f"u.{index}") for index in range(1, 6)]
    assert sets_off == {"u.0": begins, **{f"u.{i}": ahead[i - 1] for i in range(1, 6)}}
    # In backward a unit gives its buffer back before one more is gathered.
    first, *later = [
        [op.kind for op in event.ops]
        for event in events
        if event.trigger is Trigger.AFTER_BACKWARD and event.unit in ("u.5", "u.1")
    ]
    assert first == ([Kind.FREE, Kind.GATHER] if prefetch else [Kind.FREE])
    assert later == [[Kind.FREE]]


def test_the_kept_rung_is_copied_once_a_step() -> None:
    plan = replace(presets.zero3(keep="node"), keep_until="step")
    model = model_of([64, 640], GRID.world)
    kept = {
        phase: sum(
            op.kind is Kind.KEEP for event in schedule(plan, model, GRID, phase) for op in event.ops
        )
        for phase in Phase
    }
    assert kept == {
        Phase.ONLY: 1,
        Phase.FIRST: 1,
        Phase.MIDDLE: 0,
        Phase.LAST: 0,
        Phase.EVAL: 0,
    }


def test_events_follow_the_order_and_the_root_surrounds_them() -> None:
    model = model_of([64, 64, 64], 4)
    events = schedule(presets.zero3(), model, GRID, order=["u.0", "u.2", "u.1"])
    forward = [event.unit for event in events if event.trigger is Trigger.BEFORE_FORWARD]
    backward = [event.unit for event in events if event.trigger is Trigger.BEFORE_BACKWARD]
    assert forward == ["u.0", "u.2", "u.1"]
    assert backward == ["u.0", "u.1", "u.2"]
    assert events[0].unit == "u.0"
    assert [(event.trigger, event.unit) for event in events[-3:]] == [
        (Trigger.GRADS_READY, "u.0"),
        (Trigger.END_BACKWARD, "u.0"),
        (Trigger.STEP, ""),
    ]
    assert Counter(op.kind for op in events[-2].ops) == {Kind.FREE: 1}  # the root's own


def test_a_unit_used_twice_steps_once() -> None:
    model = model_of([64, 64], 4)
    events = schedule(presets.ddp(), model, GRID, order=["u.1", "u.1"])
    updates = [op.unit for op in events[-1].ops if op.kind is Kind.UPDATE]
    assert updates == ["u.0", "u.1"]


@pytest.mark.parametrize("phase", [Phase.FIRST, Phase.MIDDLE, Phase.EVAL])
def test_only_synchronising_phases_step(phase: Phase) -> None:
    events = schedule(presets.zero3(), model_of([64, 64], 4), GRID, phase)
    assert Trigger.STEP not in {event.trigger for event in events}


@settings(max_examples=30)
@given(NUMELS, st.sampled_from(legal_plans(Topology.parse("node=4,world=2"))))
def test_hops_conserve_bytes_for_every_legal_plan(numels: list[int], plan: Plan) -> None:
    """A reduction always ends in one place: every rank sends all but its own part."""
    topology = Topology.parse("node=4,world=2")
    model = model_of(numels, topology.world)
    ring = Ring(model, topology)
    traffic = step_traffic(plan, model, topology)
    parts = topology.factor(plan.params.spread), topology.factor(plan.optim.spread)
    gathered = 4 * ring.all - 4 * ring.all // parts[0]
    refreshed = 4 * ring.all // parts[0] - 4 * ring.all // parts[1]
    replicated = 4 * ring.all // parts[1] - 4 * ring.all // topology.world
    flows = sent(traffic)
    assert flows[0] == gathered
    assert flows[2:] == [4 * ring.across(ring.all), replicated, refreshed]


@pytest.mark.parametrize(
    ("tiers", "disk", "host"),
    [
        # In mixed precision an element has 2 states and a master of 4 bytes; G 4, P 2 bytes.
        (("device", "device", "nvme"), (12, 12), (2, 4)),
        (("device", "cpu", "nvme"), (12, 12), (2, 0)),  # gradients are in host memory already
        (("cpu", "cpu", "nvme"), (12, 12), (0, 0)),
        (("device", "nvme", "nvme"), (16, 12), (2, 0)),
        (("nvme", "nvme", "nvme"), (16, 14), (0, 0)),
        (("device", "device", "cpu"), (0, 0), (2, 4)),
        (("nvme", "nvme", "cpu"), (4, 2), (0, 0)),
    ],
)
def test_an_update_moves_each_state_from_its_own_tier(
    tiers: tuple[str, str, str], disk: tuple[int, int], host: tuple[int, int]
) -> None:
    precision = Precision(compute="bfloat16", reduce="bfloat16", master="float32")
    plan = presets.zero3(precision=precision)
    states = {
        name: replace(getattr(plan, name), tier=tier)
        for name, tier in zip(("params", "grads", "optim"), tiers, strict=True)
    }
    model = model_of([0, 4096], GRID.world)
    events = schedule(replace(plan, **states), model, GRID)
    (op,) = [op for op in events[-1].ops if op.kind is Kind.UPDATE and op.unit == "u.1"]
    own = 4096 // GRID.world
    moved = {move.tier: (move.reads // own, move.writes // own) for move in op.moves}
    assert moved == {tier: both for tier, both in (("nvme", disk), ("cpu", host)) if any(both)}


def test_a_refresh_reads_the_master_from_its_own_tier() -> None:
    plan = presets.amsp()
    plan = replace(
        plan,
        params=replace(plan.params, tier="nvme"),
        optim=replace(plan.optim, tier="cpu", wire="int4/delta"),
    )
    model = model_of([0, 4096], GRID.world)
    (op,) = [
        op
        for op in schedule(plan, model, GRID)[-1].ops
        if op.kind is Kind.REFRESH and op.unit == "u.1"
    ]
    shard, own = 4 * 4096 // GRID.factor("node"), 4 * 4096 // GRID.world
    assert op.moves == (Move("nvme", reads=shard, writes=shard), Move("cpu", reads=own))


@pytest.mark.parametrize(("trained", "reached"), [(0, 3), (1, 3), (2, 2), (3, 1)])
def test_backward_comes_to_nothing_before_the_first_trained_unit(
    trained: int, reached: int
) -> None:
    """Of a root and three units all is frozen but one; ``explain`` and the simulator agree."""
    units = [
        lay_out(
            f"u.{index}",
            [ParamSpec("weight", (4096,), "float32", requires_grad=index == trained)],
            GRID.world,
        )
        for index in range(4)
    ]
    events = schedule(presets.zero3(), ModelSpec(tuple(units)), GRID)
    found = [event.unit for event in events if event.trigger is Trigger.BEFORE_BACKWARD]
    assert found == ["u.0", *(f"u.{index}" for index in (3, 2, 1)[:reached])]
