"""The search finds the best of all legal plans, and says what it rests on."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app, run
from shardwise.core.cluster import Cluster, Curve, Device, Disk, Host, LinkSpec
from shardwise.core.errors import PlanError
from shardwise.cost.file import load_cluster
from shardwise.model.named import facts_of
from shardwise.planner import space
from shardwise.planner.advice import _binds, _faster, advise
from shardwise.planner.choices import wires as wires_of
from shardwise.planner.families import TOLERANCE, presets_first
from shardwise.planner.figures import Figures
from shardwise.planner.request import Request, evaluate
from shardwise.planner.search import Search, Space, search
from shardwise.planner.space import Batch, Loss, batches, mixed, placements, wirings
from shardwise.planner.units import refine
from shardwise.plans.file import load_plan
from shardwise.plans.plan import Precision, Tiling
from shardwise.plans.presets import PRESETS
from shardwise.plans.validate import violations


def slow_cluster(*, node: float = 2e9, world: float = 0.1e9, memory: int = 1 << 30) -> Cluster:
    rate = Curve.of_rate
    kinds = ("fp32", "bf16", "fp16", "int8", "int4")
    return Cluster(
        name="slow",
        levels=(
            LinkSpec(name="node", size=2, bandwidth=node, latency_s=1e-5),
            LinkSpec(name="world", size=2, bandwidth=world, latency_s=1e-4),
        ),
        device=Device(
            name="device",
            kind="cuda",
            memory_bytes=memory,
            forward={"bfloat16": rate(1e12)},
            backward={"bfloat16": rate(1e12)},
            update=rate(1e9),
            copy=rate(20e9),
            encode={kind: rate(5e9) for kind in kinds},
            decode={kind: rate(5e9) for kind in kinds},
        ),
    )


def request(**changes) -> Request:
    base = Request(
        facts=facts_of("gpt-tiny"),
        cluster=slow_cluster(),
        global_batch=8,
        seq=128,
        precision=mixed("bfloat16"),
    )
    return replace(base, **changes)


@pytest.mark.parametrize(("loss", "world"), [(Loss.SAFE, 0.02e9), (Loss.NONE, 2e9)])
def test_the_winner_is_the_best_of_all_plans_run_one_by_one(loss, world):
    asked = request(cluster=slow_cluster(world=world), loss=loss)
    found = search(asked)
    every = [
        evaluate(asked, replace(wired, activations=activations), batch)
        for batch in batches(asked.global_batch, 4)
        for plan in space.partitionings(asked.cluster.topology, accumulates=batch.accumulate > 1)
        for wired in wirings(replace(plan, precision=asked.precision), asked.cluster.topology, loss)
        for activations in ("keep", "recompute")
    ]
    best = min(one.step_s for one in every if one.fits(asked))
    assert found.best.step_s <= (1 + TOLERANCE) * best * 1.01  # among near ones memory decides
    assert found.best.step_s >= best * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kind", "model", "limits"), [("cuda", "gpt-tiny", (14, 9)), ("cpu", "gpt-small", (700, 400))]
)
def test_no_plan_is_faster_than_its_bound(kind, model, limits):
    host = Host(memory_bytes=1 << 40, bandwidth=1e8, update=Curve.of_rate(1e9))
    disk = Disk(size_bytes=1 << 40, read=1e8, write=5e7)
    cluster = replace(slow_cluster(world=2e9), host=host, disk=disk)
    cluster = replace(cluster, device=replace(cluster.device, kind=kind))
    asked = request(facts=facts_of(model), cluster=cluster, path="/disk", global_batch=4)
    space = Space(asked, tile_numel=0, progress=lambda _: None)
    families = []
    for limit in limits:
        families += space.families(limit << 20)
    tiers = {family.plan.optim.tier for family in families}
    assert tiers > {"device"}
    for family in families[::7]:
        for plan in wirings(family.plan, cluster.topology, asked.loss):
            assert evaluate(asked, plan, family.batch).step_s >= family.bound_s * (1 - 1e-9)


def test_what_tiles_save_is_known():
    """A plan whose layers are in tiles does not keep what whole layers would."""
    asked = request(facts=facts_of("gpt-tiny"), seq=512)
    figures = Figures(asked)
    tiling = Tiling(numel=1 << 12)
    for name in ("ddp", "zero3"):
        plan = replace(PRESETS[name](), tiling=tiling, precision=asked.precision)
        expected = asked.facts.work(1, 512, plan, asked.cluster.topology).saved
        assert figures.work(plan, Batch(1, 1)).saved == expected


def test_it_is_deterministic_legal_and_fits():
    first, second = search(request()), search(request())
    assert [c.plan for c in first.ranked] == [c.plan for c in second.ranked]
    for candidate in first.ranked:
        assert candidate.fits(request())
        assert not violations(candidate.plan, request().cluster.topology)


def test_lossless_means_that_nothing_is_lost():
    asked = request(cluster=slow_cluster(world=0.01e9))
    found, exact = search(asked), search(replace(asked, loss=Loss.NONE))
    assert found.best.plan.is_lossy("bfloat16")
    assert not any(c.plan.is_lossy("bfloat16") for c in exact.ranked)
    assert exact.best.step_s > found.best.step_s


def test_less_memory_is_never_faster():
    looking = Search(request())
    steps = [looking.run(1, limit=limit << 20).best for limit in (1000, 14, 11, 9)]
    times = [c.step_s for c in steps if c is not None]
    assert len(times) >= 3
    assert all(b >= a * (1 - 0.011) for a, b in pairwise(times))


def test_nothing_fits_says_by_how_much():
    advice = advise(request(memory_bytes=4 << 20))
    assert advice.best is None
    [lack] = advice.lacking()
    assert lack.tier == "device"
    assert lack.needed > lack.available == 4 << 20


def test_a_disk_makes_a_model_fit_and_few_units_go_there():
    disk = Disk(size_bytes=1 << 40, read=4e9, write=2e9)
    # Without an accelerator: its own processors update what rests on the disk.
    cluster = slow_cluster()
    cluster = replace(cluster, disk=disk, device=replace(cluster.device, kind="cpu"))
    large = {"facts": facts_of("gpt-large"), "loss": Loss.NONE, "global_batch": 4}
    smaller = request(cluster=cluster, memory_bytes=2 << 30, **large)
    assert search(smaller).best is None
    smaller = replace(smaller, path="/disk")
    found = search(smaller).best
    assert found is not None
    assert "nvme" in {found.plan.params.tier, found.plan.grads.tier, found.plan.optim.tier}
    better = refine(smaller, found)
    assert better.fits(smaller)
    assert better.step_s <= found.step_s


def test_wires_that_need_more_memory_than_there_is_are_not_chosen():
    """In float32 a refresh by differences needs a master copy, which raw hops do not."""
    cluster = slow_cluster(world=0.002e9)
    rate = {"float32": Curve.of_rate(1e12)}
    cluster = replace(cluster, device=replace(cluster.device, forward=rate, backward=rate))
    asked = request(cluster=cluster, precision=Precision(), global_batch=4)
    free = search(asked)
    assert any(c.plan.optim.wire for c in free.ranked)
    tight = replace(asked, memory_bytes=int(0.999 * free.best.estimate.memory.total))
    for _ in range(6):
        found = search(tight)
        if found.best is None:
            break
        assert all(c.fits(tight) for c in found.ranked)
        tight = replace(tight, memory_bytes=int(0.999 * found.best.estimate.memory.total))


def test_frozen_parameters_do_not_count_in_the_bound():
    facts = FrozenFacts(facts_of("gpt-tiny"))
    asked = request(facts=facts, global_batch=4)
    space = Space(asked, tile_numel=0, progress=lambda _: None)
    for family in list(space.families(1 << 40))[::5]:
        step_s = evaluate(asked, family.plan, family.batch).step_s
        assert step_s >= family.bound_s * (1 - 1e-9)


class FrozenFacts:
    """A model of which only one unit is trained: the root, or another one by its number."""

    def __init__(self, facts, trained=0):
        self._facts, self.name, self.numel = facts, facts.name, facts.numel
        self.work, self._trained = facts.work, trained

    def spec(self, plan, topology):
        spec = self._facts.spec(plan, topology)
        trained = spec.units[self._trained]
        units = [
            unit if unit is trained else replace(unit, flats=tuple(map(self._frozen, unit.flats)))
            for unit in spec.units
        ]
        return replace(spec, units=tuple(units))

    def _frozen(self, flat):
        slots = (replace(s, param=replace(s.param, requires_grad=False)) for s in flat.slots)
        return replace(flat, slots=tuple(slots))


def test_placements_need_a_place():
    cluster = slow_cluster()
    assert placements(cluster, "") == [("device", "device", "device")]
    disk = replace(cluster, disk=Disk(size_bytes=1, read=1, write=1))
    assert placements(disk, "") == [("device", "device", "device")]  # nobody said where
    assert {optim for _, _, optim in placements(disk, "/disk")} == {"device"}  # who would update?
    on_cpu = replace(disk, device=replace(disk.device, kind="cpu"))
    assert ("nvme", "nvme", "nvme") in placements(on_cpu, "/disk")


def test_batches_divide_the_global_batch():
    assert batches(8, 4) == [Batch(2, 1), Batch(1, 2)]
    with pytest.raises(PlanError, match="multiple of 4"):
        batches(6, 4)


@pytest.fixture(scope="module")
def advice():
    return advise(request())


class TestAdvice:
    def test_the_front_trades_memory_for_time(self, advice):
        front = advice.front
        memory = [c.estimate.memory.total for c in front]
        assert memory == sorted(memory, reverse=True)
        assert [c.step_s for c in front] == sorted(c.step_s for c in front)

    def test_what_is_found_for_less_memory_may_win(self, advice, monkeypatch):
        class Hasty(Search):
            """One that overlooks the best plan unless memory is short."""

            def run(self, count=1, *, limit=None, **options):
                result = super().run(count, limit=limit, **options)
                if limit is not None:
                    return result
                estimate = replace(result.best.estimate, step_s=1.005 * result.best.step_s)
                return replace(result, ranked=(replace(result.best, estimate=estimate),))

        monkeypatch.setattr("shardwise.planner.advice.Search", Hasty)
        assert advise(request()).best == advice.best

    def test_what_more_bandwidth_buys_where_it_binds(self):
        advice = advise(request(cluster=slow_cluster(world=0.005e9), loss=Loss.NONE))
        gains = {what_if.change: what_if.speed_up for what_if in advice.what_ifs}
        assert gains["twice the bandwidth on world"] > 1.3
        assert gains["twice the bandwidth on node"] < 1.1
        assert "communication" in advice.binds

    def test_why_it_wins(self, advice):
        assert {choice.what for choice in advice.choices} >= {"P", "G and OS", "wires", "batch"}
        for choice in advice.choices:
            assert choice.mine != choice.instead, choice
            # Among equally fast plans what loses nothing and needs less memory wins.
            assert choice.over >= 0.98 or not choice.fits, choice
        wires = next(choice for choice in advice.choices if choice.what == "wires")
        other = replace(advice.best.plan, overrides=())
        assert wires.mine == wires_of(other)

    def test_what_a_choice_costs_is_what_its_plan_takes(self):
        asked = request(cluster=slow_cluster(world=0.005e9))
        advice = advise(asked)
        wires = next(choice for choice in advice.choices if choice.what == "wires")
        plans = wirings(replace(advice.best.plan, overrides=()), asked.cluster.topology, asked.loss)
        steps = {wires_of(p): evaluate(asked, p, advice.best.batch).step_s for p in plans}
        best = steps.pop(wires.mine)
        assert wires.over == pytest.approx(min(steps.values()) / best, rel=0.02)
        assert wires.grown in ("gather", "reduce", "refresh", "sharing")

    def test_the_peak_and_its_causes(self, advice):
        best = advice.best.estimate.memory
        assert 0.97 * best.total <= advice.peak.memory.total <= best.total
        assert sum(advice.peak.causes().values()) == advice.peak.memory.total
        assert advice.peak.name.startswith("backward ")

    @pytest.mark.parametrize(
        ("use", "words"),
        [("update", "optimizer's update, 60%"), ("tier", "host memory"), ("copies", "copies")],
    )
    def test_whatever_takes_long_binds(self, advice, use, words):
        step_s = advice.best.step_s
        exposed = dict.fromkeys(advice.best.estimate.exposed, 0.0)
        exposed |= {"compute": 0.4 * step_s, use: 0.6 * step_s}
        estimate = replace(advice.best.estimate, exposed=exposed)
        no_gain = [replace(what_if, speed_up=1.0) for what_if in advice.what_ifs]
        assert words in _binds(replace(advice.best, estimate=estimate), tuple(no_gain))

    def test_what_faster_hosts_and_disks_would_buy(self):
        host = Host(memory_bytes=1 << 40, bandwidth=1e7, update=Curve.of_rate(1e9))
        disk = Disk(size_bytes=1 << 40, read=1e7, write=1e7)
        cluster = replace(slow_cluster(), host=host, disk=disk)
        changes = dict(_faster(cluster, True))
        assert changes["twice the bandwidth to host memory"].host.bandwidth == 2e7
        assert changes["disks twice as fast"].disk.read == 2e7
        assert not any(other.host != host for _, other in _faster(cluster, False))

    def test_presets_are_no_faster_than_the_winner(self, advice):
        fitting = [c for c in advice.presets.values() if c.fits(advice.request)]
        assert fitting
        assert all(c.step_s >= 0.99 * advice.best.step_s for c in fitting)

    def test_presets_that_are_left_out_have_a_reason(self, advice):
        assert advice.presets.keys() | advice.left_out.keys() == PRESETS.keys()
        assert not advice.presets.keys() & advice.left_out.keys()
        assert "disk" in advice.left_out["infinity"]


class TestCommand:
    def run(self, *arguments: str):
        return CliRunner().invoke(app, ["plan", *arguments])

    def test_it_writes_a_plan_that_loads_and_a_chart(self, tmp_path: Path):
        plan, chart = tmp_path / "plan.toml", tmp_path / "front.svg"
        result = self.run(
            "--model", "gpt-mini", "--cluster", "dgx-a100", "--ranks", "16", "--seq", "128",
            "-o", str(plan), "--chart", str(chart),
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "Bottleneck" in result.output
        assert not violations(load_plan(plan), load_cluster("dgx-a100").with_world(16).topology)
        assert chart.read_text(encoding="utf-8").startswith("<svg")

    def test_json_has_the_numbers(self):
        result = self.run(
            "--model", "gpt-mini", "--cluster", "dgx-a100", "--ranks", "8", "--seq", "128", "--json"
        )
        answer = json.loads(result.stdout)
        assert answer["best"]["fits"]
        assert answer["peak"]["when"].startswith("backward")
        at_peak, needed = answer["peak"]["bytes"].values(), answer["best"]["memory_bytes"]
        assert 0.97 * needed <= sum(at_peak) <= needed
        assert {choice["what"] for choice in answer["choices"]} >= {"P", "G and OS"}
        assert sum(answer["best"]["exposed_s"].values()) == pytest.approx(answer["best"]["step_s"])

    def test_nothing_fits_ends_with_another_code(self):
        result = self.run(
            "--model", "gpt-mini", "--cluster", "a800-amsp", "--ranks", "2", "--seq", "128",
            "--memory", "30 MiB",
        )  # fmt: skip
        assert result.exit_code == 1
        assert "too little" in result.output
        assert "Memory peaks in backward blocks." in result.output
        # Nobody has to try: what is told was looked at.
        more = re.search(
            r"Each of these alone would make it fit:.*--ranks (\d+)\)", result.output, re.S
        )
        assert more
        arguments = ("--model", "gpt-mini", "--cluster", "dgx-a100", "--seq", "128")
        result = self.run(*arguments, "--memory", "30 MiB", "--ranks", more[1])
        assert result.exit_code == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--memory", "0"], "A memory of 0 leaves nothing"),
            (["--path", "/disk"], "has no disk; add"),
            (["--ranks", "3"], "cannot have 3 ranks"),
        ],
    )
    def test_mistakes_are_one_sentence(self, arguments: list[str], message: str, capsys):
        given = ["plan", "--model", "gpt-mini", "--cluster", "dgx-a100", "--seq", "128"]
        assert run([*given, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_nothing_fits_on_one_probed_node():
    """Nobody knows what would join several, and that is no reason to say nothing."""
    cluster = slow_cluster(memory=1 << 20)
    line = Curve.of_rate(1e9, 1e-5)
    node = LinkSpec(name="node", size=2, gather=line, reduce=line)
    probed = replace(cluster, levels=(node, LinkSpec(name="world", size=1)))
    advice = advise(request(cluster=probed, global_batch=2))
    assert advice.best is None
    assert any("more nodes" in remedy for remedy in advice.remedies)
    assert advice.lacking()


def test_presets_lead_with_and_without_accumulation():
    """Without it only one spread of G is in the space, which is not always the preset's."""
    topology = slow_cluster().topology
    for batch in (4, 8):
        asked = request(global_batch=batch, batch=Batch(1, batch // 4))
        space_of = Space(asked, tile_numel=0, progress=lambda _: None)
        families = list(space_of.families(asked.limit))
        leading = presets_first(families)[: len(PRESETS)]
        for name in ("amsp", "zero3", "zero1"):
            preset = PRESETS[name]()
            factors = [
                (topology.factor(f.plan.params.spread), topology.factor(f.plan.optim.spread))
                for f in leading
            ]
            wanted = (topology.factor(preset.params.spread), topology.factor(preset.optim.spread))
            assert wanted in factors, (name, batch)


def test_the_bound_knows_that_an_update_is_one_call():
    """A probed curve has a price for asking at all, which is paid once a step."""
    cluster = slow_cluster(world=2e9)
    costly = Curve(((10_000, 0.01), (10_000_000, 0.02)))
    cluster = replace(cluster, device=replace(cluster.device, update=costly))
    asked = request(cluster=cluster, global_batch=4)
    found = Space(asked, tile_numel=0, progress=lambda _: None)
    for family in list(found.families(asked.limit))[::5]:
        least = min(
            evaluate(asked, plan, family.batch).step_s
            for plan in wirings(family.plan, cluster.topology, asked.loss)
        )
        assert family.bound_s <= least * (1 + 1e-9)


@pytest.mark.parametrize("trained", [0, 2, -1])
def test_no_plan_of_a_frozen_model_is_faster_than_its_bound(trained):
    """Before the first trained unit nothing is gathered or computed in backward."""
    cluster = slow_cluster(world=2e8)
    asked = request(facts=FrozenFacts(facts_of("gpt-mini"), trained), cluster=cluster)
    found = Space(asked, tile_numel=0, progress=lambda _: None)
    for family in list(found.families(asked.limit))[::9]:
        for plan in wirings(family.plan, cluster.topology, asked.loss):
            assert evaluate(asked, plan, family.batch).step_s >= family.bound_s * (1 - 1e-9)
    whole = search(replace(asked, facts=facts_of("gpt-mini"))).best
    assert search(asked).best.step_s < 0.8 * whole.step_s
