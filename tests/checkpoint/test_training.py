"""Training checkpoints: a resumed run goes on with the same bits, and nothing is half written."""

import errno
import json
import os
import random
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint.training import index as index_module
from shardwise.checkpoint.training import place
from shardwise.checkpoint.training.index import INDEX_FILE, METADATA_FILE, Index
from shardwise.checkpoint.training.verify import faults
from tests.checkpoint.runs import HALF, PURE, Run, assert_equal, plan_of
from tests.checkpoint.test_export import on_rank_0, refusal
from tests.harness import Workers
from tests.models import TinyGPT, UntiedGPT, adamw, make
from tests.runtime.support import sgd, small

EXACT = ["hsdp", "amsp", "zeropp", "lean", "infinity", "tiled", "feedback"]


# --- the same plan and world ------------------------------------------------------------------


def goes_on(root: str, name: str, **changes) -> None:
    """Saved after two steps and loaded into a fresh model: the next steps have the same bits."""
    plan = plan_of(name, root)
    settings = {"precision": plan.precision, **changes}
    dtype = torch.float32 if "precision" in changes else torch.float64
    kind = settings.pop("optimizer", adamw)
    plan = small(plan, **settings)
    run = Run(plan, dtype=dtype, optimizer=kind)
    run.steps(0, 1)
    folder = Path(root) / f"{name}-2"
    run.save(folder, step=2, extra={"at": (1, 2)})
    random_numbers = random.random(), np.random.rand()
    values, seen, losses = run.values(), int(run.model.seen), run.steps(2, 3)
    run.end()
    again = Run(plan, seed=1, dtype=dtype, optimizer=kind)
    again.step(7)
    found = again.load(folder)
    assert (random.random(), np.random.rand()) == random_numbers
    assert (found.step, found.extra, found.notes) == (2, {"at": (1, 2)}, ())
    assert found.world == dist.get_world_size()
    assert_equal(again.values(), values, name)
    assert int(again.model.seen) == seen
    assert again.steps(2, 3) == losses, name
    again.end()


def go_on(root: str, names: list[str]) -> None:
    for name in names:
        goes_on(root, name)


class TestSamePlan:
    def test_one_rank(self, one: Workers, tmp_path: Path) -> None:
        one.run(go_on, str(tmp_path), ["zero3", "tiled infinity"])

    def test_two_ranks(self, two: Workers, tmp_path: Path) -> None:
        two.run(go_on, str(tmp_path), ["zero1", "optim on disk"])

    def test_four_ranks(self, four: Workers, tmp_path: Path) -> None:
        four.run(go_on, str(tmp_path), EXACT)

    def test_precisions(self, two: Workers, tmp_path: Path) -> None:
        """Masters in float32 beside bfloat16, or no others."""
        for name, precision in (
            ("zero3", PURE),
            ("lean", HALF),
            ("lean", PURE),
            ("infinity", HALF),
        ):
            folder = tmp_path / f"{name}-{precision.master}"
            folder.mkdir()
            two.run(goes_on, str(folder), name, precision=precision)

    def test_another_optimizer(self, two: Workers, tmp_path: Path) -> None:
        two.run(goes_on, str(tmp_path), "amsp", optimizer=sgd)


# --- what does not fit ------------------------------------------------------------------------


def misfits(root: str) -> None:
    """Everything that does not fit is listed, and nothing is loaded."""
    run = Run(plan_of("zero3"), kind=TinyGPT)
    run.step(0)
    path = Path(root) / "gpt"
    run.save(path)
    other = Run(plan_of("zero1"), kind=UntiedGPT)
    before = other.values()
    message = refusal(lambda: sw.load(path, other.model))
    for part in (
        "missing in it: 'head.bias'",
        "'blocks.2.up.weight', and 6 more",
        "or pass strict=False",
    ):
        assert part in message, message
    message = refusal(lambda: other.load(path))
    assert "its optimizer does not have 'head.bias', 'head.weight'" in message, message
    wide = Run(plan_of("zero3"), kind=TinyGPT, dim=32)
    message = refusal(lambda: wide.load(path, strict=False))
    assert "'embed.weight' has shape [37, 24] instead of [37, 32]" in message, message
    assert "missing" not in message
    assert_equal(other.values(), before)
    found = sw.load(path, other.model, strict=False)
    assert found.missing == ("head.bias",)
    assert "position.weight" in found.unexpected
    after, saved = other.values(), run.values()
    assert torch.equal(after["False.blocks.0.up.weight"], saved["False.blocks.0.up.weight"])
    assert torch.equal(after["False.head.bias"], before["False.head.bias"])
    assert torch.equal(after["False.head.weight"], saved["False.embed.weight"])
    plain = sw.shard(make(TinyGPT), plan=plan_of("zero3"))
    sw.save(Path(root) / "weights", plain)
    message = refusal(lambda: run.load(Path(root) / "weights"))
    assert "it has no optimizer's state (load without the optimizer)" in message
    assert "it has no scheduler's state" in message
    run_sgd = Run(plan_of("zero3"), kind=TinyGPT, optimizer=sgd)
    assert "its optimizer is AdamW, not SGD" in refusal(lambda: run_sgd.load(path))
    assert "There is no checkpoint" in refusal(lambda: run.load(Path(root) / "absent"))
    message = refusal(lambda: run.save(path, extra={"a": [object()]}))
    assert "extra['a'][0] has the type object, which a checkpoint cannot keep" in message
    on_rank_0(lambda: (Path(root) / "file").write_text(""))
    assert "is a file" in refusal(lambda: run.save(Path(root) / "file"))
    on_rank_0(lambda: ((Path(root) / "mine").mkdir(), (Path(root) / "mine" / "a").write_text("")))
    assert "not empty" in refusal(lambda: run.save(Path(root) / "mine"))
    with sw.no_sync(run.model):
        run.model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    assert "after optimizer.step()" in refusal(lambda: run.save(path))


