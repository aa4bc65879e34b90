"""Layers in tiles: the same training, the same names, and never the whole layer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.errors import PlanError, UsageError
from shardwise.model.projection import Unread
from shardwise.plans.plan import Plan, Precision, Tiers, Tiling
from shardwise.runtime.surface.face import TiledFace
from tests.models import TinyGPT, UntiedGPT, adamw, batch, largest_difference, lm_loss, make, mine
from tests.runtime.support import LEVELS, LIMIT_S, PLANS, assert_at_rest

NUMEL = 480
"""Twenty rows of the test models' width: cuts their embeddings and every linear layer."""


def tiled(plan: Plan, numel: int = NUMEL, **changes) -> Plan:
    return replace(plan, tiling=Tiling(numel=numel), min_unit_numel=500, **changes)


def on_disk(plan: Plan, path: str) -> Plan:
    return replace(
        plan,
        params=replace(plan.params, tier="nvme"),
        grads=replace(plan.grads, tier="nvme"),
        optim=replace(plan.optim, tier="nvme"),
        tiers=Tiers(path=path, window_numel=4096),
    )


def train(model, optimizer, batches, *, sharded: bool) -> list[float]:
    """Three steps of two micro-batches, the first under no_sync, clipped."""
    seen = []
    for step in range(3):
        for micro in range(2):
            rows = batches(2 * step + micro)
            if sharded and micro == 0:
                with sw.no_sync(model):
                    (lm_loss(model, *rows) / 2).backward()
            else:
                loss = lm_loss(model, *rows) / 2
                loss.backward()
        clip = sw.clip_grad_norm_ if sharded else torch.nn.utils.clip_grad_norm_
        norm = clip(model if sharded else model.parameters(), 0.5)
        seen.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def check_parity(kind, plan: Plan, freeze: bool = False) -> None:
    """A tiled model trains as a plain one does, and comes back as one."""
    plain, model = make(kind), make(kind)
    for one in (plain, model) if freeze else ():
        one.blocks[1].requires_grad_(False)
        one.head.weight.requires_grad_(False)
    expected = train(plain, adamw(plain), batch, sharded=False)
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan, levels=LEVELS[dist.get_world_size()], timeout_s=LIMIT_S)
    assert any(isinstance(face, TiledFace) for face in runtime_of(model).faces)
    got = train(model, optimizer, lambda step: mine(*batch(step)), sharded=True)
    assert got == pytest.approx(expected, rel=1e-9)
    state = sw.state_dict(model, rank0_only=False)
    assert {name: state[name].shape for name in shapes} == shapes
    reference = {n: p.detach() for n, p in plain.named_parameters(remove_duplicate=False)}
    assert largest_difference({n: state[n] for n in reference}, reference) <= 1e-9
    assert_at_rest(model)
    assert not any(sw.stats(model)[key] for key in ("extra_gathers", "skipped_gathers"))
    sw.unshard(model)
    unsharded = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    assert largest_difference(unsharded, reference) <= 1e-9
    assert type(model(batch(0)[0])) is torch.Tensor


def check_parity_of(path: str, names: list[str]) -> None:
    for name in names:
        plan = tiled(PLANS[name])
        check_parity(TinyGPT, plan)
        check_parity(UntiedGPT, on_disk(plan, path))
        check_parity(UntiedGPT, replace(on_disk(plan, path), activations="recompute"), freeze=True)
        check_parity(TinyGPT, replace(plan, activations="recompute", prefetch=2))


class TestParity:
    def test_one_rank(self, one, tmp_path):
        path = str(tmp_path)
        one.run(check_parity, UntiedGPT, on_disk(tiled(PLANS["zero3"]), path))
        one.run(check_parity, TinyGPT, on_disk(tiled(sw.presets.infinity()), path))

    def test_two_ranks(self, two, tmp_path):
        two.run(check_parity_of, str(tmp_path), ["zero3", "fsdp keep=full"])

    def test_four_ranks(self, four, tmp_path):
        four.run(check_parity_of, str(tmp_path), ["zero3 keep=node", "hsdp"])


def check_precision() -> None:
    """With low precision and lossy wires: as the same plan without tiles, to their rounding."""
    mixed = Precision(compute="bfloat16", reduce="bfloat16", master="float32")
    for name, tolerance in (("zero3", 1e-2), ("zeropp", 3e-2)):
        plan = sw.presets.PRESETS[name](precision=mixed)
        norms = []
        for numel in (0, NUMEL):
            model = make(UntiedGPT, torch.float32)
            optimizer = adamw(model)
            sw.shard(model, optimizer, tiled(plan, numel), levels=LEVELS[dist.get_world_size()])
            norms.append(train(model, optimizer, lambda step: mine(*batch(step)), sharded=True))
            sw.unshard(model)
        assert norms[1] == pytest.approx(norms[0], rel=tolerance), name


