"""Updates beside backward: the same training, and an error wherever it would be another."""

import math
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.errors import PlanError, UsageError
from shardwise.core.trace import Trace, recording
from shardwise.plans.ops import Kind
from shardwise.plans.plan import Plan, Precision, Tiers, Tiling
from shardwise.runtime.execute import Done
from shardwise.runtime.optimizer.windows import WindowedUpdate
from tests.models import (
    SharedLayers,
    TinyGPT,
    adamw,
    batch,
    largest_difference,
    lm_loss,
    make,
    mine,
)
from tests.runtime.support import LEVELS, LIMIT_S, PLANS
from tests.runtime.test_tiers import freeze, tiered, trained

AWAY = [c for c in product(("device", "nvme"), repeat=3) if "nvme" in c[1:]]
"""Tiers of P, G and OS where gradients or optimizer states rest on the disk."""


def early(plan: Plan, path: str, *tiers: str, **changes) -> Plan:
    plan = tiered(plan, path, *tiers, **changes)
    return replace(plan, tiers=replace(plan.tiers, update="backward"))


def count_early(model: nn.Module) -> list[int]:
    """One entry for each update that a backward begins from now on."""
    counts: list[int] = []

    def note(done: Done) -> None:
        if done.op.kind is Kind.UPDATE and runtime_of(model).backward.active:
            counts.append(1)

    runtime_of(model).observers.append(note)
    return counts


def check_parity(path: str, names: list[str], combinations) -> None:
    """Accumulation, frozen units and parameters, tied weights: as one plain process, in float64."""
    world = dist.get_world_size()
    reference = make(TinyGPT)
    freeze(reference)
    norms = trained(reference, adamw(reference), batch, plain=True, clip=math.inf)
    expected = {n: p.detach() for n, p in reference.named_parameters(remove_duplicate=False)}
    for name, tiers in product(names, combinations):
        model = make(TinyGPT)
        freeze(model)
        optimizer = adamw(model)
        plan = early(PLANS[name], path, *tiers)
        sw.shard(model, optimizer, plan, levels=LEVELS[world], timeout_s=LIMIT_S)
        counts = count_early(model)
        got = trained(model, optimizer, lambda i: mine(*batch(i)), plain=False, clip=math.inf)
        assert len(counts) == 2 * 3, (name, tiers)  # two trained blocks
        assert got == pytest.approx(norms, rel=1e-9), (name, tiers)
        values = sw.state_dict(model, rank0_only=False)
        difference = largest_difference({n: values[n] for n in expected}, expected)
        assert difference <= 1e-9, (name, tiers, difference)
        sw.unshard(model)


class TestParity:
    def test_one_rank(self, one, tmp_path):
        one.run(check_parity, str(tmp_path), ["zero3"], AWAY)

    def test_two_ranks(self, two, tmp_path):
        two.run(check_parity, str(tmp_path), ["zero3", "zero1"], AWAY[::2])
        two.run(check_parity, str(tmp_path), ["ddp", "fsdp keep=full"], [("nvme",) * 3])

    def test_four_ranks(self, four, tmp_path):
        four.run(check_parity, str(tmp_path), ["zero3 keep=node", "amsp", "hsdp"], AWAY[-1:])


