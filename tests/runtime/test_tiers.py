"""States on a disk: the same training, nothing left behind, no more memory than planned."""

import errno
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.errors import PlanError
from shardwise.core.topology import Topology
from shardwise.model.units import describe
from shardwise.plans.memory import memory
from shardwise.plans.plan import Plan, Precision, Tiers
from shardwise.tier.budget import BudgetError
from shardwise.tier.rest import Stored
from shardwise.tier.store import TierError
from tests.models import TinyGPT, adamw, batch, largest_difference, lm_loss, make, mine
from tests.runtime.support import LEVELS, LIMIT_S, PLANS

COMBINATIONS = [c for c in product(("device", "nvme"), repeat=3) if "nvme" in c]
"""Tiers of P, G and OS."""
MIXED = Precision(compute="bfloat16", reduce="bfloat16", master="float32")


def tiered(plan: Plan, path: str, params="nvme", grads="nvme", optim="nvme", **changes) -> Plan:
    """A plan with states on the disk, in windows that cut every flat of the test models."""
    return replace(
        plan,
        params=replace(plan.params, tier=params),
        grads=replace(plan.grads, tier=grads),
        optim=replace(plan.optim, tier=optim),
        tiers=Tiers(path=path, window_numel=4096),
        min_unit_numel=1000,
        **changes,
    )


def freeze(model: nn.Module) -> None:
    """One whole unit and one parameter of another have no gradient."""
    model.blocks[1].requires_grad_(False)
    model.blocks[0].up.bias.requires_grad_(False)


def trained(model: nn.Module, optimizer, step_batches, *, plain: bool, clip: float = 0.5):
    """Steps of two micro-batches each, clipped; returns losses and norms."""
    seen = []
    for step in range(3):
        losses = []
        for micro in range(2):
            rows = step_batches(2 * step + micro)
            if plain:
                loss = lm_loss(model, *rows) / 2
                loss.backward()
            elif micro == 0:
                with sw.no_sync(model):
                    loss = lm_loss(model, *rows) / 2
                    loss.backward()
            else:
                loss = lm_loss(model, *rows) / 2
                loss.backward()
            losses.append(loss.detach())
        if plain:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        else:
            norm = sw.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(norm))
    return seen


def check_parity(path: str, names: list[str], combinations) -> None:
    """Every combination of tiers trains as one plain process does, in float64."""
    world = dist.get_world_size()
    reference = make(TinyGPT)
    freeze(reference)
    norms = trained(reference, adamw(reference), batch, plain=True)
    expected = {n: p.detach() for n, p in reference.named_parameters(remove_duplicate=False)}
    for name, tiers in product(names, combinations):
        model = make(TinyGPT)
        freeze(model)
        optimizer = adamw(model)
        plan = tiered(PLANS[name], path, *tiers)
        sw.shard(model, optimizer, plan, levels=LEVELS[world], timeout_s=LIMIT_S)
        got = trained(model, optimizer, lambda i: mine(*batch(i)), plain=False)
        assert got == pytest.approx(norms, rel=1e-9), (name, tiers)
        values = sw.state_dict(model, rank0_only=False)
        difference = largest_difference({n: values[n] for n in expected}, expected)
        assert difference <= 1e-9, (name, tiers, difference)
        assert not any(sw.stats(model)[key] for key in ("extra_gathers", "late_reduces"))
        sw.unshard(model)


class TestParity:
    def test_one_rank(self, one, tmp_path):
        one.run(check_parity, str(tmp_path), ["zero3", "fsdp keep=full"], COMBINATIONS)

    def test_two_ranks(self, two, tmp_path):
        two.run(check_parity, str(tmp_path), ["zero3", "ddp"], COMBINATIONS)
        two.run(check_parity, str(tmp_path), ["fsdp keep=full"], COMBINATIONS[::2])
        two.run(check_parity, str(tmp_path), ["zero1"], [*COMBINATIONS[1::2], ("nvme",) * 3])

    def test_four_ranks(self, four, tmp_path):
        names = ["zero3 keep=node", "amsp", "hsdp", "mics world:2"]
        four.run(check_parity, str(tmp_path), names, COMBINATIONS[::2])