def check_memory() -> None:
    """What is gathered at once are a few tiles, not the layers; likewise of gradients."""
    for kind in (TinyGPT, UntiedGPT):
        peaks = {numel: peak_buffers(kind, numel) for numel in (0, NUMEL)}
        table = 2000 * 24 * 8
        assert min(peaks[0]) >= table
        assert max(peaks[NUMEL]) < table / 4


def peak_buffers(kind, numel: int) -> tuple[int, int]:
    model = make(kind, vocab=2000)
    sw.shard(model, plan=tiled(sw.presets.zero3(), numel), levels="node=2")
    for step in range(2):
        tokens, targets = mine(*batch(step, vocab=2000))
        lm_loss(model, tokens, targets).backward()
    stats = sw.stats(model)
    sw.unshard(model)
    return stats["param_buffers_peak_bytes"], stats["grad_buffers_peak_bytes"]


def check_access(path: str) -> None:
    """Values, gradients and states of tiled parameters, by all the ways that others have."""
    model, reference = make(UntiedGPT), make(UntiedGPT)
    optimizer = adamw(model)
    sw.shard(model, optimizer, tiled(sw.presets.zero3()), levels="node=2", timeout_s=LIMIT_S)
    parameter = model.head.weight
    whole = sum(p.numel() for p in reference.parameters())
    assert parameter.shape == (37, 24)
    assert sum(p.numel() for p in model.parameters()) == whole
    with pytest.raises(UsageError, match="in tiles"):
        parameter.sum()

    # Values.
    with sw.full_params(model):
        assert torch.equal(parameter, reference.head.weight)
        with torch.no_grad():
            expected = reference(batch(0)[0])
            assert torch.equal(model(batch(0)[0]), expected)
        with pytest.raises(UsageError, match="cannot be trained inside"):
            model(batch(0)[0])
    with sw.full_params(model, write=True), torch.no_grad():
        if dist.get_rank() == 0:
            parameter.mul_(2)
        with sw.full_params(model, model.head):
            pass  # does not bring the old values back
    assert torch.equal(
        sw.state_dict(model, rank0_only=False)["head.weight"], 2 * reference.head.weight
    )
    model.load_state_dict(reference.state_dict())
    assert torch.equal(sw.state_dict(model, rank0_only=False)["head.weight"], reference.head.weight)

    # Gradients.
    loss = lm_loss(model, *mine(*batch(0)))
    loss.backward()
    lm_loss(reference, *batch(0)).backward()
    grads = sw.full_grads(model)
    assert grads.keys() == {name for name, _ in reference.named_parameters()}
    for name, plain in reference.named_parameters():
        torch.testing.assert_close(grads[name], plain.grad, rtol=1e-9, atol=1e-12)
    assert parameter.grad is not None
    parameter.grad.mul_(2)
    torch.testing.assert_close(
        sw.full_grads(model)["head.weight"], 2 * reference.head.weight.grad, rtol=1e-9, atol=1e-12
    )
    parameter.grad = torch.ones(37, 24, dtype=torch.float64)
    assert bool((sw.full_grads(model)["head.weight"] == 1).all())
    model.zero_grad()
    assert not sw.full_grads(model)
    lm_loss(model, *mine(*batch(0))).backward()
    torch.testing.assert_close(
        sw.full_grads(model)["head.weight"], reference.head.weight.grad, rtol=1e-9, atol=1e-12
    )

    # Optimizer states.
    plain_optimizer = adamw(reference)
    plain_optimizer.step()
    optimizer.step()
    states = sw.optim_state_dict(model, optimizer)
    for name, plain in reference.named_parameters():
        for key, value in plain_optimizer.state[plain].items():
            torch.testing.assert_close(states[name][key], value, rtol=1e-9, atol=1e-12)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(plain_optimizer.state_dict())
    for name, state in sw.optim_state_dict(model, optimizer).items():
        for key, value in state.items():
            torch.testing.assert_close(value, states[name][key], rtol=1e-9, atol=1e-12)

    # Files.
    target = Path(path) / "exported"
    sw.export(model, target)
    values = sw.state_dict(model, rank0_only=False)
    sw.unshard(model)
    other = make(UntiedGPT, seed=1)
    sw.shard(other, plan=tiled(sw.presets.zero3()), levels="node=2", timeout_s=LIMIT_S)
    sw.load_pretrained(other, target)
    assert largest_difference(sw.state_dict(other, rank0_only=False), values) == 0
    sw.unshard(other)