def steps(model: nn.Module, optimizer, count: int = 4) -> dict[str, torch.Tensor]:
    for step in range(count):
        lm_loss(model, *mine(*batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sw.state_dict(model, rank0_only=False, master=True)


def check_combined(path: str) -> None:
    """The bits of the same plan that updates at the step: wires, masters, tiles, shared layers."""
    mixed = Precision(compute="bfloat16", reduce="bfloat16", master="float32")
    cases = {
        "zeropp": (TinyGPT, sw.presets.zeropp(), {}),
        "mixed lean": (TinyGPT, sw.presets.lean(precision=mixed), {}),
        "mixed amsp": (TinyGPT, sw.presets.amsp(precision=mixed), {"activations": "recompute"}),
        "shared": (SharedLayers, sw.presets.zero3(), {}),
        "tiles": (TinyGPT, sw.presets.zero3(), {"tiling": Tiling(numel=480)}),
    }
    for name, (kind, plan, changes) in cases.items():
        results = []
        for build in (tiered, early):
            model = make(kind, torch.float32)
            optimizer = adamw(model)
            levels = LEVELS[dist.get_world_size()]
            given = build(plan, path, **changes)
            sw.shard(model, optimizer, given, levels=levels, timeout_s=LIMIT_S)
            counts = count_early(model)
            results.append(steps(model, optimizer))
            assert bool(counts) == (build is early), name
            sw.unshard(model)
        assert largest_difference(*results) == 0, name


def test_wires_tiles_and_shared_layers_combine_with_it(four, tmp_path):
    four.run(check_combined, str(tmp_path))


class Branches(nn.Module):
    """Blocks that ranks choose among: what one passes by, others train."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT()
        self.route: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gpt = self.gpt
        x = gpt.embed(tokens)
        for index in self.route:
            x = gpt.blocks[index](x)
        return gpt.head(gpt.norm(x)) * gpt.temperature


def check_routes(path: str) -> None:
    """Ranks that use other units than the recorded ones, and one that nobody uses."""
    rank = dist.get_rank()
    routes = [[(0, 1, 2), (0, 1, 2)], [(0, 2), (0, 1, 2)], [(0, 2), (0, 2)], [(0, 1, 2), (0, 2)]]
    results = []
    for build in (tiered, early):
        model = make(Branches)
        optimizer = adamw(model)
        levels = LEVELS[dist.get_world_size()]
        sw.shard(
            model, optimizer, build(sw.presets.zero3(), path), levels=levels, timeout_s=LIMIT_S
        )
        counts = count_early(model)
        for step, by_rank in enumerate(routes):
            model.route = by_rank[rank]
            lm_loss(model, *mine(*batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        # Of three steps with a recorded order: blocks 0 and 2 always, 1 where this rank used it.
        used = sum(1 in by_rank[rank] for by_rank in routes[1:])
        assert len(counts) == (6 + used if build is early else 0)
        results.append(sw.state_dict(model, rank0_only=False))
        sw.unshard(model)
    assert largest_difference(*results) == 0


def test_ranks_may_use_different_units(two, tmp_path):
    two.run(check_routes, str(tmp_path))


# --- one process ----------------------------------------------------------------------------------


def sharded(path: Path, kind=TinyGPT, **changes):
    model = make(kind)
    optimizer = adamw(model)
    sw.shard(model, optimizer, early(sw.presets.zero3(), str(path), **changes))
    lm_loss(model, *batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_updates_run_while_backward_computes(tmp_path):
    model, optimizer = sharded(tmp_path)
    trace = Trace()

    def updated() -> set[str]:
        return {span.name for span in trace.spans if span.track == "update"}

    def wait(_) -> None:
        """Backward goes no further before the others have been updated; at the step they never."""
        until = time.monotonic() + LIMIT_S
        while not {"update blocks.2", "update blocks.1"} <= updated() and time.monotonic() < until:
            time.sleep(0.01)

    model.blocks[0].register_forward_hook(lambda _, __, output: output.register_hook(wait) and None)
    with recording(trace):
        lm_loss(model, *batch(1)).backward()
        assert updated() == {f"update blocks.{i}" for i in range(3)}
        optimizer.step()
    assert updated() == {f"update blocks.{i}" for i in range(3)} | {"update root"}


def test_what_would_change_the_update_afterwards_is_refused(tmp_path):
    model, optimizer = sharded(tmp_path)
    with pytest.raises(UsageError, match="clip_grad_norm_ comes too late"):
        sw.clip_grad_norm_(model, 1.0)
    lm_loss(model, *batch(1)).backward()
    assert sw.clip_grad_norm_(model, math.inf) > 0
    with pytest.raises(
        UsageError, match="forward cannot run now: the last backward has updated units"
    ):
        model(batch(2)[0])
    with pytest.raises(UsageError, match="forward cannot run now"):
        model.blocks[1](torch.zeros(1, 2, 24, dtype=torch.float64))
    weight = model.blocks[1].up.weight
    with torch.no_grad(), pytest.raises(UsageError, match=r"Writing 'blocks\.1\.up\.weight' canno"):
        weight.copy_(torch.zeros(weight.shape))
    for read in (sw.state_dict, lambda m: sw.optim_state_dict(m, optimizer)):
        with pytest.raises(UsageError, match=r"no optimizer\.step\(\) followed"):
            read(model)
    with pytest.raises(UsageError, match=r"no optimizer\.step\(\) followed"):
        optimizer.state_dict()
    with pytest.raises(UsageError, match="cannot be changed any more"):
        model.blocks[1].up.weight.grad.mul_(2)
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 2 * lr
    with pytest.raises(UsageError, match="options changed between backward and step"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    sw.state_dict(model)


@pytest.mark.parametrize("change", ["dropped", "replaced"])
def test_a_gradient_that_is_changed_too_late_is_refused(tmp_path, change):
    model, optimizer = sharded(tmp_path)
    lm_loss(model, *batch(1)).backward()
    weight = model.blocks[1].up.weight
    weight.grad = None if change == "dropped" else torch.zeros(weight.shape, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"The gradient of 'blocks\.1\.up\.weight' cannot"):
        optimizer.step()
    with pytest.raises(UsageError, match=r"The gradient of 'blocks\.1\.up\.weight' cannot"):
        sw.clip_grad_norm_(model, math.inf)  # which reads them, too


def test_a_second_backward_before_the_step_is_refused(tmp_path):
    model, _ = sharded(tmp_path)
    loss = lm_loss(model, *batch(1))
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match=r"backward cannot run now.*outside no_sync"):
        loss.backward()


def test_a_skipped_step_is_told_by_the_next_forward(tmp_path):
    model, optimizer = sharded(tmp_path)
    lm_loss(model, *batch(1)).backward()
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="the last backward has updated units"):
        model(batch(2)[0])


def test_a_backward_that_fails_after_updates_is_told(tmp_path):
    model, _ = sharded(tmp_path)

    def fail(*_):
        raise RuntimeError("the user's")

    handle = model.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="the user's"):
        lm_loss(model, *batch(1)).backward()
    handle.remove()
    with pytest.raises(UsageError, match="if that failed, load a checkpoint"):
        model(batch(2)[0])


def test_a_gradient_that_is_dropped_in_backward_after_the_update_is_refused(tmp_path):
    model, _ = sharded(tmp_path)
    weight = model.blocks[2].up.weight

    def drop(*_):
        weight.grad = None

    model.blocks[0].register_full_backward_hook(drop)
    with pytest.raises(UsageError, match=r"'blocks\.2' lost a gradient after it had been updated"):
        lm_loss(model, *batch(1)).backward()


class Late(nn.Module):
    """Uses a block once more than in the recorded pass, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.more = TinyGPT(), False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gpt = self.gpt
        x = gpt.embed(tokens)
        for block in (gpt.blocks[2], *gpt.blocks) if self.more else gpt.blocks:
            # Each has a backward of its own, so that gradients come once for each use.
            x = checkpoint(block, x, use_reentrant=True)
        return gpt.head(gpt.norm(x)) * gpt.temperature


def test_a_gradient_that_arrives_after_the_update_is_refused(tmp_path):
    model, _ = sharded(tmp_path, Late)
    model.more = True
    with pytest.raises(UsageError, match=r"'gpt\.blocks\.2' got a gradient after it had been"):
        lm_loss(model, *batch(1)).backward()


def test_the_key_needs_a_state_on_a_tier():
    plan = replace(sw.presets.zero3(), tiers=Tiers(update="backward"))
    with pytest.raises(PlanError, match=r"tiers\.update is 'backward', but neither"):
        sw.shard(make(TinyGPT), plan=plan)
    plan = replace(plan, tiers=Tiers(update="backwards"))
    with pytest.raises(PlanError, match=r"tiers\.update 'backwards' is unknown"):
        sw.shard(make(TinyGPT), plan=plan)


def test_a_hook_that_changes_options_in_the_step_is_refused(tmp_path):
    model, optimizer = sharded(tmp_path)
    lm_loss(model, *batch(1)).backward()

    def slower(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] /= 2

    optimizer.register_step_pre_hook(slower)  # after ours
    with pytest.raises(UsageError, match="options changed between backward and step"):
        optimizer.step()


def test_an_update_that_fails_is_told_by_backward_and_by_the_step(tmp_path, monkeypatch):
    model, optimizer = sharded(tmp_path)
    saved = optimizer.state_dict()
    weights = sw.state_dict(model)
    ended: list[str] = []

    def fail(*_):
        raise OSError("gone")

    update = WindowedUpdate._update_unit

    def slow(self, unit, reduced, device):
        time.sleep(0.05)  # all are queued when the first one fails
        try:
            update(self, unit, reduced, device)
        finally:
            ended.append(unit.name)

    with monkeypatch.context() as patch:
        patch.setattr(WindowedUpdate, "_step", fail)
        patch.setattr(WindowedUpdate, "_update_unit", slow)
        with pytest.raises(OSError, match="gone"):
            lm_loss(model, *batch(1)).backward()
        assert ended == ["blocks.2", "blocks.1", "blocks.0"]  # none runs on behind the user
    with pytest.raises(UsageError, match=r"update in the last backward failed \(gone\)"):
        optimizer.step()
    with pytest.raises(UsageError, match="the optimizer's state first"):
        model(batch(1)[0])
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    expected, other = sharded(tmp_path)
    for m, o in ((model, optimizer), (expected, other)):
        lm_loss(m, *batch(1)).backward()
        o.step()
    assert largest_difference(sw.state_dict(model), sw.state_dict(expected)) == 0


def test_a_half_updated_model_can_be_unsharded(tmp_path):
    model, _ = sharded(tmp_path)
    lm_loss(model, *batch(1)).backward()
    sw.unshard(model)
    model(batch(1)[0])


class Detached(nn.Module):
    """Reads a weight once more without training it there, after its gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(Twice() for _ in range(3))
        self.head = nn.Linear(24, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(24, 24), nn.Parameter(torch.randn(24, 24) / 5)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Slow.apply(nn.functional.linear(x, self.weight.detach()))
        return nn.functional.linear(torch.tanh(x), self.weight)


class Slow(torch.autograd.Function):
    """Time for an update that should not have begun."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.02)
        return grad


def trained_by(path: Path, build, kind, make_optimizers, runs: int = 4, **tiers: str):
    """The weights after some steps of one process, each optimizer stepped and zeroed in turn."""
    model = make(kind)
    plan = build(sw.presets.zero3(), str(path), **tiers)
    plan = replace(plan, min_unit_numel=500)
    optimizers = make_optimizers(model)
    sw.shard(model, optimizers[0], plan)
    for step in range(runs):
        lm_loss(model, *batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return sw.state_dict(model)


def one_adamw(model):
    return [adamw(model)]


def matrices_and_vectors(model):
    """Both have parameters in every block."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(vectors, lr=0.05, momentum=0.9)]


def blocks_and_root(model):
    inner = set(model.blocks.parameters())
    rest = [p for p in model.parameters() if p not in inner]
    return [torch.optim.AdamW(inner, lr=0.01), torch.optim.SGD(rest, lr=0.05)]


@pytest.mark.parametrize(
    ("kind", "make_optimizers", "tiers"),
    [
        (TinyGPT, matrices_and_vectors, {}),
        (TinyGPT, matrices_and_vectors, {"params": "device", "grads": "device"}),
        (TinyGPT, blocks_and_root, {}),
        (Detached, one_adamw, {"params": "device", "grads": "device"}),
    ],
)
def test_several_optimizers_and_weights_read_aside(tmp_path, kind, make_optimizers, tiers):
    results = [
        trained_by(tmp_path, build, kind, make_optimizers, **tiers) for build in (tiered, early)
    ]
    assert largest_difference(*results) == 0


def test_an_optimizer_that_takes_anothers_place_is_told(tmp_path):
    model, _ = sharded(tmp_path)
    lm_loss(model, *batch(1)).backward()
    with pytest.raises(UsageError, match="The first step of another SGD cannot run now"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_two_models_may_share_an_optimizer(tmp_path):
    results = []
    for build in (tiered, early):
        models = [make(TinyGPT, seed=seed) for seed in (0, 1)]
        optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=0.01)
        for model in models:
            sw.shard(model, optimizer, build(sw.presets.zero3(), str(tmp_path)))
        for step in range(4):
            sum(lm_loss(model, *batch(step)) for model in models).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([sw.state_dict(model) for model in models])
    for left, right in zip(*results, strict=True):
        assert largest_difference(left, right) == 0


def test_numbers_of_a_step_that_failed_are_not_used_again(tmp_path, monkeypatch):
    """Also with updates at the step: what was updated before the failure has stepped."""
    model = make(TinyGPT)
    optimizer = adamw(model)
    sw.shard(model, optimizer, tiered(sw.presets.zero3(), str(tmp_path)))
    for step in range(3):
        lm_loss(model, *batch(step)).backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    step_window = WindowedUpdate._step

    def fail_late(self, window):
        if window.unit.name == "blocks.2":
            raise OSError("gone")
        step_window(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(WindowedUpdate, "_step", fail_late)
        with pytest.raises(OSError, match="gone"):
            optimizer.step()
    optimizer.step()
    counts = [int(optimizer.state[model.blocks[i].up.weight]["step"]) for i in (0, 2)]
    assert counts == [4, 3]


def test_host_memory_is_the_devices_without_an_accelerator():
    plan = replace(sw.presets.zero3(), tiers=Tiers(update="backward"))
    plan = replace(plan, optim=replace(plan.optim, tier="cpu"))
    model = make(TinyGPT)
    sw.shard(model, adamw(model), plan)
