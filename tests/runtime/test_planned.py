"""What the schedule plans is what the runtime does: the same operations, hops and bytes."""

from collections import Counter
from dataclasses import replace

import torch

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.topology import Topology
from shardwise.model.units import describe
from shardwise.plans.expected import schedule
from shardwise.plans.ops import Op, Phase
from shardwise.plans.plan import Tiers, Tiling
from tests.models import TinyGPT, UntiedGPT, adamw, batch, lm_loss, make, mine

LEVELS = "node=2,world=2"
PLANS = ["ddp", "zero1", "zero2", "zero3", "hsdp", "amsp", "zeropp", "lean", "infinity"]


class LastTrained(TinyGPT):
    """A model of which only the last block is trained: no backward comes to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)


def _planned(model, plan, *phases: Phase) -> Counter[Op]:
    topology = Topology.parse(LEVELS)
    spec = describe(model, plan, topology)
    ops: Counter[Op] = Counter()
    for phase in phases:
        ops.update(op for event in schedule(plan, spec, topology, phase) for op in event.ops)
    return ops


def compare(path: str, name: str, keep: str, tier: str = "", kind=TinyGPT, **changes) -> None:
    plan = replace(
        sw.presets.PRESETS[name](), min_unit_numel=1000, keep=keep, tiers=Tiers(path=path)
    )
    plan = replace(plan, **changes)
    if tier:
        states = ("params", "grads", "optim")
        plan = replace(plan, **{s: replace(getattr(plan, s), tier=tier) for s in states})
    model = make(kind)
    single, accumulated, evaluation = (
        _planned(model, plan, *phases)
        for phases in ([Phase.ONLY], [Phase.FIRST, Phase.MIDDLE, Phase.LAST], [Phase.EVAL])
    )
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan=plan, levels=LEVELS)
    happened: list[Op] = []
    runtime_of(model).observers.append(happened.append)

    def train(micro_batches: int) -> Counter[Op]:
        happened.clear()
        for i in range(micro_batches):
            if i < micro_batches - 1:
                with sw.no_sync(model):
                    lm_loss(model, *mine(*batch(i))).backward()
            else:
                lm_loss(model, *mine(*batch(i))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return Counter(happened)

    train(1)  # the first step is recorded
    assert train(1) == single, (name, keep)
    assert train(3) == accumulated, (name, keep)
    model.eval()
    with torch.no_grad():
        lm_loss(model, *mine(*batch(0)))
        happened.clear()
        lm_loss(model, *mine(*batch(0)))
    assert Counter(happened) == evaluation, (name, keep)
    sw.unshard(model)


def compare_all(path: str) -> None:
    for name in PLANS:
        compare(path, name, sw.presets.PRESETS[name]().keep)
    compare(path, "zero3", "node")
    compare(path, "zero3", "full")
    compare(path, "hsdp", "full")
    for name, keep in (("ddp", "none"), ("ddp", "full"), ("zero3", "node"), ("amsp", "none")):
        compare(path, name, keep, tier="nvme")
        early = Tiers(path=path, update="backward")
        compare(path, name, keep, tier="nvme", tiers=early)
    compare(path, "zero3", "none", tiling=Tiling(numel=480))  # with tied weights
    for name in ("zero3", "amsp", "zeropp"):
        compare(path, name, "none", kind=LastTrained)
    tiled = {"kind": UntiedGPT, "tiling": Tiling(numel=480)}
    compare(path, "zero3", "node", tier="nvme", activations="recompute", **tiled)


def test_the_runtime_executes_what_the_schedule_plans(four, tmp_path):
    four.run(compare_all, str(tmp_path))
