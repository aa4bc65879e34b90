"""The simulator: a step's time is all accounted for, and what is cheaper is never slower."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest

from shardwise.core.cluster import Cluster, ClusterError, Curve, Device, Disk, Host, LinkSpec
from shardwise.core.layout import DTYPE_BYTES, ModelSpec, ParamSpec, lay_out
from shardwise.core.topology import Topology
from shardwise.core.wire import Format
from shardwise.core.work import Saved, Work
from shardwise.cost.engine import SLOWED, Compute, Job, Stage, Submit
from shardwise.cost.engine import run as run_program
from shardwise.cost.file import load_cluster
from shardwise.cost.habits import OURS, Habits
from shardwise.cost.price import Prices
from shardwise.cost.program import Program
from shardwise.cost.simulate import USES, Estimate, simulate
from shardwise.cost.units import backward_times
from shardwise.planner.alike import SHORT_STEP, Alike
from shardwise.planner.space import mixed
from shardwise.plans import presets
from shardwise.plans.builtin import builtin
from shardwise.plans.hops import CHUNK_NUMEL
from shardwise.plans.memory import memory
from shardwise.plans.ops import Hop, Kind, Op, Phase
from shardwise.plans.plan import Plan, Tiers, resolve
from shardwise.plans.presets import PRESETS
from shardwise.plans.traffic import Use, step_phases, step_traffic
from shardwise.plans.validate import violations

GRIDS = ("world=1", "node=4,world=1", "node=2,world=2", "node=2,rack=2,world=3")
BLOCKS = 3
FLOPS, UPDATES, COPIES = 1e12, 1e9, 1e11
FAST = 1e30


def cluster(grid: str, *, bandwidth: float = 1e9, latency_s: float = 1e-5, **changes) -> Cluster:
    """Rates that make a transfer about as long as the compute beside it."""
    device = Device(
        name="device",
        kind="cuda",
        memory_bytes=10**9,
        forward={"float32": Curve.of_rate(FLOPS), "bfloat16": Curve.of_rate(FLOPS)},
        backward={"float32": Curve.of_rate(FLOPS), "bfloat16": Curve.of_rate(FLOPS)},
        update=Curve.of_rate(UPDATES),
        copy=Curve.of_rate(COPIES),
        encode=dict.fromkeys(("int8", "int4", "bf16"), Curve.of_rate(1e10)),
        decode=dict.fromkeys(("int8", "int4", "bf16"), Curve.of_rate(1e10)),
    )
    levels = tuple(
        LinkSpec(name=level.name, size=level.size, bandwidth=bandwidth, latency_s=latency_s)
        for level in Topology.parse(grid).levels
    )
    host = Host(memory_bytes=10**10, bandwidth=1e10, update=Curve.of_rate(UPDATES / 4))
    disk = Disk(size_bytes=10**12, read=2e9, write=1e9)
    return replace(
        Cluster(name="test", levels=levels, device=device, host=host, disk=disk), **changes
    )


def model(world: int, blocks: int = BLOCKS, numel: int = 10**6) -> ModelSpec:
    def unit(name: str, numel: int):
        return lay_out(name, [ParamSpec(f"{name}.weight", (numel,), "float32")], world)

    inner = [unit(f"blocks.{i}", numel) for i in range(blocks)]
    return ModelSpec((unit("root", 10**5), *inner))


def work(blocks: int = BLOCKS, flops: float = 1e9) -> Work:
    names = {"root": flops / 4, **{f"blocks.{i}": flops for i in range(blocks)}}
    saved = Saved(
        total=10**7, root=10**5, checkpoints=10**6, small=0, largest_unit=10**6, largest_input=10**5
    )
    return Work(tokens=1000, dtype="float32", forward_flops=names, saved=saved)


def estimate(plan: Plan, on: Cluster, *, accumulate: int = 1, flops: float = 1e9) -> Estimate:
    return simulate(plan, model(on.world), work(flops=flops), on, accumulate=accumulate)


def plan_of(name: str) -> Plan:
    plan = PRESETS[name]()
    return replace(plan, tiers=Tiers(path="/nvme")) if name == "infinity" else plan


CASES = [
    (name, grid)
    for name, grid in product(PRESETS, GRIDS)
    if not violations(plan_of(name), Topology.parse(grid))
]


def test_nearly_all_presets_run_on_all_grids() -> None:
    assert len(CASES) > 0.9 * len(PRESETS) * len(GRIDS)


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "grid"), CASES)
def test_a_steps_time_is_all_accounted_for(name: str, grid: str, accumulate: int) -> None:
    found = estimate(plan_of(name), cluster(grid), accumulate=accumulate)
    assert tuple(found.exposed) == USES
    assert all(seconds >= 0 for seconds in found.exposed.values())
    assert sum(found.exposed.values()) == pytest.approx(found.step_s, rel=1e-9)
    passes = 3 if plan_of(name).activations == "keep" else 4
    flops = (passes * BLOCKS + 3 * 0.25) * 1e9 * accumulate
    assert found.exposed["compute"] == pytest.approx(flops / FLOPS)
    assert found.tokens == 1000 * Topology.parse(grid).world * accumulate
    assert found.flops == work().flops * accumulate  # nothing recomputed


@pytest.mark.parametrize("name", PRESETS)
def test_alike_micro_batches_are_not_simulated_one_by_one(name: str) -> None:
    on = cluster("node=2,world=2")
    arguments = (plan_of(name), model(4), work(), on)
    short, full = (simulate(*arguments, accumulate=6, spans=spans) for spans in (False, True))
    assert short.step_s == pytest.approx(full.step_s, rel=1e-9)
    assert short.exposed == pytest.approx(full.exposed, rel=1e-6, abs=1e-12)


def free(grid: str) -> Cluster:
    """A cluster whose transfers take nothing, codecs included."""
    on = cluster(
        grid, bandwidth=FAST, latency_s=0.0, disk=Disk(size_bytes=1, read=FAST, write=FAST)
    )
    codecs = dict.fromkeys(("int8", "int4", "bf16"), Curve.of_rate(FAST))
    return replace(
        on,
        device=replace(on.device, encode=codecs, decode=codecs),
        host=replace(on.host, bandwidth=FAST),
    )


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_without_transfers_a_step_is_what_the_rank_does_itself(name: str, grid: str) -> None:
    plan, on = plan_of(name), free(grid)
    on = replace(on, device=replace(on.device, copy=Curve.of_rate(FAST)))
    found = estimate(plan, on)
    for use in ("gather", "reduce", "refresh", "tier", SLOWED, "copies"):
        assert found.exposed[use] == pytest.approx(0, abs=1e-9), use
    passes = 3 if plan.activations == "keep" else 4
    compute = (passes * BLOCKS + 3 * 0.25) * 1e9 / FLOPS
    parts = on.topology.factor(plan.optim.spread)
    numels = [unit.flats[0].numel for unit in model(on.world).units]
    rate = UPDATES if plan.optim.tier == "device" else UPDATES / 4
    update = sum(numel // parts for numel in numels) / rate
    assert found.exposed["update"] == pytest.approx(update)
    assert found.step_s == pytest.approx(compute + update)


class TestCopies:
    """What is copied in memory, where nothing else takes time."""

    grid = "node=2,world=2"
    numels = tuple(unit.flats[0].numel for unit in model(4).units)

    def estimate(self, plan: Plan, *, accumulate: int = 1) -> Estimate:
        on = free(self.grid)
        nothing = {"float32": NOTHING}
        # Processors enough, so that nothing is stretched by what runs beside it.
        device = replace(on.device, forward=nothing, backward=nothing, update=NOTHING, share=0.01)
        on = replace(on, device=device)
        return simulate(plan, model(4), work(), on, accumulate=accumulate, spans=True)

    def seconds(self, found: Estimate, what: str) -> float:
        spans = [span for span in found.spans if span.name.startswith(what)]
        return sum(span.end_s - span.begin_s for span in spans)

    def test_gradients_are_collected(self) -> None:
        found = self.estimate(presets.zero1())
        assert found.exposed["copies"] == pytest.approx(sum(self.numels) * 4 / COPIES)

    def test_a_gather_begins_with_the_part_that_is_held(self) -> None:
        found = self.estimate(presets.hsdp())
        gathered = 2 * sum(self.numels[1:]) + self.numels[0]  # the root's once, the others' twice
        assert self.seconds(found, "gather") == pytest.approx(gathered / 2 * 4 / COPIES, rel=1e-3)

    def test_the_kept_rung_is_copied_out(self) -> None:
        found = self.estimate(presets.zero3(keep="node"))
        assert self.seconds(found, "keep") == pytest.approx(sum(self.numels[1:]) / 2 * 4 / COPIES)

    def test_a_master_is_copied_to_the_parameters(self) -> None:
        mixed_amsp = presets.amsp(precision=mixed("bfloat16"))
        found, plain = self.estimate(mixed_amsp), self.estimate(presets.amsp())
        copied = sum(numel // 4 for numel in self.numels) * 2 / COPIES
        assert self.seconds(plain, "refresh") == 0  # where transfers take nothing
        assert self.seconds(found, "refresh") == pytest.approx(copied)
        assert found.exposed["update"] == pytest.approx(plain.exposed["update"])

    def test_micro_batches_are_added_up(self) -> None:
        found = self.estimate(presets.zero1(), accumulate=3)
        # The first is copied to what rests in full, two are added (3 bytes move where a copy moves
        # 2), and the sum is copied to where it travels on from.
        assert self.seconds(found, "hold") == pytest.approx(
            (1 + 2 * 1.5 + 1) * sum(self.numels) * 4 / COPIES, rel=0.01
        )
        assert self.seconds(self.estimate(presets.zero1()), "hold") == 0

    def test_differences_and_feedback_are_taken(self) -> None:
        on, rungs = free(self.grid), resolve(presets.amsp(), Topology.parse(self.grid), "blocks.0")
        prices = Prices(on)

        def copied(stages: list[Stage]) -> float:
            return sum(stage.seconds for stage in stages) * COPIES / 4

        for flags, own in (({}, 0), ({"delta": True}, 1.5 * 100)):
            hop = Hop(1, "world", 2, 1, Format("int4", **flags))
            climb = prices.climb("refresh", Op(Kind.REFRESH, "", hops=(hop,)), 400, rungs)
            assert copied(climb) == pytest.approx(own, abs=1e-6)
        for flags, lost in (({}, 0), ({"feedback": True}, 4 * 100)):
            hop = Hop(1, "world", 2, 1, Format("int4", **flags))
            ((stages, last),) = prices.descend(Op(Kind.REDUCE, "", hops=(hop,)), 400, rungs)
            assert copied([*stages, *last]) == pytest.approx(100 + lost, abs=1e-6)


NOTHING = Curve.of_rate(1e30)


def test_everything_infinitely_fast_takes_no_time() -> None:
    on = free("node=2,world=2")
    fast = Curve.of_rate(FAST)
    device = replace(
        on.device, forward={"float32": fast}, backward={"float32": fast}, update=fast, copy=fast
    )
    for name in PRESETS:
        instant = replace(on, device=device, host=replace(on.host, update=fast))
        assert estimate(plan_of(name), instant).step_s < 1e-12


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("name", "grid"), CASES)
def test_slower_links_never_make_a_step_faster(name: str, grid: str, accumulate: int) -> None:
    rates = [1e12, 4e9, 2e9, 1e9, 5e8, 1e8]
    steps = [
        estimate(plan_of(name), cluster(grid, bandwidth=rate), accumulate=accumulate).step_s
        for rate in rates
    ]
    assert all(slow >= fast * (1 - 1e-9) for fast, slow in pairwise(steps))
    if Topology.parse(grid).world > 1:
        assert steps[-1] > 2 * steps[0]


def test_a_step_cannot_be_shorter_than_its_busiest_link() -> None:
    on = cluster("node=2,world=2", bandwidth=1e7, latency_s=0.0)
    plan = presets.zero3()
    sent = step_traffic(plan, model(4), on.topology).sent_bytes(level="world")
    assert estimate(plan, on).step_s >= sent / (1e7 / 2)  # two ranks share a node's link


# --- prefetching ----------------------------------------------------------------------------------


def test_gathers_one_ahead_are_hidden_and_those_on_use_are_not() -> None:
    """Compute is long enough for the next gather; then only the first of all is seen."""
    on = cluster("world=4")
    late, ahead = (
        estimate(replace(presets.zero3(), prefetch=depth), on, flops=2e10) for depth in (0, 1)
    )
    hop = Prices(on).hop("gather", Hop(0, "world", 4, 3 * 10**6, None), reduces=False).seconds
    root = Prices(on).hop("gather", Hop(0, "world", 4, 3 * 10**5, None), reduces=False).seconds
    # Each block is gathered in forward and in backward, the root once.
    assert late.exposed["gather"] >= 0.99 * (2 * BLOCKS * hop + root)
    # Before forward nothing runs that could hide the first; before backward the root's own does.
    assert 0.99 * (hop + root) <= ahead.exposed["gather"] < 1.01 * (hop + root)
    assert ahead.step_s < late.step_s


def test_parameters_in_full_are_never_gathered() -> None:
    for name in ("ddp", "zero1", "zero2"):
        found = simulate(plan_of(name), model(4), work(), cluster("node=2,world=2"), spans=True)
        assert found.exposed["gather"] == 0
        assert not any(span.track == "gather" for span in found.spans)
    gathered = simulate(presets.zero3(), model(4), work(), cluster("node=2,world=2"), spans=True)
    assert any(span.track == "gather" for span in gathered.spans)


def test_one_rank_sends_nothing() -> None:
    found = estimate(presets.zero3(), cluster("world=1"))
    assert found.exposed["gather"] == found.exposed["reduce"] == found.exposed["refresh"] == 0


def test_a_refresh_is_hidden_behind_the_next_forward() -> None:
    """ZeRO-1 sends its new weights while the next step has begun: long forwards hide nearly all."""
    on = cluster("world=4")
    short, long = (estimate(presets.zero1(), on, flops=flops) for flops in (1e6, 1e11))
    assert long.exposed["refresh"] < short.exposed["refresh"] / 2


# --- what is priced is what is planned ------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("name", "grid"), CASES)
def test_the_bytes_that_are_priced_are_the_schedules(name: str, grid: str, accumulate: int) -> None:
    """Without latencies a hop's seconds times its share of the link are its bytes, chunks or not."""
    plan, on = plan_of(name), cluster(grid, latency_s=0.0)
    for spec in (model(on.world), model(on.world, numel=CHUNK_NUMEL * 7)):
        sent = sent_bytes(plan, spec, on, accumulate)
        traffic = step_traffic(plan, spec, on.topology, accumulate=accumulate)
        for level in on.levels:
            # The step before it is simulated as well.
            expected = 2 * traffic.sent_bytes(level=level.name)
            assert sent[level.name] == pytest.approx(expected, rel=1e-5)


