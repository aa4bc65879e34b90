"""Exchange of weights in safetensors files: what is written, what is read, and what failures leave."""

import errno
import json
import os
import shutil
import signal
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.checkpoint import folder as folder_module
from shardwise.checkpoint import pretrained
from shardwise.cli.main import app
from shardwise.plans.plan import Plan, Precision
from shardwise.runtime.unit import State
from tests.harness import PRELOAD, WorkerError, Workers
from tests.models import TinyGPT, adamw, batch, lm_loss, make, mine
from tests.runtime.support import LIMIT_S, PLANS, assert_at_rest, levels_of, small

ALL_PLANS = {**PLANS, "zeropp": sw.presets.zeropp()}
WIDE_MASTER = Precision(compute="bfloat16", reduce="float32", master="float32")
INDEX = "model.safetensors.index.json"
PRELOAD.append("transformers.models.gpt2.modeling_gpt2")


class Model(TinyGPT):
    """Tied embeddings, a scalar, buffers of two dtypes and one that is not saved, frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.blocks[1].up.weight.requires_grad_(False)


def sharded(
    plan: str | Plan = "zero3", *, seed: int = 0, kind=Model, dtype=torch.float64, **changes
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(kind, dtype, seed)
    optimizer = adamw(model)
    chosen = small(ALL_PLANS[plan] if isinstance(plan, str) else plan, **changes)
    sw.shard(model, optimizer, chosen, levels=levels_of(chosen), timeout_s=LIMIT_S)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> float:
    loss = lm_loss(model, *mine(*batch(step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def full(model: nn.Module, **options) -> dict[str, torch.Tensor]:
    return sw.state_dict(model, rank0_only=False, **options)


def on_rank_0(action) -> None:
    """Runs something on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """What safetensors itself reads from a folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert torch.equal(got[name], value), name


def without(tensors: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name not in names}


def refusal(action) -> str:
    """The one sentence with which an action is refused, alike on all ranks."""
    try:
        action()
    except sw.ShardwiseError as error:
        sentences: list = [None] * dist.get_world_size()
        dist.all_gather_object(sentences, str(error))
        assert len(set(sentences)) == 1, sentences
        return str(error)
    raise AssertionError("it was not refused")


# --- roundtrips -------------------------------------------------------------------------------


def roundtrip(root: str, plans: list[str]) -> None:
    """Each plan's model is exported after a step, and loaded by one under the next plan."""
    for index, name in enumerate(plans):
        folder = Path(root) / name.replace(" ", "_").replace("=", "_").replace(":", "_")
        model, optimizer = sharded(name)
        train(model, optimizer)
        with torch.no_grad():
            model.scale.add_(1)
        sw.export(model, folder)
        expected = full(model)
        assert_same(stored(folder), without(expected, "head.weight"))
        assert_at_rest(model)
        following = plans[(index + 1) % len(plans)]
        other, other_optimizer = sharded(following, seed=1)
        train(other, other_optimizer, 1)
        assert sw.load_pretrained(other, folder) == pretrained.Loaded((), ())
        assert_same(full(other), expected)
        ours, theirs = (lm_loss(m, *mine(*batch(2))).item() for m in (model, other))
        assert "zeropp" in (name, following) or abs(ours - theirs) < 1e-9
        train(other, other_optimizer, 3)
        sw.unshard(model)
        sw.unshard(other)


def masters(root: str, plans: list[str]) -> None:
    """Master weights are written exactly, and keep a file's precision when they are read."""
    for name in plans:
        folder = Path(root) / f"master_{name}"
        model, optimizer = sharded(name, dtype=torch.float32, precision=WIDE_MASTER)
        train(model, optimizer)
        sw.export(model, folder, master=True)
        expected = full(model, master=True)
        assert expected["embed.weight"].dtype == torch.float32
        assert not torch.equal(
            expected["embed.weight"], expected["embed.weight"].bfloat16().float()
        )
        assert_same(stored(folder), without(expected, "head.weight"))
        other, _ = sharded(name, seed=1, dtype=torch.float32, precision=WIDE_MASTER)
        sw.load_pretrained(other, folder)
        assert_same(full(other, master=True), expected)
        assert_same(full(other), full(model))
        sw.unshard(model)
        sw.unshard(other)


