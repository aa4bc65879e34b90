"""Memory along a step: where it rises and falls, and that its peak is what a plan needs."""

from dataclasses import replace
from itertools import product

import pytest

from shardwise.cost.file import load_cluster
from shardwise.planner.space import mixed
from shardwise.plans import presets
from shardwise.plans.along import Moment, along, peak
from shardwise.plans.builtin import builtin
from shardwise.plans.memory import Memory, memory
from shardwise.plans.plan import Plan
from shardwise.plans.presets import PRESETS
from shardwise.plans.validate import violations

FACTS = builtin("gpt:layers=6,width=512,heads=8")
TOPOLOGY = load_cluster("dgx-a100").with_world(16).topology


def moments(
    plan: Plan, *, accumulates: bool = False, accelerated: bool = False
) -> tuple[list[Moment], Memory]:
    plan = replace(plan, precision=mixed("bfloat16"))
    assert not violations(plan, TOPOLOGY)
    saved, spec = FACTS.work(2, 256, plan, TOPOLOGY).saved, FACTS.spec(plan, TOPOLOGY)
    options = {"accumulates": accumulates, "accelerated": accelerated}
    needed = memory(plan, spec, TOPOLOGY, saved=saved, **options)
    return along(plan, spec, TOPOLOGY, saved, **options), needed


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute", "cpu"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "infinity"])
def test_the_peak_is_what_the_plan_needs(name: str, activations: str, accumulates: bool) -> None:
    found, needed = moments(
        replace(PRESETS[name](), activations=activations), accumulates=accumulates
    )
    highest = peak(found)
    assert highest.name == "backward blocks.5"  # the first whose backward runs
    assert highest.memory == needed
    assert sum(highest.causes().values()) == needed.total
    assert max(moment.memory.cpu for moment in found) == needed.cpu


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute", "cpu"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "infinity"])
def test_on_accelerators_the_peak_is_a_moment_of_backward(
    name: str, activations: str, accumulates: bool
) -> None:
    """Its own terms add up to it, and it is what the plan is said to need."""
    found, needed = moments(
        replace(PRESETS[name](), activations=activations),
        accumulates=accumulates,
        accelerated=True,
    )
    highest = peak(found)
    assert highest.name.startswith("backward ")
    assert sum(highest.causes().values()) == highest.memory.total
    assert 0.97 * needed.total <= highest.memory.total <= needed.total


def test_on_accelerators_gradients_come_while_activations_go() -> None:
    found, needed = moments(presets.zero2(), accelerated=True)
    by_name = {moment.name: moment.memory for moment in found}
    backward = [by_name[name] for name in by_name if name.startswith("backward ")][1:]
    assert by_name["forward blocks.5"].grads == by_name["forward blocks.5"].grad_buffers == 0
    grads, held = [m.grads for m in backward], [m.activations for m in backward]
    assert grads == sorted(grads)
    assert grads[0] < needed.grads / 3
    assert grads[-1] == needed.grads == by_name["step"].grads
    assert held == sorted(held, reverse=True)
    assert backward[0].grad_buffers < backward[-1].grad_buffers == needed.grad_buffers


def test_activations_come_and_go() -> None:
    found, needed = moments(presets.zero3())
    names = [moment.name for moment in found]
    assert names[0] == "forward root"
    assert names[-1] == "step"
    held = {moment.name: moment.memory.activations for moment in found}
    forward = [held[f"forward blocks.{i}"] for i in range(6)]
    assert forward == sorted(forward)
    assert held["backward blocks.5"] == forward[-1] == needed.activations
    backward = [held[f"backward blocks.{i}"] for i in range(6)]
    assert backward == sorted(backward)
    assert held["step"] == 0


def test_what_is_kept_grows_until_backward_takes_it() -> None:
    for make, until in product(
        (presets.zeropp, lambda: presets.zero3(keep="full")), ("backward", "step")
    ):
        plan = replace(make(), keep_until=until)
        found, needed = moments(plan)
        kept = {moment.name: moment.memory.kept for moment in found}
        assert kept["forward root"] == 0 < kept["forward blocks.1"] < kept["forward blocks.5"]
        assert kept["backward blocks.5"] == needed.kept
        assert needed.kept > kept["backward blocks.3"] > kept["step"] == 0
    # The last of several passes finds it there.
    found, needed = moments(replace(presets.zeropp(), keep_until="step"), accumulates=True)
    assert found[0].memory.kept == needed.kept


def test_inputs_on_a_tier_fill_it_during_forward() -> None:
    found, needed = moments(replace(presets.zero3(), activations="cpu"))
    cpu = {moment.name: moment.memory.cpu for moment in found}
    assert cpu["forward root"] == 0 < cpu["forward blocks.2"] < cpu["backward blocks.5"]
    assert cpu["backward blocks.5"] == needed.cpu
    assert cpu["step"] == 0