def sent_bytes(
    plan: Plan, spec: ModelSpec, on: Cluster, accumulate: int = 1, habits: Habits = OURS
) -> Counter[str]:
    """By level: what the jobs of a program send, told of their seconds."""
    program = Program(plan, spec, work(), on, habits)
    sent: Counter[str] = Counter()
    for instruction in program.steps(list(step_phases(accumulate).elements())):
        for stage in instruction.job.stages if isinstance(instruction, Submit) else []:
            for resource, _ in stage.needs:
                if resource.startswith("link "):
                    level = resource.removeprefix("link ")
                    share = on.level(level).bandwidth / on.ranks_inside(level)
                    sent[level] += stage.seconds * share
    return sent


def test_the_operations_that_are_priced_are_the_models() -> None:
    program = Program(presets.zero3(), model(4), work(), cluster("world=4"))
    seconds = sum(
        instruction.stage.seconds
        for instruction in program.steps(list(step_phases(1).elements()))
        if isinstance(instruction, Compute) and instruction.stage.use == "compute"
    )
    assert seconds == pytest.approx(2 * work().flops / FLOPS)


def test_tiles_share_their_units_operations() -> None:
    """Tiles of a block are gathered apart and together compute what the block computes."""
    facts, on = builtin("gpt-mini"), cluster("world=4")
    whole = presets.zero3()
    cut = replace(whole, tiling=replace(whole.tiling, numel=10**5))
    options = [(plan, facts.work(1, 128, plan, on.topology)) for plan in (whole, cut)]
    specs = [facts.spec(plan, on.topology) for plan, _ in options]
    assert len(specs[1].units) > 2 * len(specs[0].units)
    first, second = (
        simulate(plan, spec, flops, on).exposed["compute"]
        for (plan, flops), spec in zip(options, specs, strict=True)
    )
    assert second == pytest.approx(first, rel=1e-9)


