"""``shardwise import``: what others saved becomes a checkpoint with which training goes on."""

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwise as sw
from shardwise.checkpoint.foreign import convert
from shardwise.checkpoint.foreign.zips import Window
from shardwise.checkpoint.training.read import Reader
from shardwise.cli.main import run
from tests.checkpoint import fsdp2
from tests.checkpoint.hostile import evil_pickles, zip_with
from tests.checkpoint.zero_layout import TAG, Model, write
from tests.harness import Workers
from tests.models import make
from tests.runtime.support import LEVELS, LIMIT_S, small

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def asked(capsys, *arguments: object) -> dict[str, Any]:
    """The answer of the command, which must succeed."""
    capsys.readouterr()
    assert run(["import", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments: object) -> str:
    """The one sentence with which the command refuses."""
    capsys.readouterr()
    assert run(["import", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


# --- FSDP2 ------------------------------------------------------------------------------------


def go_on(root: str, plan_name: str, layout: str) -> list[float]:
    """Two more steps under a plan of ours, from what FSDP2 saved."""
    plan = small(getattr(sw.presets, plan_name)())
    model = make(fsdp2.Tied, torch.float64, 5)
    optimizer = fsdp2.grouped(model)
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # comes from the checkpoint
    levels = LEVELS[dist.get_world_size()]
    sw.shard(model, optimizer, plan, levels=levels, timeout_s=LIMIT_S)
    sw.load(f"{root}/{layout}", model, optimizer)
    losses = fsdp2.steps(model, optimizer, 2, 3)
    sw.unshard(model)
    return losses


def test_fsdp2_goes_on_under_any_plan(two: Workers, saved_by_fsdp2, tmp_path: Path, capsys) -> None:
    folder, expected = saved_by_fsdp2[0], saved_by_fsdp2[1]["losses"]
    for layout, plan in zip(fsdp2.LAYOUTS, ("zero3", "zero1", "hsdp"), strict=True):
        asked(capsys, folder / layout, tmp_path / layout)
        found = two.run(go_on, str(tmp_path), plan, layout)[0]
        assert found == pytest.approx(expected, rel=1e-12), (layout, plan)


# --- DeepSpeed --------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied, frozen, in two groups, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 5), nn.Linear(5, 6)
        self.last = nn.Linear(5, 6, bias=False)
        self.last.weight = self.middle.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.middle(self.first(x))))


def net_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(Net, torch.float32, seed)
    groups = [{"params": [model.first.weight]}, {"params": [model.first.bias, model.middle.weight]}]
    return model, torch.optim.AdamW(groups, lr=1.0)


def as_saved(model: nn.Module) -> Model:
    names = [["first.weight"], ["first.bias", "middle.weight"]]
    values = dict(model.named_parameters())
    groups = [{name: values[name].detach().clone() for name in group} for group in names]
    frozen = {"middle.bias": values["middle.bias"].detach()}
    shared = {"last.weight": "middle.weight"}
    return Model(groups, frozen, {"seen": torch.tensor(9)}, shared, torch.float32)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_goes_on(stage: int, tmp_path: Path, capsys) -> None:
    plain, reference = net_and_optimizer(0)
    saved = as_saved(plain)
    write(tmp_path / "ds", saved, stage=stage, world=3, extra={"epoch": 2})
    answer = asked(capsys, tmp_path / "ds", tmp_path / "out" / "step-3")
    assert answer["kind"] == f"DeepSpeed ZeRO-{stage} of 3 ranks"
    assert (answer["step"], answer["groups"]) == (3, 2)
    assert answer["states"] == ["exp_avg", "exp_avg_sq", "step"]
    assert answer["tied"] == {"last.weight": "middle.weight"}
    assert any("scheduler" in what for what in answer["not_imported"])
    assert any("epoch" in what for what in answer["not_imported"])
    assert run(["inspect", str(tmp_path / "out" / "step-3"), "--verify"]) == 0
    assert f"imported from DeepSpeed ZeRO-{stage} of 3 ranks" in capsys.readouterr().out
    # A plain process with the same states.
    for number, (group, options) in enumerate(
        zip(reference.param_groups, ({"weight_decay": 0.0}, {"weight_decay": 0.1}), strict=True)
    ):
        group.update(lr=0.1 / (number + 1), betas=(0.9, 0.99), **options)
        for parameter, value in zip(group["params"], saved.groups[number].values(), strict=True):
            states = {key: saved.state(value, key).clone() for key in ("exp_avg", "exp_avg_sq")}
            reference.state[parameter] = {"step": torch.tensor(3.0), **states}
    model, optimizer = net_and_optimizer(1)
    sw.shard(model, optimizer, "zero3")
    assert sw.load(tmp_path / "out", model, optimizer).step == 3
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for each, stepping in ((plain, reference), (model, optimizer)):
        for _ in range(2):
            each(x).square().mean().backward()
            stepping.step()
            stepping.zero_grad()
    with sw.full_params(model):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).detach(), value.detach())
    sw.unshard(model)