def run_steps(model: nn.Module, plan: Plan, optimizer=None, steps: int = 3):
    optimizer = optimizer or adamw(model)
    levels = LEVELS[dist.get_world_size()]
    sw.shard(model, optimizer, plan, levels=levels, timeout_s=LIMIT_S)
    for step in range(steps):
        lm_loss(model, *mine(*batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def check_combined(path: str) -> None:
    """Wires, master weights of another dtype, differences: the bits of the same plan in memory."""
    plans = {
        "zeropp": sw.presets.zeropp(),
        "mixed zero3 keep=node": sw.presets.zero3(keep="node", precision=MIXED),
        "mixed amsp": sw.presets.amsp(precision=MIXED),
        "mixed lean": sw.presets.lean(precision=MIXED),
        "mixed ddp": sw.presets.ddp(precision=MIXED),
        "feedback": replace(
            sw.presets.zero3(),
            grads=replace(sw.presets.zero3().grads, wire="node=int8,world=int4/feedback"),
        ),
    }
    for name, plan in plans.items():
        results = []
        for tiers in [("device",) * 3, ("nvme",) * 3, ("nvme", "device", "nvme")]:
            model = make(TinyGPT, torch.float32)
            optimizer = run_steps(model, tiered(plan, path, *tiers))
            states = sw.optim_state_dict(model, optimizer)
            results.append((sw.state_dict(model, rank0_only=False, master=True), states))
            sw.unshard(model)
        (values, states), *others = results
        for other_values, other_states in others:
            for key, value in values.items():
                torch.testing.assert_close(other_values[key], value, rtol=1e-6, atol=1e-7)
            assert other_states.keys() == states.keys()
            for key, state in states.items():
                for what, value in state.items():
                    torch.testing.assert_close(
                        other_states[key][what], value, rtol=1e-5, atol=1e-9, msg=f"{name} {key}"
                    )


def test_wires_and_masters_combine_with_tiers(four, tmp_path):
    four.run(check_combined, str(tmp_path))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:5], "lr": 0.01}, {"params": p[5:], "lr": 0.02, "foreach": True}]
    ),
}


def check_optimizers(path: str) -> None:
    for name, build in OPTIMIZERS.items():
        results = []
        for tiers in [("device",) * 3, ("nvme",) * 3, ("device", "nvme", "device")]:
            model = make(TinyGPT)
            optimizer = build(list(model.parameters()))
            run_steps(model, tiered(sw.presets.zero3(), path, *tiers), optimizer)
            results.append(sw.state_dict(model, rank0_only=False))
            sw.unshard(model)
        for other in results[1:]:
            assert largest_difference(other, results[0]) <= 1e-12, name


def test_every_optimizer_steps_in_windows(two, tmp_path):
    two.run(check_optimizers, str(tmp_path))


def check_states(path: str) -> None:
    """States are read with their values, loaded back, and belong to their parameters."""
    plan = tiered(sw.presets.zero3(), path)
    model = make(TinyGPT)
    optimizer = run_steps(model, plan)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        assert all(torch.isfinite(value).all() for value in state.values())
        assert not any(value.is_meta for value in state.values())
    shown = optimizer.state[model.blocks[0].up.weight]
    assert shown["exp_avg"].is_meta  # no values where nobody may take them for current ones
    again = make(TinyGPT)
    second = adamw(again)
    levels = LEVELS[dist.get_world_size()]
    sw.shard(again, second, plan, levels=levels, timeout_s=LIMIT_S)
    again.load_state_dict(sw.state_dict(model, rank0_only=False))
    second.load_state_dict(saved)
    for step in range(3, 5):
        for m, o in ((model, optimizer), (again, second)):
            lm_loss(m, *mine(*batch(step))).backward()
            o.step()
            o.zero_grad()
    left, right = (sw.state_dict(m, rank0_only=False) for m in (model, again))
    for name, value in left.items():
        assert torch.equal(right[name], value), (name, (right[name] - value).abs().max())
    sw.unshard(model)
    sw.unshard(again)


def test_states_are_saved_and_loaded(two, tmp_path):
    two.run(check_states, str(tmp_path))


def check_gradients(path: str) -> None:
    """What users do to ``p.grad`` reaches gradients on the disk."""
    results = []
    for tier in ("device", "nvme"):
        model = make(TinyGPT)
        optimizer = adamw(model)
        plan = tiered(sw.presets.zero3(), path, tier, tier, tier)
        sw.shard(model, optimizer, plan, levels=LEVELS[dist.get_world_size()], timeout_s=LIMIT_S)
        for step in range(2):
            lm_loss(model, *mine(*batch(2 * step))).backward()
            sw.clip_grad_norm_(model, 0.1)  # a factor that has to be applied before the next add
            lm_loss(model, *mine(*batch(2 * step + 1))).backward()
            parameters = list(model.parameters())
            parameters[0].grad.mul_(0.5)
            torch._foreach_mul_([p.grad for p in parameters[1:4]], 3.0)
            parameters[5].grad = None
            sw.clip_grad_norm_(model, 0.3, norm_type=1.0)
            norm = sw.clip_grad_norm_(model, 0.2)
            full = sw.full_grads(model)
            optimizer.step()
            optimizer.zero_grad()
        results.append((float(norm), full, sw.state_dict(model, rank0_only=False)))
        sw.unshard(model)
    (norm, full, values), (stored_norm, stored_full, stored_values) = results
    assert stored_norm == pytest.approx(norm, rel=1e-9)
    assert largest_difference(stored_full, full) <= 1e-12
    assert largest_difference(stored_values, values) <= 1e-12