def other_setting(root: str) -> None:
    """Under another plan error feedback is dropped, and the note says so once."""
    run = Run(plan_of("feedback"))
    run.steps(0, 1)
    run.save(Path(root) / "a")
    other = Run(plan_of("zero3"), seed=1)
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="error feedback of lossy wires was dropped"):
            found = other.load(Path(root) / "a")
    else:
        found = other.load(Path(root) / "a")
    assert len(found.notes) == 1


class TestMisfits:
    def test_all_are_listed(self, two: Workers, tmp_path: Path) -> None:
        two.run(misfits, str(tmp_path))

    def test_another_plan_drops_feedback(self, four: Workers, tmp_path: Path) -> None:
        four.run(other_setting, str(tmp_path))


# --- damage -----------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def damaged(root: str) -> None:
    """A damaged chunk is named with its file and tensor, and the checkpoint before it is offered."""
    run = Run(plan_of("zero3"))
    for number in (1, 2):
        run.step(number)
        run.save(Path(root) / f"step-{number}", step=number)
    last = Path(root) / "step-2"
    assert (Path(root) / "latest").read_text() == "step-2\n"
    assert faults(last) == []
    index = Index.from_bytes((last / INDEX_FILE).read_bytes())
    name = "optim.state.blocks.0.up.weight.exp_avg"
    chunk = index.tensors[name].chunks[0]
    file = last / index.files[chunk.file].name
    dist.barrier()
    on_rank_0(lambda: flip(file, chunk.data + 8, 3))
    message = refusal(lambda: run.load(root))
    assert f"'{file}' is damaged between bytes {chunk.data} and" in message, message
    assert f"which are part of '{name}'" in message
    assert f"The checkpoint before it is '{Path(root) / 'step-1'}'" in message
    dist.barrier()
    on_rank_0(lambda: flip(file, chunk.data + 8, 3))
    assert run.load(root).step == 2
    dist.barrier()
    on_rank_0(lambda: os.truncate(file, file.stat().st_size - 1))
    assert "is damaged: it has" in refusal(lambda: run.load(root))
    assert run.load(Path(root) / "step-1").step == 1
    run.steps(2, 3)


def failing(root: str) -> None:
    """A full disk on one rank is one sentence on all; nothing is left, and training goes on."""
    run = Run(plan_of("amsp"))
    run.step(0)
    run.save(Path(root) / "step-1")
    write, rank = os.pwrite, dist.get_rank()

    def no_space(*args) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for culprit in (0, 1):
        with mock.patch("os.pwrite", no_space if rank == culprit else write):
            message = refusal(lambda: run.save(Path(root) / "step-2"))
        assert "ran out of disk space" in message, message
        assert f"Rank {culprit}" in message
        dist.barrier()
        assert sorted(os.listdir(root)) == ["latest", "step-1"]
        dist.barrier()
    usage = mock.Mock(free=1000)
    with mock.patch("shutil.disk_usage", return_value=usage):
        message = refusal(lambda: run.save(Path(root) / "step-2"))
    assert "1000 are free" in message or "ran out of disk space" in message
    run.step(1)
    run.save(Path(root) / "step-1", step=5)  # replaces the older one of this name
    assert run.load(Path(root) / "step-1").step == 5
    assert sorted(os.listdir(root)) == ["latest", "step-1"]


def save_small(root: str) -> None:
    model = torch.nn.Linear(3, 2)
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sw.save(Path(root) / "a", model, optimizer, extra={"b": (1, 2.5)})