def test_memory_is_the_models() -> None:
    on, plan = cluster("node=2,world=2"), presets.zeropp()
    for accumulate, accumulates in ((1, False), (4, True)):
        found = estimate(plan, on, accumulate=accumulate).memory
        assert found == memory(
            plan, model(4), on.topology, accumulates=accumulates, saved=work().saved,
            accelerated=True,
        )  # fmt: skip


def frozen(names: tuple[str, ...]) -> ModelSpec:
    """The model with some units that are not trained."""

    def freeze(unit):
        if unit.name not in names:
            return unit
        (flat,) = unit.flats
        (slot,) = flat.slots
        still = replace(slot, param=replace(slot.param, requires_grad=False))
        return replace(unit, flats=(replace(flat, slots=(still,)),))

    made = model(4)
    return replace(made, units=tuple(freeze(unit) for unit in made.units))


def test_backward_of_what_is_not_trained() -> None:
    """Through frozen units gradients only pass; before the first trained one none does."""
    every = ("root", "blocks.0", "blocks.1", "blocks.2")
    for names, times in (
        ((), (2, 2, 2, 2)),
        (every[1:2], (2, 1, 2, 2)),
        (every[:2], (1, 0, 1, 2)),
        (every[:3], (1, 0, 0, 1)),
    ):
        assert backward_times(frozen(names)) == dict(zip(every, times, strict=True))
    adapted = lay_out(
        "blocks.0",
        [
            ParamSpec("weight", (990 * 64,), "float32", requires_grad=False),
            ParamSpec("adapter", (10 * 64,), "float32"),
        ],
        4,
    )
    still = frozen(every)
    first = replace(still, units=(still.units[0], adapted, *still.units[2:]))
    assert backward_times(first) == pytest.approx(
        {"root": 1, "blocks.0": 1.01, "blocks.1": 1, "blocks.2": 1}, rel=0.01
    )
    on = cluster("node=2,world=2")
    for plan in (presets.zero3(), replace(presets.zero3(), activations="recompute")):
        whole = simulate(plan, model(4), work(), on, spans=True)
        part = simulate(plan, frozen(every[:3]), work(), on, spans=True)
        found = [span.name for span in part.spans]
        assert not {"backward blocks.0", "recompute blocks.0", "backward blocks.1"} & set(found)
        assert found.count("gather blocks.1") == 1
        assert found.count("gather blocks.2") == 2
        assert part.exposed["compute"] < 0.7 * whole.exposed["compute"]