class TestRoundtrip:
    def test_on_one_rank(self, one: Workers, tmp_path: Path) -> None:
        one.run(roundtrip, str(tmp_path), ["zero3", "ddp"])

    def test_on_two_ranks(self, two: Workers, tmp_path: Path) -> None:
        two.run(roundtrip, str(tmp_path), ["zero3", "zero1", "ddp", "fsdp keep=full"])

    def test_on_four_ranks(self, four: Workers, tmp_path: Path) -> None:
        plans = ["amsp", "hsdp", "zeropp", "zero1", "zero3 keep=node"]
        four.run(roundtrip, str(tmp_path), plans)

    def test_masters(self, two: Workers, tmp_path: Path) -> None:
        two.run(masters, str(tmp_path), ["zero3", "zero1", "ddp"])

    def test_from_four_ranks_to_two_and_one(
        self, one: Workers, two: Workers, four: Workers, tmp_path: Path
    ) -> None:
        path = str(tmp_path / "exported")
        (first, *_) = four.run(export_trained, path)
        for pool, plan in ((two, "zero1"), (one, "zero3")):
            assert pool.run(sum_of_loaded, path, plan)[0] == first


def export_trained(path: str) -> str:
    model, optimizer = sharded("amsp")
    train(model, optimizer)
    sw.export(model, path)
    return digest(full(model))


def sum_of_loaded(path: str, plan: str) -> str:
    with sw.deferred_init():
        model = Model().double()
    model.blocks[1].up.weight.requires_grad_(False)
    sw.shard(model, plan=small(ALL_PLANS[plan]), timeout_s=LIMIT_S)
    sw.load_pretrained(model, path)
    return digest(full(model))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    import hashlib

    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].numpy().tobytes())
    return found.hexdigest()


# --- what is written --------------------------------------------------------------------------


def several_files(root: str) -> None:
    model, _ = sharded()
    folder, limit = Path(root) / "several", 20_000
    sw.export(model, folder, max_shard_bytes="20 kB")
    index = json.loads((folder / INDEX).read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    seen = {}
    for file in files:
        tensors = load_file(folder / file)
        num_bytes = sum(t.nbytes for t in tensors.values())
        assert num_bytes <= limit or len(tensors) == 1, (file, num_bytes)
        seen |= dict.fromkeys(tensors, file)
    assert index["weight_map"] == seen
    expected = without(full(model), "head.weight")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert_same(stored(folder), expected)
    other, _ = sharded("ddp", seed=1)
    sw.load_pretrained(other, folder)
    assert_same(full(other), full(model))


def other_dtype(root: str) -> None:
    model, _ = sharded()
    folder = Path(root) / "bf16"
    sw.export(model, folder, dtype=torch.bfloat16)
    expected = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in without(full(model), "head.weight").items()
    }
    assert expected["count"].dtype == torch.int64
    assert_same(stored(folder), expected)
    other, _ = sharded(seed=1)
    sw.load_pretrained(other, folder)
    got = full(other)
    assert got["embed.weight"].dtype == torch.float64
    assert torch.equal(got["embed.weight"], expected["embed.weight"].double())
    assert "dtype" in refusal(lambda: sw.export(model, folder, dtype=torch.int8, overwrite=True))


def aligned(root: str) -> None:
    """Data of every dtype begins on a multiple of its size, though an int8 comes first."""
    model, _ = sharded(kind=Odd, dtype=None)
    folder = Path(root) / "odd"
    sw.export(model, folder)
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = without(json.loads(raw[8 : 8 + length]), "__metadata__")
    assert length % 8 == 0
    for entry in header.values():
        numel = max(1, torch.Size(entry["shape"]).numel())
        size = (entry["data_offsets"][1] - entry["data_offsets"][0]) // numel
        assert entry["data_offsets"][0] % max(1, size) == 0, entry
    assert_same(stored(folder), full(model))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
        self.narrow = nn.Parameter(torch.rand(5).half())
        self.none = nn.Parameter(torch.rand(0, 4))
        self.wide = nn.Parameter(torch.rand(3).double())
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.more = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))


