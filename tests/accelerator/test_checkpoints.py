"""Training checkpoints of models on a device: tensors go through pinned windows, and nothing races."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.plans.plan import Plan, Tiers
from tests.accelerator.accelerators import chosen
from tests.models import TinyGPT, adamw, batch, lm_loss, make, mine

MIXED = sw.Precision(compute="bfloat16")


def plans(folder: str) -> dict[str, Plan]:
    """Masters that are P's shards, masters of their own, and every tier."""
    zero3, amsp = sw.presets.zero3(precision=MIXED), sw.presets.amsp(precision=MIXED)
    on_host = replace(sw.presets.zero3(), optim=replace(zero3.optim, tier="cpu"))
    infinity = replace(
        sw.presets.infinity(folder), tiers=Tiers(path=folder, window_numel=4096), precision=MIXED
    )
    found = {"zero3": zero3, "amsp": amsp, "cpu": on_host, "infinity": infinity}
    return {name: replace(plan, min_unit_numel=1000) for name, plan in found.items()}


def sharded(plan: Plan, seed: int):
    model = make(TinyGPT, torch.float32, seed=seed)
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan, levels="node=1,world=2")
    return model, optimizer


def steps(model, optimizer, *numbers: int) -> list[float]:
    losses: list[float] = []
    for number in numbers:
        loss = lm_loss(model, *(t.to(chosen().device) for t in mine(*batch(number))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model, optimizer) -> dict[str, torch.Tensor]:
    found = sw.state_dict(model, rank0_only=False, master=True)
    for name, states in sw.optim_state_dict(model, optimizer).items():
        found |= {f"{name}.{key}": torch.as_tensor(value).cpu() for key, value in states.items()}
    return found


def _saved_and_loaded(folder: str) -> list[str]:
    """Under the same plan the next losses have the same bits; the next plan gets all tensors."""
    every, races = plans(folder), []
    names = list(every)
    for place, name in enumerate(names):
        chosen().delay("side" if place % 2 else "main")
        model, optimizer = sharded(every[name], seed=0)
        steps(model, optimizer, 0, 1)
        path = Path(folder) / name
        with chosen().watch() as seen:
            pending = sw.save(path, model, optimizer, asynchronous=bool(place % 2))
            losses = steps(model, optimizer, 2)
            if pending is not None:
                pending.wait()
        races += seen.require("races")
        again, again_optimizer = sharded(every[name], seed=1)
        steps(again, again_optimizer, 5)
        with chosen().watch() as seen:
            sw.load(path, again, again_optimizer)
            expected = values(again, again_optimizer)
            assert steps(again, again_optimizer, 2) == losses, name
        races += seen.require("races")
        other, other_optimizer = sharded(every[names[place - 1]], seed=2)
        steps(other, other_optimizer, 6)
        sw.load(path, other, other_optimizer)
        got = values(other, other_optimizer)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(got[key], value), (name, names[place - 1], key)
        for each in (model, again, other):
            sw.unshard(each)
    chosen().delay("none")
    dist.barrier()
    return races


def test_saved_and_loaded_without_races(sim_two, tmp_path) -> None:
    assert sim_two.run(_saved_and_loaded, str(tmp_path)) == [[], []]
