"""Every legal partitioning trains like one plain process, on every grid."""

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.core.topology import Topology
from shardwise.plans.plan import Plan
from shardwise.plans.validate import legal_plans
from tests.harness import Workers
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
EVERY_GRID = [levels for grids in GRIDS.values() for levels in grids]
KINDS = {"gpt": TinyGPT, "shared": SharedLayers}


def _small_units(plan: Plan) -> Plan:
    from dataclasses import replace

    return replace(plan, min_unit_numel=1000)


def plans_for(kind: str, levels: str, every: int) -> list[Plan]:
    """One of ``every`` so many legal plans; kinds and grids begin at different ones."""
    plans = legal_plans(Topology.parse(levels))
    begin = list(KINDS).index(kind) + EVERY_GRID.index(levels)
    return plans[begin % min(every, len(plans)) :: every]


def check_plans(kind: str, levels: str) -> list[tuple[str, float]]:
    """Three steps under every legal plan of a grid; the largest difference of each.

    Where one model had all plans, some will do for the other.
    """
    every = 3 if kind == "shared" and Topology.parse(levels).world == 4 else 1
    reference = make(KINDS[kind])
    losses = train_plain(reference)
    expected = reference.state_dict()
    results = []
    for plan in plans_for(kind, levels, every):
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


def pool_for(levels: str, request: pytest.FixtureRequest) -> Workers:
    world = Topology.parse(levels).world
    pool: Workers = request.getfixturevalue({1: "one", 2: "two", 4: "four"}[world])
    return pool


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", EVERY_GRID)
def test_parameters_equal_one_process_under_every_legal_plan(levels, kind, request):
    for results in pool_for(levels, request).run(check_plans, kind, levels, limit_s=240):
        assert results
        worst = max(results, key=lambda item: item[1])
        assert worst[1] <= 1e-9, worst


def check_float32(kind: str, levels: str) -> None:
    """Losses and per-tensor gradient norms in float32, relative."""
    reference = make(KINDS[kind], torch.float32)
    optimizer = adamw(reference)
    losses, norms = [], []
    for step in range(2):
        loss = lm_loss(reference, *batch(step))
        loss.backward()
        losses.append(loss.item())
        norms.append({n: p.grad.norm().item() for n, p in reference.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    # All on the grid that has both levels; the others were compared in float64 already.
    every = 1 if kind == "gpt" and levels == "node=2,world=2" else 8
    for plan in plans_for(kind, levels, every):
        model = make(KINDS[kind], torch.float32)
        optimizer = adamw(model)
        sw.shard(model, optimizer, plan=_small_units(plan), levels=levels)
        for step in range(2):
            loss = lm_loss(model, *mine(*batch(step)))
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert total.item() / dist.get_world_size() == pytest.approx(losses[step], rel=1e-5)
            largest = max(norms[step].values())
            for name, grad in sw.full_grads(model).items():
                expected = norms[step][name]
                # A norm that is rounding noise (a key's bias) is compared with the largest one.
                assert abs(grad.norm().item() - expected) <= 1e-5 * max(expected, largest / 100), (
                    plan,
                    name,
                )
            optimizer.step()
            optimizer.zero_grad()
        sw.unshard(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [levels for grids in GRIDS.values() for levels in grids])
def test_float32_losses_and_gradient_norms_equal_one_process(levels, kind, request):
    pool_for(levels, request).run(check_float32, kind, levels, limit_s=200)