def test_sums_of_micro_batches_are_priced_in_every_pass() -> None:
    """Hops write to where sums rest and read as much again to add; where none leads there, values
    are copied. At last sums go back to where they travel on from, unless they are at the bottom."""
    on = cluster("node=2,world=2", bandwidth=FAST, latency_s=0.0)
    held = {}
    for name in ("zero1", "amsp", "zero3"):
        plan = PRESETS[name]()
        program = Program(plan, model(4), work(), on)
        jobs = [
            instruction.job
            for instruction in program.steps([Phase.FIRST, Phase.MIDDLE, Phase.LAST])
            if isinstance(instruction, Submit) and instruction.job.name == "hold blocks.0"
        ]
        part = 4 * 10**6 / on.topology.factor(plan.grads.spread) / COPIES
        count = 3 if name == "zero1" else 2  # the others' first passes cost nothing more
        held[name] = [sum(s.seconds for s in job.stages) / part for job in jobs[-count:]]
        assert len(jobs) == 2 * count  # of a step to warm up and another
    assert held["zero1"] == pytest.approx([1, 1.5, 2.5], rel=0.01)
    assert held["amsp"] == pytest.approx([0.5, 1.5], rel=0.01)
    assert held["zero3"] == pytest.approx([0.5, 0.5], rel=0.01)


