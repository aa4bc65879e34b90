"""``sw.plan``: the search as a function, for names and for modules."""

from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.cost.file import load_cluster
from shardwise.planner.request import Candidate
from shardwise.planner.search import search
from shardwise.planner.space import Loss
from shardwise.planning import request
from shardwise.plans.validate import violations
from tests.models import TinyGPT, lm_loss

ARGUMENTS = {"seq": 128, "ranks": 8}


def run_on_loss(model: torch.nn.Module, micro_batch: int, seq: int) -> torch.Tensor:
    tokens = torch.zeros(micro_batch, seq, dtype=torch.int64)
    return lm_loss(model, tokens, tokens)


def test_it_is_the_searchs_answer() -> None:
    found = sw.plan("gpt-mini", "4090-10g", global_batch=16, **ARGUMENTS)
    assert isinstance(found, Candidate)
    cluster = load_cluster("4090-10g").with_world(8)
    assert not violations(found.plan, cluster.topology)
    assert found.batch.micro * found.batch.accumulate == 2
    asked = request("gpt-mini", "4090-10g", global_batch=16, **ARGUMENTS)
    assert found.step_s <= search(asked).best.step_s
    again = sw.simulate(
        found.plan,
        "gpt-mini",
        cluster,
        seq=128,
        micro_batch=found.batch.micro,
        accumulate=found.batch.accumulate,
    )
    assert again.step_s == pytest.approx(found.step_s)


def test_lossless_and_memory_are_obeyed() -> None:
    asked = request("gpt-mini", "4090-10g", lossless=True, memory="20 GiB", **ARGUMENTS)
    assert asked.loss is Loss.NONE
    assert asked.limit == 20 << 30
    assert not sw.plan("gpt-mini", "4090-10g", lossless=True, **ARGUMENTS).plan.is_lossy("bfloat16")


def test_a_module_is_planned_for_as_it_is_and_stays_so() -> None:
    model = TinyGPT(layers=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = sw.plan(model, "dgx-a100", seq=8, ranks=8, run=run_on_loss)
    priced = sw.simulate(
        found.plan, model, load_cluster("dgx-a100").with_world(8), seq=8, run=run_on_loss
    )
    assert priced.step_s == pytest.approx(found.step_s)
    assert found.estimate.flops > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_module_that_nobody_can_run_is_told_how() -> None:
    with pytest.raises(sw.PlanError, match="pass run= to say how"):
        sw.plan(TinyGPT(), "dgx-a100", seq=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq": 0}, "seq is 0"),
        ({"ranks": 3}, "cannot have 3 ranks"),
        ({"global_batch": 7}, "cannot be divided"),
        ({"memory": 0}, "leaves nothing"),
        ({"path": "/disk"}, "cannot be used: the description of cluster .* has no disk"),
        ({"memory": "1 MiB"}, r"No plan for gpt-mini fits .* on tier device, which has 1,048,576"),
    ],
)
def test_mistakes_are_one_sentence(arguments: dict, message: str) -> None:
    with pytest.raises((sw.PlanError, sw.UsageError), match=message) as raised:
        sw.plan("gpt-mini", "dgx-a100", **(ARGUMENTS | arguments))
    assert "\n" not in str(raised.value)


def test_what_comes_nearest_is_judged_by_the_tier_that_it_overflows_most() -> None:
    """A host that is far too small does not make a plan that needs it the nearest one."""
    cluster = load_cluster("dgx-a100").with_world(8)
    tiny = replace(cluster, host=replace(cluster.host, memory_bytes=8 << 10))
    asked = request("gpt-mini", tiny, memory="20 MiB", seq=128)
    nearest = search(asked).smallest
    assert nearest is not None
    assert not nearest.plan.rests_on("cpu")