def ties(root: str) -> None:
    """Written once and noted; read under any of its names, but not with two values."""
    model, _ = sharded()
    folder = Path(root) / "ties"
    sw.export(model, folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "embed.weight" in file.keys()  # noqa: SIM118
        assert "head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    values = full(model)
    moved = without(values, "embed.weight")
    variants = {"moved": moved, "both": {**values, "head.weight": values["head.weight"].clone()}}
    for name, tensors in variants.items():
        path = Path(root) / f"{name}.safetensors"
        on_rank_0(lambda t=tensors, p=path: save_file(t, p))
        other, _ = sharded(seed=1)
        sw.load_pretrained(other, path)
        assert_same(full(other), values)
        assert other.head.weight is other.embed.weight
    path = Path(root) / "differ.safetensors"
    differ = {**values, "head.weight": values["head.weight"] + 1}
    on_rank_0(lambda: save_file(differ, path))
    message = refusal(lambda: sw.load_pretrained(model, path))
    assert "'head.weight' differs from 'embed.weight'" in message
    assert_same(full(model), values)


def one_unit_at_a_time(root: str) -> None:
    """While anything is written only one unit has full values, and only its memory was taken."""
    model, _ = sharded(seed=0)
    runtime, seen = runtime_of(model), []
    write = os.pwrite

    def watched(*args) -> int:
        seen.append(sum(u.travels and u.state is not State.RESTING for u in runtime.units))
        return write(*args)

    runtime.pools.params.trim()
    with mock.patch("os.pwrite", watched):
        sw.export(model, Path(root) / "streamed")
    if dist.get_rank() == 0:
        assert max(seen) == 1, seen
        assert len(seen) >= len(list(runtime.slots))
    largest = max(sum(f.spec.numel * 8 for f in unit.flats) for unit in runtime.units)
    total = sum(f.spec.numel * 8 for unit in runtime.units for f in unit.flats)
    # Units of equal size share a buffer, which the pool keeps: the root's and a block's stay.
    kinds = {tuple(f.spec.numel * 8 for f in unit.flats) for unit in runtime.units}
    peak = sw.stats(model)["param_buffers_peak_bytes"]
    assert 0 < peak <= sum(map(sum, kinds)), (peak, kinds)
    assert largest < total / 2


def one_parameter_at_a_time(root: str) -> None:
    """While a model is loaded nothing is gathered, and no value outlives the next."""
    model, _ = sharded()
    path = Path(root) / "whole"
    sw.export(model, path)
    runtime = runtime_of(model)
    runtime.pools.params.trim()
    runtime.pools.params.peak_bytes = 0
    alive: list[weakref.ref] = []
    reader = pretrained._reader

    class Watched:
        def __init__(self, file) -> None:
            self.context = reader(file)

        def __enter__(self):
            self.file = self.context.__enter__()
            return self

        def __exit__(self, *error):
            return self.context.__exit__(*error)

        def get_tensor(self, name):
            assert not any(ref() is not None for ref in alive), name
            value = self.file.get_tensor(name)
            alive.append(weakref.ref(value))
            return value

    with mock.patch.object(pretrained, "_reader", Watched):
        sw.load_pretrained(model, path)
    assert len(alive) > 30
    assert runtime.pools.params.peak_bytes == 0


class TestWritten:
    def test_several_files_with_an_index(self, two: Workers, tmp_path: Path) -> None:
        two.run(several_files, str(tmp_path))

    def test_another_dtype(self, two: Workers, tmp_path: Path) -> None:
        two.run(other_dtype, str(tmp_path))

    def test_dtypes_are_aligned(self, two: Workers, tmp_path: Path) -> None:
        two.run(aligned, str(tmp_path))

    def test_ties(self, two: Workers, tmp_path: Path) -> None:
        two.run(ties, str(tmp_path))

    def test_one_unit_at_a_time(self, two: Workers, tmp_path: Path) -> None:
        two.run(one_unit_at_a_time, str(tmp_path))

    def test_one_parameter_at_a_time(self, two: Workers, tmp_path: Path) -> None:
        two.run(one_parameter_at_a_time, str(tmp_path))


# --- what does not fit ------------------------------------------------------------------------


def misfits(root: str) -> None:
    """All that is wrong is said at once, and nothing is written."""
    model, _ = sharded()
    before = full(model)
    tensors = without(before, "head.weight", "norm.weight", "scale")
    tensors["extra.weight"] = torch.ones(2)
    tensors["norm.bias"] = torch.ones(5, dtype=torch.float64)
    tensors["blocks.0.up.bias"] = torch.ones(96, dtype=torch.int8)
    tensors = {name: torch.zeros_like(value) for name, value in tensors.items()}
    path = Path(root) / "misfit.safetensors"
    on_rank_0(lambda: save_file(tensors, path))
    message = refusal(lambda: sw.load_pretrained(model, path))
    for part in (
        "missing in the files: 'norm.weight', 'scale'",
        "not in the model: 'extra.weight'",
        "'norm.bias' has shape [5] instead of [24]",
        "'blocks.0.up.bias' has dtype I8",
        "nothing was loaded",
    ):
        assert part in message, message
    message = refusal(lambda: sw.load_pretrained(model, path, strict=False))
    assert "shape" in message
    assert "missing" not in message
    assert_same(full(model), before)


def not_strict(root: str) -> None:
    model, _ = sharded()
    before = full(model)
    tensors = {"norm.bias": torch.full((24,), 3.0), "extra": torch.ones(2)}
    path = Path(root) / "some.safetensors"
    on_rank_0(lambda: save_file(tensors, path))
    loaded = sw.load_pretrained(model, path, strict=False)
    assert loaded.unexpected == ("extra",)
    assert "norm.bias" not in loaded.missing
    assert set(loaded.missing) == before.keys() - {"norm.bias", "head.weight"}
    assert_same(full(model), {**before, "norm.bias": torch.full((24,), 3.0).double()})


def damaged(root: str) -> None:
    model, _ = sharded()
    folder = Path(root) / "whole"
    sw.export(model, folder, max_shard_bytes=20_000)
    second = sorted(folder.glob("*.safetensors"))[1]

    def cut() -> None:
        second.write_bytes(second.read_bytes()[:-1])

    def misplace() -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["embed.weight"] = second.name  # it is in the first one
        (folder / INDEX).write_text(json.dumps(index))

    on_rank_0(misplace)
    message = refusal(lambda: sw.load_pretrained(model, folder))
    assert "lists tensors that its files do not have (embed.weight)" in message
    on_rank_0(cut)
    assert second.name in refusal(lambda: sw.load_pretrained(model, folder))
    on_rank_0(second.unlink)
    assert second.name in refusal(lambda: sw.load_pretrained(model, folder))
    on_rank_0(lambda: (folder / INDEX).write_text("{"))
    assert INDEX in refusal(lambda: sw.load_pretrained(model, folder))
    on_rank_0((folder / INDEX).unlink)
    assert "give the path of one file" in refusal(lambda: sw.load_pretrained(model, folder))
    assert "no file" in refusal(lambda: sw.load_pretrained(model, Path(root) / "absent"))


def other_files_on_a_rank(root: str) -> None:
    """A rank that sees no file, or another one, stops them all, before anything is written."""
    model, _ = sharded()
    before = full(model)
    rank = dist.get_rank()
    own = Path(root) / f"rank{rank}"
    sw.export(model, Path(root) / "all")
    assert "Rank 1: There is no file" in refusal(
        lambda: sw.load_pretrained(model, Path(root) / ("all" if rank == 0 else "absent"))
    )
    own.mkdir()
    tensors = {"norm.bias": torch.zeros(24)} if rank else {"norm.weight": torch.zeros(24)}
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(sw.SyncError, match="same files"):
        sw.load_pretrained(model, own, strict=False)
    assert_same(full(model), before)


def no_stale_copy(root: str) -> None:
    """Values that a forward left gathered for its backward are not used after a load."""
    for plan in ("zero3", "fsdp keep=full", "zero3 keep=node"):
        model, _ = sharded(plan)
        other, _ = sharded(plan, seed=1)
        path = Path(root) / plan.replace(" ", "_")
        sw.export(other, path)
        lm_loss(model, *mine(*batch(0)))  # no backward: what it gathered is still there
        sw.load_pretrained(model, path)
        losses = [lm_loss(m, *mine(*batch(0))).item() for m in (model, other)]
        assert losses[0] == losses[1], (plan, losses)
        with sw.full_params(model):
            assert "full_params" in refusal(lambda m=model, p=path: sw.load_pretrained(m, p))


class TestMisfits:
    def test_all_are_listed_and_nothing_is_written(self, two: Workers, tmp_path: Path) -> None:
        two.run(misfits, str(tmp_path))

    def test_not_strict_returns_them(self, two: Workers, tmp_path: Path) -> None:
        two.run(not_strict, str(tmp_path))

    def test_damaged_files_are_named(self, two: Workers, tmp_path: Path) -> None:
        two.run(damaged, str(tmp_path))

    def test_ranks_that_see_other_files(self, two: Workers, tmp_path: Path) -> None:
        two.run(other_files_on_a_rank, str(tmp_path))

    def test_no_stale_copy_is_used(self, two: Workers, tmp_path: Path) -> None:
        two.run(no_stale_copy, str(tmp_path))


# --- failures ---------------------------------------------------------------------------------


def after_writes(count: int, then):
    """Patches the system's write so that the one after ``count`` does something else."""
    write, done = os.pwrite, []

    def patched(*args) -> int:
        done.append(1)
        if len(done) > count:
            then()
        return write(*args)

    return mock.patch("os.pwrite", patched)


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def assert_empty(root: str) -> None:
    """Nothing is left, not even a folder; all ranks look before any goes on."""
    dist.barrier()
    left = list(Path(root).rglob("*"))
    dist.barrier()
    assert not left


def full_disk(root: str) -> None:
    """One sentence on all ranks, nothing left, and the model as good as before."""
    model, optimizer = sharded()
    before = full(model)
    target = Path(root) / "deep" / "er" / "target"
    for writes in (0, 2, 20):
        with after_writes(writes, no_space):
            message = refusal(lambda: sw.export(model, target))
        assert "ran out of disk space" in message, message
        assert len(message.splitlines()) == 1
        assert_empty(root)
        assert_at_rest(model)
    usage = shutil.disk_usage(root)._replace(free=1000)
    with mock.patch("shutil.disk_usage", return_value=usage), after_writes(0, pytest.fail):
        message = refusal(lambda: sw.export(model, target))
    assert "1000 are free" in message
    assert_same(full(model), before)
    sw.export(model, target)
    assert_same(stored(target), without(before, "head.weight"))
    train(model, optimizer)


def broken_config(root: str) -> None:
    """An error of the model's own code ends the export on all ranks, too."""

    class Config:
        def to_json_string(self) -> str:
            raise ValueError("broken")

    model, _ = sharded()
    model.config = Config()
    rank0 = dist.get_rank() == 0
    with pytest.raises(ValueError if rank0 else sw.UsageError, match="broken"):
        sw.export(model, Path(root) / "target")
    assert_empty(root)
    model.config.to_json_string = lambda: '{"a": 1}'
    sw.export(model, Path(root) / "target")
    assert json.loads((Path(root) / "target" / "config.json").read_text()) == {"a": 1}


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exchange_and_die(left: Path, right: Path, exchange=folder_module.exchange) -> None:
    assert exchange(left, right)
    die()


def export_and_die(target: str, moment: str) -> None:
    model, _ = sharded("ddp", seed=1)
    patches = {
        "in the middle": lambda: after_writes(5, die),
        "before it shows": lambda: mock.patch.object(folder_module, "exchange", die),
        "after it shows": lambda: mock.patch.object(folder_module, "exchange", exchange_and_die),
    }
    with patches[moment]():
        sw.export(model, target, overwrite=True)


def export_plainly(target: str, seed: int, overwrite: bool = False) -> str:
    model, _ = sharded("ddp", seed=seed)
    sw.export(model, target, overwrite=overwrite)
    return digest(without(full(model), "head.weight"))


def existing_target(root: str) -> None:
    """Refused, or its weights are replaced while other files stay."""
    target = Path(root) / "target"
    model, _ = sharded()
    sw.export(model, target, max_shard_bytes=20_000)
    on_rank_0(lambda: (target / "tokenizer.json").write_text("{}"))
    old = stored(target)
    other, _ = sharded(seed=1)
    assert "not empty" in refusal(lambda: sw.export(other, target))
    assert_same(stored(target), old)
    dist.barrier()
    sw.export(other, target, overwrite=True)
    assert sorted(p.name for p in target.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert_same(stored(target), without(full(other), "head.weight"))
    dist.barrier()
    with mock.patch.object(folder_module, "exchange", return_value=False):
        sw.export(model, target, overwrite=True)  # where names cannot be exchanged
    assert_same(stored(target), old)
    assert (target / "tokenizer.json").exists()
    on_rank_0((target / "folder").mkdir)
    assert "'folder'" in refusal(lambda: sw.export(other, target, overwrite=True))
    assert "is a file" in refusal(lambda: sw.export(other, target / "tokenizer.json"))
    link, empty = Path(root) / "link", Path(root) / "empty"
    on_rank_0(lambda: (empty.mkdir(), link.symlink_to(empty)))
    sw.export(model, link)
    assert link.is_symlink()
    assert_same(stored(empty), old)
    assert not [p for p in Path(root).iterdir() if p.name.startswith(".")]


class TestFailures:
    def test_full_disk(self, two: Workers, tmp_path: Path) -> None:
        two.run(full_disk, str(tmp_path))

    def test_error_of_the_configuration(self, two: Workers, tmp_path: Path) -> None:
        two.run(broken_config, str(tmp_path))

    def test_existing_target(self, two: Workers, tmp_path: Path) -> None:
        two.run(existing_target, str(tmp_path))

    def test_killed(self, one: Workers, tmp_path: Path) -> None:
        """At any moment the target is absent, or whole; the next export clears up."""
        target, doomed = tmp_path / "target", Workers(1)
        with pytest.raises(WorkerError, match="no answer"):
            doomed.run(export_and_die, str(target), "in the middle")
        assert not target.exists()
        assert [p.name for p in tmp_path.iterdir()] == [".target.partial"]
        (old,) = one.run(export_plainly, str(target), 0)
        assert [p.name for p in tmp_path.iterdir()] == ["target"]
        for moment in ("before it shows", "after it shows"):
            with pytest.raises(WorkerError, match="no answer"):
                doomed.run(export_and_die, str(target), moment)
            is_old = digest(stored(target)) == old
            assert is_old == (moment == "before it shows")
        (new,) = one.run(export_plainly, str(target), 1, True)
        assert digest(stored(target)) == new != old
        assert [p.name for p in tmp_path.iterdir()] == ["target"]


# --- transformers -----------------------------------------------------------------------------


def tiny(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=16,
            bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=101, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def export_tiny(root: str) -> None:
    """Trained a step, written in float32 and in bfloat16, and read again from transformers' files."""
    for kind in ("gpt2", "llama"):
        model = tiny(kind)
        theirs = Path(root) / f"theirs_{kind}"
        on_rank_0(lambda m=model, p=theirs: m.save_pretrained(p, max_shard_size="30KB"))
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = adamw(model)
        sw.shard(model, optimizer, small(sw.presets.zero3()), timeout_s=LIMIT_S)
        tokens = mine(torch.arange(16).view(2, 8))[0]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        sw.export(model, Path(root) / kind)
        sw.save(Path(root) / f"{kind}_run" / "step-1", model, optimizer)
        sw.export(model, Path(root) / f"{kind}_bf16", dtype=torch.bfloat16, max_shard_bytes=30_000)
        assert model.config.dtype is not torch.bfloat16
        trained = full(model)
        on_rank_0(lambda k=kind, t=trained: torch.save(t, Path(root) / f"{k}.pt"))
        with sw.deferred_init():
            late = tiny(kind)
        sw.shard(late, plan=small(sw.presets.zero1()), timeout_s=LIMIT_S)
        sw.load_pretrained(late, theirs)
        assert_same(full(late), initial)


class TestTransformers:
    def test_reads_and_is_read(self, two: Workers, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        two.run(export_tiny, str(tmp_path))
        for kind in ("gpt2", "llama"):
            expected = torch.load(tmp_path / f"{kind}.pt")
            run, out = str(tmp_path / f"{kind}_run"), str(tmp_path / f"{kind}_exported")
            assert not CliRunner().invoke(app, ["export", run, out]).exception
            written = ((kind, torch.float32), (f"{kind}_bf16", torch.bfloat16))
            for name, dtype in (*written, (f"{kind}_exported", torch.float32)):
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    tmp_path / name, output_loading_info=True
                )
                assert not any(info.values()), info
                assert type(model) is type(tiny(kind))
                assert model.dtype == dtype
                assert model.config.architectures == [type(model).__name__]
                assert_same(model.state_dict(), {n: t.to(dtype) for n, t in expected.items()})
            assert (tmp_path / f"{kind}_bf16" / INDEX).exists()


# --- the command ------------------------------------------------------------------------------


def test_inspect(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.int8), "c": torch.ones(())}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    answer = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).output)
    assert answer == {
        "path": str(tmp_path),
        "files": ["model.safetensors"],
        "tensors": 3,
        "parameters": 11,
        "bytes": 32,
        "dtypes": {
            "F32": {"tensors": 2, "parameters": 7, "bytes": 28},
            "I8": {"tensors": 1, "parameters": 4, "bytes": 4},
        },
        "largest": [
            {"name": "a", "dtype": "F32", "shape": [2, 3], "bytes": 24},
            {"name": "b", "dtype": "I8", "shape": [4], "bytes": 4},
            {"name": "c", "dtype": "F32", "shape": [], "bytes": 4},
        ],
        "metadata": {"format": "pt"},
    }
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert shown.exit_code == 0
    for word in ("F32", "I8", "total", "2 × 3", "scalar", "32 B"):
        assert word in shown.output, shown.output
    path.write_bytes(b"no header here")
    refused = CliRunner().invoke(app, ["inspect", str(path)])
    assert isinstance(refused.exception, sw.UsageError)
    assert "not a complete safetensors file" in str(refused.exception)