def test_sums_do_not_keep_the_next_units_hops_waiting() -> None:
    """The inner hops of a unit begin while the outer one of the unit before is under way."""
    on = cluster("node=2,world=2", bandwidth=1e10)
    slow = replace(on, levels=(on.levels[0], replace(on.levels[1], bandwidth=1e7)))
    found = simulate(presets.lean(), model(4), work(), slow, accumulate=2, spans=True)
    outer = max(s.end_s for s in found.spans if (s.track, s.name) == ("outer", "reduce blocks.2"))
    inner = [s.begin_s for s in found.spans if (s.track, s.name) == ("reduce", "reduce blocks.1")]
    assert max(inner) < outer


def test_only_the_hop_that_overlaps_does() -> None:
    """Under no_sync a lean reduction ends in the node: nothing of it travels on the outer lane."""
    program = Program(presets.lean(), model(4), work(), cluster("node=2,world=2"))
    for phase, lanes in ((Phase.MIDDLE, {"reduce"}), (Phase.ONLY, {"reduce", "outer"})):
        jobs = [
            instruction.job
            for instruction in program.steps([phase])
            if isinstance(instruction, Submit) and instruction.job.name == "reduce blocks.0"
        ]
        assert {job.lane for job in jobs} == lanes


# --- tiers and others' habits ---------------------------------------------------------------------


