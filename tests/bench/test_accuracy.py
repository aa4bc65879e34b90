"""Predictions beside training: the figures, and one short run of each kind on a real network."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.bench.accuracy.figures import summarise
from shardwise.bench.accuracy.results import Comparison, Footprint, read, write
from shardwise.bench.accuracy.run import compare, footprints, predict_again
from shardwise.bench.accuracy.setup import CHOSEN, Setup, plans
from shardwise.bench.accuracy.trial import finalists
from shardwise.bench.cluster import Rate
from shardwise.bench.probe import median_of
from shardwise.core.cluster import Cluster, Curve
from shardwise.core.topology import Topology
from shardwise.cost.file import load_cluster
from shardwise.plans.validate import violations


def one(plan: str, predicted_s: float, measured_s: float, rate: str = "none") -> Comparison:
    return Comparison(
        grid="node=2,world=2",
        rate=rate,
        plan=plan,
        predicted_s=predicted_s,
        first_s=measured_s * 0.75,
        measured_s=measured_s,
        exposed={},
        steps=[measured_s],
    )


def test_the_figures() -> None:
    found = [
        one("ddp", 1.1, 1.0),
        one("zero3", 1.0, 1.25),
        one(CHOSEN, 1.0, 1.05),
        one("ddp", 8.0, 10.0, "50mbit"),
        one("zero3", 30.0, 30.0, "50mbit"),
        one(CHOSEN, 5.0, 5.0, "50mbit"),
    ]
    accuracy = summarise(found)
    assert accuracy.worst_error == pytest.approx(0.2)
    assert accuracy.median_error == pytest.approx((0.1 + 0.05 / 1.05) / 2)
    assert accuracy.first_median_error == accuracy.first_worst_error == pytest.approx(0.25)
    assert accuracy.least_correlation < 0.2 < 0.7 < accuracy.rank_correlation
    regrets = {rate: regret for (_, rate), regret in accuracy.regrets.items()}
    assert regrets == {"none": pytest.approx(1.05), "50mbit": pytest.approx(1)}


def test_how_well_the_machine_agrees_with_itself() -> None:
    first, second, third = one("a", 1.0, 1.0), one("b", 1.0, 2.0), one(CHOSEN, 2.0, 3.0)
    assert summarise([first, second, third]).agreement == 1.0
    changed = [
        replace(first, steps=[1.0, 9.0]),
        replace(second, steps=[2.5, 2.0, 2.0]),
        replace(third, steps=[3.0, 3.0, 1.0, 1.0]),
    ]
    assert summarise(changed).agreement == pytest.approx(-1.0)


def test_regret_is_measured_in_the_finals() -> None:
    lucky, fast, chosen = one("zero1", 0.8, 0.7), one("ddp", 1.0, 1.0), one(CHOSEN, 0.9, 1.1)
    fast = replace(fast, finals=[1.0, 1.5, 1.1])
    chosen = replace(chosen, finals=[1.1, 1.5, 1.32])
    (regret,) = summarise([lucky, fast, chosen]).regrets.values()
    assert regret == pytest.approx(1.1)
    twin = replace(fast, predicted_s=chosen.predicted_s)  # the chosen plan by another name
    (regret,) = summarise([lucky, twin, chosen]).regrets.values()
    assert regret == 1.0
    faster = replace(chosen, finals=[0.9, 0.9, 2.0])
    (regret,) = summarise([lucky, fast, faster]).regrets.values()
    assert regret == 1.0


def test_results_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read(file, Comparison) == []
    for plan in ("ddp", "zero3"):
        write(file, one(plan, 1.0, 2.0))
    assert [each.plan for each in read(file, Comparison)] == ["ddp", "zero3"]
    assert read(file, Comparison)[0].error == -0.5
    write(file, one("ddp", 1.0, 1.0))  # run again
    assert [(each.plan, each.error) for each in read(file, Comparison)] == [
        ("ddp", 0.0),
        ("zero3", -0.5),
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"a": 1.3, "b": 1.1, "c": 0.8, "d": 1.0, "e": 1.12}, [CHOSEN, "c", "d", "b"]),
        ({"a": 1.3, "b": 1.1}, [CHOSEN, "b"]),
        ({"a": 1.3}, []),
    ],
)
def test_who_might_be_the_fastest(seconds: dict[str, float], expected: list[str]) -> None:
    turns = {name: [9.0, measured, 0.1] for name, measured in {CHOSEN: 1.0, **seconds}.items()}
    assert finalists(turns) == expected


@pytest.mark.parametrize("grid", ["node=2,world=2", "node=1,world=4"])
def test_at_least_twelve_plans_run_on_the_grids(grid: str) -> None:
    assert sum(not violations(plan, Topology.parse(grid)) for plan in plans().values()) >= 12


def test_what_was_probed_several_times_is_one_cluster() -> None:
    probed = load_cluster("two-cores-200m")

    def slower(times: float) -> Cluster:
        copy = Curve(tuple((amount, times * s) for amount, s in probed.device.copy.points))
        forward = {
            "float32": Curve(
                tuple((a, times * s) for a, s in probed.device.forward["float32"].points)
            )
        }
        return replace(probed, device=replace(probed.device, copy=copy, forward=forward))

    found = median_of([slower(3.0), probed, slower(2.0)])
    assert found.device.copy == slower(2.0).device.copy
    assert found.device.forward["float32"] == slower(2.0).device.forward["float32"]
    assert found.levels == probed.levels
    short = replace(probed.device.copy, points=((1.0, 1e-9), *probed.device.copy.points[1:2]))
    fewer = replace(probed, device=replace(probed.device, copy=short))
    assert [a for a, _ in median_of([probed, fewer, probed]).device.copy.points] == [
        a for a, _ in short.points
    ]


def test_a_short_run(real_network: None, tmp_path: Path) -> None:
    setup = Setup(
        model="gpt-tiny",
        seq=16,
        grids=((2, 1),),
        rates=(Rate.parse("50mbit"),),
        rounds=1,
        names=("zero3", "ddp"),
        quick=True,
    )
    told: list[str] = []
    found = list(compare(setup, told.append, tmp_path))
    assert [each.plan for each in found] == ["zero3", "ddp", CHOSEN]
    assert all(each.predicted_s > 0 and each.measured_s > 0 for each in found)
    assert all(math.isclose(sum(each.exposed.values()), each.predicted_s) for each in found)
    assert all(min(each.steps) <= each.measured_s <= max(each.steps) for each in found)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["2x1-50mbit-auto.toml", "2x1-50mbit-first.toml", "2x1-50mbit.toml"]
    # What was kept is all that a prediction is made of.
    spoiled = [replace(each, predicted_s=0.0, first_s=0.0, exposed={}) for each in found]
    assert list(predict_again(spoiled, tmp_path, model="gpt-tiny", seq=16)) == found
    assert any("probing" in line for line in told)


def test_a_footprint(real_network: None) -> None:
    setup = Setup(model="gpt-mini", seq=64, grids=((2, 1),), rates=(), names=("zero3",))
    (found,) = footprints(setup, lambda _: None)
    assert isinstance(found, Footprint)
    # Of a model of some megabytes the allocator's habits are a good part.
    assert abs(found.error) < 0.3
