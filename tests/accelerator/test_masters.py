"""A master that is P's shard as well: values come from it, go to it, and keep its precision."""

from dataclasses import replace

import torch

import shardwise as sw
from shardwise.api import runtime_of
from tests.accelerator.accelerators import chosen
from tests.models import TinyGPT, adamw, batch, largest_difference, lm_loss, make, mine


def _masters_are_shards(folder: str) -> None:
    """Values come from the masters, go to them, and lose nothing by being there only once."""
    precision = sw.Precision(compute="bfloat16")
    device = chosen().device

    def sharded(plan: sw.Plan, seed: int):
        torch.manual_seed(seed)
        model = make(TinyGPT, torch.float32, seed=seed)
        optimizer = adamw(model)
        sw.shard(model, optimizer, replace(plan, min_unit_numel=1000), levels="world=2")
        return model, optimizer

    def masters(model) -> dict[str, torch.Tensor]:
        return sw.state_dict(model, rank0_only=False, master=True)

    model, optimizer = sharded(sw.presets.zero3(precision=precision), seed=0)
    flats = [flat for unit in runtime_of(model).units for flat in unit.flats]
    assert all(flat.rests_in_master for flat in flats)
    assert largest_difference(masters(model), make(TinyGPT, torch.float32).state_dict()) == 0
    for step in range(2):
        lm_loss(model, *(t.to(device) for t in mine(*batch(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact, values = masters(model), sw.state_dict(model, rank0_only=False)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in exact.values())
    for name, value in exact.items():
        assert torch.equal(value.bfloat16(), values[name]), name
    sw.export(model, folder, master=True)
    with torch.no_grad(), sw.full_params(model, write=True):
        model.norm.bias.fill_(0.5)
    written = masters(model)
    assert (written.pop("norm.bias") == 0.5).all()
    assert all(torch.equal(value, exact[name]) for name, value in written.items())
    sw.load_pretrained(model, folder)
    assert largest_difference(masters(model), exact) == 0
    sw.unshard(model)
    # Where P is whole it has memory of its own.
    other, _ = sharded(sw.presets.zero1(precision=precision), seed=1)
    sw.load_pretrained(other, folder)
    assert largest_difference(masters(other), exact) == 0
    assert largest_difference(sw.state_dict(other, rank0_only=False), values) == 0
    sw.unshard(other)


def test_masters_that_are_shards_keep_their_precision(sim_two, tmp_path) -> None:
    sim_two.run(_masters_are_shards, str(tmp_path / "exported"))