def test_a_disks_buffers_are_the_hosts_beside_accelerators_only() -> None:
    on, plan = cluster("node=2,world=2"), plan_of("infinity")
    beside, same = (
        estimate(plan, replace(on, device=replace(on.device, kind=kind))).memory
        for kind in ("cuda", "cpu")
    )
    assert same.staging > 0 == same.cpu
    assert beside.cpu == same.staging
    # On the device itself only sums on their way to the disk: a shard of each size of unit.
    units = model(on.world).units
    assert beside.staging == sum({flat.numel for unit in units for flat in unit.flats})
    assert beside.total < same.total


def test_what_a_disk_has_goes_through_host_memory_to_an_accelerator() -> None:
    """At the slower one's speed, and the other has as much left as it does not need."""
    fast, slow = 8e9, 2e9
    for disk, host in ((fast, slow), (slow, fast)):
        on = cluster("node=2,world=2", disk=Disk(size_bytes=10**12, read=2 * disk, write=disk))
        on = replace(on, host=replace(on.host, bandwidth=host))
        prices = Prices(on)
        stage = prices.move("nvme", 1e9, writes=False)
        assert stage.seconds == pytest.approx(1e9 / slow)
        shares = dict(stage.needs)
        assert shares == pytest.approx({"disk": slow / disk, "host read": slow / host})
        # What the host updates stays there, and of CPUs all does.
        assert dict(prices.move("nvme", 1e9, writes=False, to_host=True).needs) == {"disk": 1.0}
        alone = Prices(replace(on, host=None, device=replace(on.device, kind="cpu")))
        assert alone.move("nvme", 1e9, writes=False).seconds == pytest.approx(1e9 / disk)


def test_slower_disks_expose_more() -> None:
    plan = plan_of("infinity")
    fast, slow = (
        estimate(plan, cluster("node=2,world=2", disk=Disk(size_bytes=10**12, read=r, write=r)))
        for r in (1e10, 1e8)
    )
    assert slow.exposed["tier"] > 10 * fast.exposed["tier"]
    assert estimate(presets.zero3(), cluster("node=2,world=2")).exposed["tier"] == 0


def test_hosts_that_update_take_the_hosts_time() -> None:
    base = presets.zero2()
    moved = replace(base, optim=replace(base.optim, tier="cpu"))
    near, far = (estimate(plan, cluster("world=4")).exposed["update"] for plan in (base, moved))
    assert far == pytest.approx(4 * near)


def test_a_flat_ring_has_as_many_latencies_as_ranks() -> None:
    on = cluster("node=4,world=3", bandwidth=FAST, latency_s=1.0)
    hops = [Hop(1, "world", 3, 1, None), Hop(0, "node", 4, 1, None)]
    ladder = sum(stage.seconds for stage in Prices(on).hops("gather", hops, reduces=False))
    (ring,) = Prices(on, Habits(flat=True)).hops("gather", hops, reduces=False)
    assert ladder == pytest.approx(2 + 3)
    assert ring.seconds == pytest.approx(11)
    assert ("link world", 1.0) in ring.needs