def check_states_on_disk(path: str) -> None:
    """What an optimizer keeps for tiles comes back from a state dict, wherever it rests."""
    model = make(UntiedGPT)
    optimizer = adamw(model)
    plan = on_disk(tiled(sw.presets.zero3()), path)
    sw.shard(model, optimizer, plan, levels="node=2", timeout_s=LIMIT_S)
    lm_loss(model, *mine(*batch(0))).backward()
    optimizer.step()
    before = sw.optim_state_dict(model, optimizer)
    saved = optimizer.state_dict()
    lm_loss(model, *mine(*batch(1))).backward()
    optimizer.step()
    optimizer.load_state_dict(saved)
    after = sw.optim_state_dict(model, optimizer)
    for name, state in before.items():
        for key, value in state.items():
            assert torch.equal(after[name][key], value), (name, key)
    sw.unshard(model)


def check_refusals() -> None:
    """What tiles cannot do is said."""
    plan = tiled(sw.presets.zero3())
    model = make(UntiedGPT)
    model.head.weight.register_hook(lambda grad: grad)
    with pytest.raises(PlanError, match=r"'head\.weight' has hooks"):
        sw.shard(model, plan=plan, levels="node=2")

    class Reads(UntiedGPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.linear(self.embed(tokens), self.head.weight)

    model = make(Reads)
    sw.shard(model, plan=plan, levels="node=2", timeout_s=LIMIT_S)
    with pytest.raises(UsageError, match=r"'linear' needs all values of parameter 'head\.weight'"):
        model(batch(0)[0])
    with pytest.raises(UsageError, match="'register_hook' has no effect"):
        model.head.weight.register_hook(lambda grad: grad)
    with pytest.raises(IndexError, match="out of range"):
        model(batch(0)[0] + 1000)
    sw.unshard(model)


class TestTwoRanks:
    def test_low_precision_and_wires(self, two):
        two.run(check_precision)

    def test_only_tiles_are_gathered(self, two):
        two.run(check_memory)

    def test_values_gradients_states_and_files(self, two, tmp_path):
        two.run(check_access, str(tmp_path))

    def test_states_on_disk(self, two, tmp_path):
        two.run(check_states_on_disk, str(tmp_path))

    def test_refusals(self, two):
        two.run(check_refusals)


def check_deferred(path: str) -> None:
    """A deferred model starts from the same values, with and without tiles."""
    found = []
    for numel in (0, NUMEL):
        torch.manual_seed(5)
        with sw.deferred_init():
            model = UntiedGPT()
        plan = on_disk(tiled(sw.presets.zero3(), numel), path)
        sw.shard(model, plan=plan, levels="node=2", timeout_s=LIMIT_S)
        found.append(sw.state_dict(model, rank0_only=False))
        sw.unshard(model)
    assert largest_difference(*found) == 0


def test_deferred_models_start_alike(two, tmp_path):
    two.run(check_deferred, str(tmp_path))
    assert not list(tmp_path.iterdir())


def check_loss_inside_and_outside() -> None:
    """A loss of unread logits, by the model or by its caller, takes the tiles in the usual order."""

    class WithLoss(UntiedGPT):
        def forward(self, tokens, targets):
            logits = super().forward(tokens)
            assert type(logits) is Unread
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    model = make(WithLoss)
    plain = make(UntiedGPT)
    sw.shard(model, plan=tiled(sw.presets.zero3()), levels="node=2", timeout_s=LIMIT_S)
    for step in range(3):
        loss, logits = model(*mine(*batch(step)))
        assert float(loss) == pytest.approx(float(lm_loss(plain, *mine(*batch(step)))), rel=1e-9)
        loss.backward()
        with torch.no_grad():
            read = logits.argmax(-1)  # after backward: gathered once more
            assert torch.equal(read, plain(mine(*batch(step))[0]).argmax(-1))
    assert sw.stats(model)["extra_gathers"] == 0
    model.eval()
    with torch.no_grad():
        assert type(model.head(torch.zeros(1, 24, dtype=torch.float64))) is torch.Tensor
    sw.unshard(model)


class Stem(UntiedGPT):
    """Tiled layers outside of blocks whose output is no loss: for each other, and for blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.embed(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def check_outputs_that_are_no_loss(path: str) -> None:
    plan = tiled(sw.presets.zero3())
    check_parity(Stem, plan)
    check_parity(Stem, replace(on_disk(plan, path), activations="nvme"))


def test_outputs_that_are_no_loss(two, tmp_path):
    two.run(check_outputs_that_are_no_loss, str(tmp_path))


def test_losses_inside_and_outside_the_model(two):
    two.run(check_loss_inside_and_outside)