def hostile(root: str) -> None:
    """Names in an index cannot leave the folder, and nothing in it is executed."""
    model = torch.nn.Linear(3, 2)
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()))
    path = Path(root) / "a"
    sw.save(path, model, optimizer)
    encoded = (path / INDEX_FILE).read_bytes().partition(b"\n")[2]
    body = json.loads(encoded)
    for change in (
        lambda b: b["files"][0].__setitem__(0, "../x"),
        lambda b: b["files"][0].__setitem__(0, "/etc/passwd"),
        lambda b: b["files"][0].__setitem__(0, ".."),
        lambda b: b["files"][0].__setitem__(1, -1),
        lambda b: b["extents"][0].__setitem__(0, "a/b"),
        lambda b: b["tensors"]["model.weight"].__setitem__(0, "object"),
        lambda b: b["tensors"]["model.weight"].__setitem__(1, [1 << 40, 1 << 40]),
        lambda b: b["tensors"]["model.weight"][2][0].__setitem__(2, 1 << 60),
        lambda b: b["tensors"]["model.weight"][2][0].__setitem__(0, 7),
        lambda b: b["tensors"]["model.weight"][2][0].__setitem__(5, 1 << 60),
        lambda b: b["aliases"].__setitem__("model.x", "model.y"),
        lambda b: b.pop("values"),
        lambda b: b.__setitem__("tensors", []),
    ):
        changed = json.loads(json.dumps(body))
        change(changed)
        data = json.dumps(changed).encode()
        (path / INDEX_FILE).write_bytes(index_module._first_line(data) + data)
        with pytest.raises(sw.UsageError, match=r"shardwise\.json' is damaged"):
            sw.load(path, model, optimizer)
    (path / INDEX_FILE).write_bytes(index_module._first_line(encoded) + encoded)
    (path / METADATA_FILE).write_bytes(
        b"cos\nsystem\n(S'touch " + str(path).encode() + b"/ran'\ntR."
    )
    sw.load(path, model, optimizer)
    assert not (path / "ran").exists()
    assert faults(path) == [f"'{path / METADATA_FILE}' is damaged."]
    outside = Path(root) / "outside"
    data = path / "__0_0.distcp"
    data.rename(outside)
    data.symlink_to(outside)
    with pytest.raises(sw.UsageError):
        sw.load(path, model, optimizer)


def every_flip(root: str, step: int) -> int:
    """How many flipped bits were looked for; each must be found, and each truncation."""
    path, tried = Path(root) / "a", 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), step):
            changed = bytearray(whole)
            changed[at] ^= 1 << (at // step) % 8
            file.write_bytes(changed)
            assert faults(path), (file.name, at)
            tried += 1
        for length in range(0, len(whole), len(whole) // 40):
            file.write_bytes(whole[:length])
            assert faults(path), (file.name, length)
        file.write_bytes(whole + b"\0")
        assert faults(path), file.name
        file.write_bytes(whole)
    assert faults(path) == []
    return tried


class TestDamage:
    def test_is_named(self, two: Workers, tmp_path: Path) -> None:
        two.run(damaged, str(tmp_path))

    def test_of_every_byte_is_found(self, one: Workers, tmp_path: Path) -> None:
        one.run(save_small, str(tmp_path))
        assert every_flip(str(tmp_path), 41) > 1000

    def test_cannot_execute_or_leave_the_folder(self, one: Workers, tmp_path: Path) -> None:
        one.run(hostile, str(tmp_path))


def killed(root: str) -> None:
    """Killed at any call that changes the disk: the last whole checkpoint is found and sound."""
    model = torch.nn.Linear(30, 200)
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()))
    folder = Path(root)
    sw.save(folder / "step-1", model, optimizer, step=1)
    outcomes = []
    for calls in range(40):
        if not (child := os.fork()):
            _save_and_die(folder / "step-2", model, optimizer, calls)
        _, status = os.waitpid(child, 0)
        found = place.find(folder)
        assert faults(found) == []
        step = sw.load(folder, model, optimizer).step
        assert found == folder / f"step-{step}"
        outcomes.append(step)
        if not os.WIFSIGNALED(status):
            break
    assert outcomes[-1] == 2, outcomes
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes)
    sw.save(folder / "step-3", model, optimizer, step=3)
    assert sorted(os.listdir(root)) == ["latest", "step-1", "step-2", "step-3"]


def _save_and_die(path: Path, model, optimizer, calls: int) -> None:
    left = [calls]

    def counted(call):
        def patched(*args, **kwargs):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)

        return patched

    for name in ("open", "pwrite", "fsync", "rename", "replace", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    sw.save(path, model, optimizer, step=2)
    os._exit(0)


class TestFailures:
    def test_full_disk_on_one_rank(self, two: Workers, tmp_path: Path) -> None:
        two.run(failing, str(tmp_path))

    def test_killed(self, one: Workers, tmp_path: Path) -> None:
        one.run(killed, str(tmp_path))