def test_an_all_reduce_sends_sums_to_all_that_hold_the_parameters() -> None:
    on = cluster("node=2,world=2", latency_s=0.0)
    spec, everybody = model(on.world), Habits(all_reduces=True)
    plans = {"ddp": presets.ddp(), "zero1": presets.zero1(), "hsdp": presets.hsdp()}
    ours = {name: sent_bytes(plan, spec, on) for name, plan in plans.items()}
    theirs = {name: sent_bytes(plan, spec, on, habits=everybody) for name, plan in plans.items()}
    # Without owners everybody needs all sums anyway; and a refresh sends as much as a reduction.
    assert theirs["ddp"] == pytest.approx(ours["ddp"])
    assert theirs["hsdp"] == pytest.approx(ours["hsdp"])
    assert theirs["zero1"] == pytest.approx({k: 1.5 * v for k, v in ours["zero1"].items()})


def test_a_flat_ring_adds_up_what_crosses_one_level() -> None:
    """A level that is cut in two has two hops on the same link."""
    on = cluster("node=2,world=8", bandwidth=1.0, latency_s=0.0)
    hops = [Hop(2, "world", 4, 30, None), Hop(1, "world", 2, 20, None), Hop(0, "node", 2, 5, None)]
    (ring,) = Prices(on, Habits(flat=True)).hops("gather", hops, reduces=False)
    assert ring.seconds == pytest.approx((30 + 20) * 2)


def test_a_flat_reduction_is_a_ring_of_those_that_share_parameters_and_one_of_replicas() -> None:
    on = cluster("node=4,world=3", bandwidth=FAST, latency_s=1.0)
    seconds = {}
    for name, plan in {"zero3": presets.zero3(), "hsdp": presets.hsdp()}.items():
        rungs = resolve(plan, on.topology, "blocks.0")
        hops = (Hop(0, "node", 4, 1, None), Hop(1, "world", 3, 1, None))
        op = Op(Kind.REDUCE, "blocks.0", hops=hops)
        ((stages, _),) = Prices(on, Habits(flat=True)).descend(op, 12, rungs)
        seconds[name] = sum(stage.seconds for stage in stages)
    assert seconds == {"zero3": pytest.approx(11), "hsdp": pytest.approx(3 + 2)}


def test_what_transfers_take_from_compute() -> None:
    def ends(busy: float, kind: str) -> dict[str, float]:
        on = cluster("world=4", latency_s=0.0)
        level, device = replace(on.levels[0], busy=busy), replace(on.device, kind=kind)
        prices = Prices(replace(on, levels=(level,), device=device))
        ring = prices.hop("gather", Hop(0, "world", 4, 10**9, None), reduces=False)
        work = prices.compute("float32", FLOPS, backward=False)
        program = [Submit(Job("gather", "gather", [ring])), Compute("forward", work)]
        spans = run_program(iter(program), spans=True).spans
        return {span.name: pytest.approx(span.end_s) for span in spans}

    assert ends(0.0, "cuda") == {"gather": 1.0, "forward": 1.0}
    # The gather is not slowed; the compute has three quarters of the device until it is over.
    assert ends(0.25, "cuda") == {"gather": 1.0, "forward": 1.25}
    # A host's processors are shared: who asks for little gets it, who asks for much gets half.
    assert ends(0.25, "cpu") == {"gather": 1.0, "forward": 1.25}
    assert ends(1.0, "cuda")["gather"] == 1.0
    assert ends(1.0, "cpu") == {"gather": 2.0, "forward": 2.0}


def test_a_refresh_that_is_waited_for_hides_behind_nothing() -> None:
    on, plan = cluster("world=4"), presets.zero1()
    ours, theirs = (
        simulate(plan, model(4), work(), on, habits=habits) for habits in (OURS, Habits(waits=True))
    )
    sent = step_traffic(plan, model(4), on.topology).sent_bytes(use=Use.REFRESH)
    assert 0 < ours.exposed["refresh"] < 0.9 * theirs.exposed["refresh"]
    assert theirs.exposed["refresh"] == pytest.approx(sent / 1e9, rel=0.1)


# --- short models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "hsdp", "amsp", "zeropp"])
def test_short_models_tell_of_long_ones(name: str, accumulate: int) -> None:
    facts, on = builtin("llama-7b"), load_cluster("a800-amsp").with_world(64)
    plan = replace(PRESETS[name](), precision=mixed("bfloat16"))
    spec = facts.spec(plan, on.topology)
    needed = facts.work(1, 2048, plan, on.topology)
    assert Alike(spec).is_longer_than(SHORT_STEP)
    near = Alike(spec).estimate(plan, needed, on, accumulate=accumulate)
    full = simulate(plan, spec, needed, on, accumulate=accumulate)
    # Here reductions of HSDP are as long as backward: see Note: Nearly.
    loose = name == "hsdp"
    assert near.step_s == pytest.approx(full.step_s, rel=0.07 if loose else 1e-6)
    assert loose or near.exposed == pytest.approx(full.exposed, rel=1e-6, abs=1e-9)
    assert near.memory == full.memory
    assert (near.tokens, near.flops) == (full.tokens, full.flops)