def test_gradients_on_the_disk_follow_the_user(two, tmp_path):
    two.run(check_gradients, str(tmp_path))


# --- one process ----------------------------------------------------------------------------------


def sharded(path: Path, **changes):
    model = make(TinyGPT)
    optimizer = adamw(model)
    sw.shard(model, optimizer, tiered(sw.presets.zero3(), str(path), **changes))
    return model, optimizer


def one_step(model, optimizer, index: int) -> float:
    loss = lm_loss(model, *batch(index))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_nothing_is_left_behind(tmp_path):
    model, optimizer = sharded(tmp_path)
    assert os.listdir(tmp_path)
    one_step(model, optimizer, 0)
    sw.unshard(model)
    assert not os.listdir(tmp_path)


def test_a_dropped_model_leaves_nothing(tmp_path):
    model, optimizer = sharded(tmp_path)
    one_step(model, optimizer, 0)
    del model, optimizer
    import gc

    gc.collect()
    assert not os.listdir(tmp_path)


def test_writes_that_fail_are_told_and_lose_nothing(tmp_path, monkeypatch):
    expected_model, expected_optimizer = sharded(tmp_path)
    model, optimizer = sharded(tmp_path)
    for index in range(2):
        one_step(expected_model, expected_optimizer, index)
    one_step(model, optimizer, 0)
    runtime_of(model).homes.settle()
    pwritev = os.pwritev
    failures = Counter()

    def broken(*args):
        failures["writes"] += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lm_loss(model, *batch(1)).backward()
    monkeypatch.setattr(os, "pwritev", broken)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(TierError, match="Input/output error"):
        runtime_of(model).homes.settle()
    assert failures["writes"]
    monkeypatch.setattr(os, "pwritev", pwritev)
    one_step(model, optimizer, 2)
    one_step(expected_model, expected_optimizer, 2)
    left, right = (sw.state_dict(m) for m in (model, expected_model))
    assert largest_difference(left, right) == 0


def test_a_failed_write_is_told_by_the_next_forward(tmp_path, monkeypatch):
    model, optimizer = sharded(tmp_path)
    one_step(model, optimizer, 0)
    lm_loss(model, *batch(1)).backward()
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )
        optimizer.step()
        runtime_of(model).homes.disk.writes.drain()
    with pytest.raises(TierError):
        model(batch(2)[0])
    model(batch(2)[0])  # told once; the values are there


def test_a_plan_without_a_folder_is_refused():
    model = make(TinyGPT)
    with pytest.raises(PlanError, match=r"tiers\.path is not set"):
        sw.shard(model, plan=sw.presets.infinity())


def test_a_budget_is_enforced(tmp_path):
    model = make(TinyGPT)
    tiers = Tiers(path=str(tmp_path), window_numel=4096, nvme_bytes=10_000)
    plan = replace(tiered(sw.presets.zero3(), str(tmp_path)), tiers=tiers)
    with pytest.raises(BudgetError, match=r"tiers\.nvme_bytes"):
        sw.shard(model, plan=plan)
    assert not os.listdir(tmp_path)


def test_room_is_taken_before_the_first_step(tmp_path):
    model, optimizer = sharded(tmp_path)
    store = runtime_of(model).homes.disk.store
    held = store.held_bytes
    one_step(model, optimizer, 0)
    assert store.held_bytes == held
    model = make(TinyGPT)
    needed = 4 * 8 * sum(p.numel() for p in model.parameters())  # P, G and two states in float64
    tiers = Tiers(path=str(tmp_path), window_numel=4096, nvme_bytes=needed - 1000)
    plan = replace(tiered(sw.presets.zero3(), str(tmp_path)), tiers=tiers)
    with pytest.raises(BudgetError, match=r"tiers\.nvme_bytes"):
        sw.shard(model, adamw(model), plan=plan)