def test_torchs_own_reader_reads_what_was_imported(tmp_path: Path, capsys) -> None:
    saved = as_saved(net_and_optimizer(0)[0])
    write(tmp_path / "ds", saved, stage=1, world=2)
    asked(capsys, tmp_path / "ds", tmp_path / "out")
    value = saved.groups[1]["middle.weight"]
    state = {"middle.weight": {"exp_avg": torch.zeros_like(value), "step": torch.tensor(0.0)}}
    found = {"model": {"last.weight": torch.zeros_like(value)}, "optim": {"state": state}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(found["model"]["last.weight"], value)
    assert torch.equal(state["middle.weight"]["exp_avg"], saved.state(value, "exp_avg"))
    assert state["middle.weight"]["step"] == 3


def test_memory_stays_at_windows(tmp_path: Path, capsys) -> None:
    """No read is larger than a window, however large a tensor is."""
    big = Model([{"big": torch.randn(1500, 2000)}])
    write(tmp_path / "ds", big, stage=3, world=2)
    largest, original = [0], Window.read_into

    def counting(window: Window, begin: int, target: memoryview) -> None:
        largest[0] = max(largest[0], len(target))
        original(window, begin, target)

    with mock.patch.object(Window, "read_into", counting):
        asked(capsys, tmp_path / "ds", tmp_path / "out")
    assert largest[0] <= 1 << 22 < big.groups[0]["big"].nbytes // 2
    with Reader(tmp_path / "out") as reader:
        assert torch.equal(reader.whole("model.big"), big.groups[0]["big"])


# --- mistakes and hostile files ---------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "ds", as_saved(net_and_optimizer(0)[0]), stage=1, world=2)


def test_places_that_would_harm_something(source: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert "There is no folder" in refused(capsys, tmp_path / "none", out)
    assert "no checkpoint that can be imported" in refused(capsys, tmp_path, out)
    assert "overlaps" in refused(capsys, source / TAG, source)
    assert "overlaps" in refused(capsys, source, source / TAG / "out")
    assert "belongs to another program" in refused(capsys, source, source / "step-3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert "exists already" in refused(capsys, source, tmp_path / "full")
    asked(capsys, source, out / "step-3")
    assert "exists already" in refused(capsys, source, out / "step-3")
    for ours in (out, out / "step-3"):
        assert "of shardwise already" in refused(capsys, ours, tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == ["ds", "full", "out"]


def test_hostile_and_damaged_sources_leave_nothing(source: Path, tmp_path: Path, capsys) -> None:
    mark, out = tmp_path / "mark", tmp_path / "out"
    file = source / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    original = file.read_bytes()
    for data in (zip_with(evil_pickles(mark)["eval"]), original[:-30], b""):
        file.write_bytes(data)
        assert file.name in refused(capsys, source, out)
    file.write_bytes(original)
    asked(capsys, source, out)
    assert not mark.exists()
    folder = tmp_path / "dcp"
    dcp.save({"model": {"a": torch.arange(4.0)}}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(evil_pickles(mark)["a function"])
    assert "posix.mkdir" in refused(capsys, folder, tmp_path / "out2")
    assert not mark.exists()
    assert sorted(os.listdir(tmp_path)) == ["dcp", "ds", "out"]


def test_a_flipped_bit_is_found_before_anything_is_written(
    source: Path, tmp_path: Path, capsys
) -> None:
    found = convert.open_foreign(source).tensors[0].value.pieces[0].source.storage
    file = found.file.window.path
    data = bytearray(file.read_bytes())
    data[found.record.begin] ^= 1
    file.write_bytes(bytes(data))
    said = refused(capsys, source, tmp_path / "out")
    assert file.name in said
    assert "checksum" in said
    assert os.listdir(tmp_path) == ["ds"]


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, capsys) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch("os.pwrite", fail):
        assert "No space left on device; nothing was left" in refused(
            capsys, source, tmp_path / "out"
        )
    assert os.listdir(tmp_path) == ["ds"]


def test_weights_alone(tmp_path: Path, capsys) -> None:
    model = copy.deepcopy(net_and_optimizer(0)[0])
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    answer = asked(capsys, tmp_path / "dcp", tmp_path / "out")
    assert (answer["states"], answer["groups"]) == ([], 0)
    fresh, optimizer = net_and_optimizer(1)
    sw.shard(fresh, optimizer, "zero3")
    with pytest.raises(sw.UsageError, match="has no optimizer's state"):
        sw.load(tmp_path / "out", fresh, optimizer)
    sw.load(tmp_path / "out", fresh)
    with sw.full_params(fresh):
        assert torch.equal(fresh.first.weight, model.first.weight)
    sw.unshard(fresh)