@pytest.mark.parametrize("activations", ["keep", "recompute", "cpu", "nvme"])
def test_short_models_tell_of_long_ones_with_activations_elsewhere(activations: str) -> None:
    facts, on = builtin("gpt-1.3b"), load_cluster("dgx2-v100").with_world(32)
    plan = replace(
        presets.zero3(precision=mixed("float16")), activations=activations, tiers=Tiers(path="/x")
    )
    spec, needed = facts.spec(plan, on.topology), facts.work(2, 1024, plan, on.topology)
    near = Alike(spec).estimate(plan, needed, on, accumulate=1)
    full = simulate(plan, spec, needed, on)
    # On a tier there is a moment in which reads meet the last writes, and only in long models.
    assert near.step_s == pytest.approx(full.step_s, rel=0.02 if activations == "nvme" else 1e-6)
    assert near.memory == full.memory


@pytest.mark.parametrize("layers", [6, 7, 10, 11])
def test_models_that_are_hardly_long(layers: int) -> None:
    facts, on = builtin(f"gpt:layers={layers},width=512,heads=8"), cluster("node=2,world=2")
    plan = presets.zero3()
    spec, needed = facts.spec(plan, on.topology), facts.work(1, 128, plan, on.topology)
    near = Alike(spec).estimate(plan, needed, on, accumulate=1)
    full = simulate(plan, spec, needed, on)
    assert near.step_s == pytest.approx(full.step_s, rel=1e-3)
    assert near.memory == full.memory


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_master_copies_are_written_out(name: str) -> None:
    """Mixed precision has a master; its new values are copied to the parameters' own dtype: in the
    refresh's lane before they travel, and by the program itself where nothing travels."""
    on = cluster("world=4")
    plan = PRESETS[name](precision=mixed("bfloat16"))
    found = simulate(plan, model(4), replace(work(), dtype="bfloat16"), on, spans=True)
    own = sum(unit.flats[0].numel // 4 for unit in model(4).units)
    update, copies = own / UPDATES, own * DTYPE_BYTES["bfloat16"] / COPIES
    expected = update + (copies if name == "zero3" else 0)
    assert found.exposed["update"] == pytest.approx(expected)
    refreshed = {span.name for span in found.spans if span.track == "refresh"}
    assert refreshed == {f"refresh {unit.name}" for unit in model(4).units}


def test_a_host_that_nobody_described_is_an_error_and_not_free() -> None:
    lacking = replace(cluster("node=2,world=2"), host=None)
    prices = Prices(lacking)
    with pytest.raises(ClusterError, match="no host"):
        prices.move("cpu", 1000, writes=True)
    with pytest.raises(ClusterError, match="no host"):
        prices.update(1000, "nvme")
    one_memory = replace(lacking, device=replace(lacking.device, kind="cpu"))
    assert Prices(one_memory).move("cpu", 1000, writes=True).seconds == 0


def test_updates_beside_a_long_backward_cost_only_the_last_of_them() -> None:
    on, flops = cluster("node=2,world=2"), 2e11  # a block's backward takes longer than its states
    at_step, beside = (
        estimate(
            replace(plan_of("infinity"), tiers=Tiers(path="/nvme", update=update)),
            on,
            flops=flops,
        )
        for update in ("step", "backward")
    )
    assert sum(beside.exposed.values()) == pytest.approx(beside.step_s, rel=1e-9)
    assert beside.exposed["compute"] == pytest.approx(at_step.exposed["compute"])
    # Root's is left, and of the blocks' only what the first one's needs after backward.
    saved = at_step.step_s - beside.step_s
    streamed = at_step.exposed["tier"] + at_step.exposed["update"]
    assert 0.5 * streamed < saved < streamed
    assert beside.memory == at_step.memory