def test_buffers_are_bounded_and_reused(tmp_path):
    """What is lent at once stays within the memory model's figure, and does not grow."""
    model, optimizer = sharded(tmp_path)
    plan, topology = runtime_of(model).plan, Topology.parse("world=1")
    predicted = memory(plan, describe(make(TinyGPT), plan, topology), topology)
    pool = runtime_of(model).homes.disk.pool
    one_step(model, optimizer, 0)
    for index in range(6):
        one_step(model, optimizer, index)
    runtime_of(model).homes.settle()
    assert 0 < pool.held_bytes <= predicted.staging
    store = runtime_of(model).homes.disk.store
    assert store.held_bytes == pytest.approx(predicted.nvme, rel=0.25)  # records are whole pages


def test_parts_are_read_ahead_of_their_use(tmp_path, monkeypatch):
    """With prefetch the next unit's read begins before the current one computes."""
    events = []
    model, optimizer = sharded(tmp_path)
    one_step(model, optimizer, 0)  # recorded
    read = Stored.read_into
    names = {
        id(flat.params.shard): unit.name for unit in runtime_of(model).units for flat in unit.flats
    }

    def noted(self, out):
        events.append(f"read {names[id(self)]}")
        return read(self, out)

    monkeypatch.setattr(Stored, "read_into", noted)
    for name, module in model.named_modules():
        if name.startswith("blocks.") and name.count(".") == 1:
            module.up.register_forward_hook(
                lambda *_, name=name: events.append(f"compute {name}") or None
            )
    with torch.no_grad():
        model(batch(0)[0])
        events.clear()
        model(batch(0)[0])
    assert events.index("read blocks.1") < events.index("compute blocks.0")
    assert events.index("read blocks.2") < events.index("compute blocks.1")
    assert events.index("read blocks.2") > events.index("compute blocks.0")


def test_deferred_models_go_straight_to_the_disk(tmp_path):
    with sw.deferred_init():
        torch.manual_seed(0)
        model = TinyGPT().double()
    sw.shard(model, plan=tiered(sw.presets.zero3(), str(tmp_path)))
    runtime = runtime_of(model)
    assert not any(flat.params.shard.is_resident for unit in runtime.units for flat in unit.flats)
    torch.manual_seed(0)
    expected = TinyGPT().double()
    assert largest_difference(sw.state_dict(model), expected.state_dict()) == 0


def test_cpu_and_device_are_one_memory_here():
    model = make(TinyGPT)
    plan = replace(sw.presets.zero3(), min_unit_numel=1000)
    for state in ("params", "grads", "optim"):
        plan = replace(plan, **{state: replace(getattr(plan, state), tier="cpu")})
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan)
    runtime = runtime_of(model)
    assert all(flat.params.shard.is_resident for unit in runtime.units for flat in unit.flats)
    assert not runtime.root.trained[0].updates_in_windows


def test_a_trace_shows_reads_beside_compute(tmp_path):
    (tmp_path / "disk").mkdir()
    model, optimizer = sharded(tmp_path / "disk")
    one_step(model, optimizer, 0)
    with sw.trace(tmp_path / "trace.json"):
        one_step(model, optimizer, 1)
        runtime_of(model).homes.settle()
    text = (tmp_path / "trace.json").read_text()
    for what in (
        "forward blocks.0",
        "backward blocks.2",
        "read parameters of unit 'blocks.1'",
        "write gradients of unit 'blocks.1'",
        "read optimizer state 'exp_avg' of unit 'blocks.0'",
        "update blocks.0",
    ):
        assert what in text, what
    spans = {e["name"]: e for e in json.loads(text)["traceEvents"] if e["ph"] == "X"}
    earlier, later = spans["backward blocks.2"], spans["backward blocks.1"]
    assert earlier["ts"] + earlier["dur"] == pytest.approx(later["ts"], abs=1)  # one after another
    assert later["dur"] > 100  # microseconds: not ended by the end of the earlier one


def test_export_and_loading_stream_from_and_to_the_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    model, optimizer = sharded(tmp_path / "disk")
    one_step(model, optimizer, 0)
    sw.export(model, tmp_path / "exported")
    other, other_optimizer = sharded(tmp_path / "disk")
    sw.load_pretrained(other, tmp_path / "exported")
    assert largest_difference(sw.state_dict(other), sw.state_dict(model)) == 0
    # The optimizer goes on from what was loaded.
    one_step(other, other_optimizer, 1)
    plain = make(TinyGPT)
    plain.load_state_dict(sw.state_dict(model))
    plain_optimizer = adamw(plain)
    one_step(plain, plain_optimizer, 1)
    assert largest_difference(sw.state_dict(other), plain.state_dict()) <= 1e-12
