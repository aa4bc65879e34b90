"""Every legal partitioning trains like one plain process, on every grid."""

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.core.topology import Topology
from shardwise.plan.plan import Plan
from shardwise.plan.validate import legal_plans
from tests.models import (
    SharedLayers,
    TinyGPT,
    adamw,
    batch,
    largest_difference,
    lm_loss,
    make,
    mine,
    train_plain,
)

GRIDS = {
    1: ["world=1"],
    2: ["world=2", "node=1,world=2"],
    4: ["node=2,world=2", "node=1,world=4", "node=4,world=1"],
}
KINDS = {"gpt": TinyGPT, "shared": SharedLayers}


def _small_units(plan: Plan) -> Plan:
    from dataclasses import replace

    return replace(plan, min_unit_numel=1000)


def check_plans(kind: str, levels: str) -> list[tuple[str, float]]:
    """Three steps under every legal plan of a grid; the largest difference of each."""
    reference = make(KINDS[kind])
    losses = train_plain(reference)
    expected = reference.state_dict()
    results = []
    for plan in legal_plans(Topology.parse(levels)):
        model = make(KINDS[kind])
        optimizer = adamw(model)
        sw.shard(model, optimizer, plan=_small_units(plan), levels=levels)
        for step in range(3):
            loss = lm_loss(model, *mine(*batch(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert abs(total.item() / dist.get_world_size() - losses[step]) < 1e-9, plan
        got = sw.state_dict(model, rank0_only=False)
        label = (
            f"P={plan.params.spread} G={plan.grads.spread} OS={plan.optim.spread} keep={plan.keep}"
        )
        results.append((label, largest_difference(got, expected)))
        assert sw.stats(model)["extra_gathers"] == 0, label
        sw.unshard(model)
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [levels for grids in GRIDS.values() for levels in grids])
def test_parameters_equal_one_process_under_every_legal_plan(levels, kind, request):
    world = Topology.parse(levels).world
    pool = request.getfixturevalue({1: "one", 2: "two", 4: "four"}[world])
    for results in pool.run(check_plans, kind, levels, limit_s=240):
        assert results
        worst = max(results, key=lambda item: item[1])
        assert worst[1] <= 1e-9, worst
