"""Saves beside training: what is saved is what was there, and a failure is told and loses nothing."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.checkpoint.training import contents
from shardwise.checkpoint.training.index import read_index
from shardwise.checkpoint.training.verify import faults
from tests.checkpoint.runs import Run, assert_equal, plan_of
from tests.checkpoint.test_export import refusal
from tests.harness import Workers

PAUSE_S = 0.002


@contextmanager
def slow(*, fails: bool = False, pause_s: float = PAUSE_S) -> Iterator[None]:
    """Other threads take their time to read shards, so that training overtakes them; writes fail."""
    read, write, main = contents.bytes_of, os.pwrite, threading.current_thread()

    def reads(tensor: torch.Tensor) -> memoryview:
        if threading.current_thread() is not main:
            assert threading.current_thread().name == "shardwise-save"
            time.sleep(pause_s)
        return read(tensor)

    def writes(*args) -> int:
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    with mock.patch.object(contents, "bytes_of", reads), mock.patch("os.pwrite", writes):
        yield


def beside(root: str, names: list[str]) -> None:
    """Training that goes on meanwhile is not in the checkpoint, and has the bits it always has."""
    for name in names:
        run = Run(plan_of(name, root))
        run.steps(0, 1)
        run.save(Path(root) / name)
        values, losses = run.values(), run.steps(2, 3)
        run.load(Path(root) / name)
        with slow():
            pending = run.save(Path(root) / f"{name}-beside", step=2, asynchronous=True)
            assert run.steps(2, 3) == losses, name
            pending.wait()
        assert faults(Path(root) / f"{name}-beside") == []
        again = Run(plan_of(name, root), seed=1)
        again.load(Path(root) / f"{name}-beside")
        assert_equal(again.values(), values, name)
        assert again.steps(2, 3) == losses, name
        run.end()
        again.end()


def written(root: str) -> None:
    """Values that the user writes meanwhile are not in the checkpoint either."""
    run = Run(plan_of("zero3"))
    run.step(0)
    values = run.values()
    with slow():
        pending = run.save(Path(root) / "a", asynchronous=True)
        with sw.full_params(run.model, write=True), torch.no_grad():
            run.model.norm.weight.fill_(7)
        pending.wait()
    assert not torch.equal(run.values()["False.norm.weight"], values["False.norm.weight"])
    run.load(Path(root) / "a")
    assert_equal(run.values(), values)


def told(root: str) -> None:
    """A failure on one rank is raised by the next step on all, and everything goes on as before."""
    run = Run(plan_of("amsp"))
    run.step(0)
    run.save(Path(root) / "step-1")
    expected = run.steps(1, 2, 3)
    run.load(Path(root) / "step-1")
    with slow(fails=dist.get_rank() == 1):
        pending = run.save(Path(root) / "step-2", asynchronous=True)
        pending._thread.join()
        message = refusal(lambda: run.step(1))
    assert "step-2' could not be saved: " in message, message
    assert "ran out of disk space" in message
    dist.barrier()
    assert sorted(os.listdir(root)) == ["latest", "step-1"]
    dist.barrier()
    run.optimizer.zero_grad()
    run.load(Path(root) / "step-1")  # the step that raised had drawn random numbers
    assert run.steps(1, 2) == expected[:2]
    with slow(fails=dist.get_rank() == 0):
        run.save(Path(root) / "step-3", asynchronous=True)
        message = refusal(lambda: run.save(Path(root) / "step-3"))
    assert "step-3' could not be saved" in message
    run.save(Path(root) / "step-3")
    assert run.step(3) == expected[2]
    assert faults(Path(root) / "step-3") == []


def adapters(root: str) -> None:
    """Trained parameters alone: small, and loaded over a model that has the rest."""
    run = Run(plan_of("zero3"))
    for name, parameter in run.model.named_parameters():
        assert parameter.requires_grad == (name != "blocks.1.up.weight")
    run.step(0)
    run.save(Path(root) / "all")
    run.save(Path(root) / "trained", only="trained")
    values = run.values()
    other = Run(plan_of("zero1"))  # the same frozen weights
    other.load(Path(root) / "trained")
    scale = "False.scale", "True.scale"
    expected = {name: value for name, value in values.items() if name not in scale}
    assert_equal({n: v for n, v in other.values().items() if n not in scale}, expected)
    assert "model.blocks.1.up.weight" not in read_index(Path(root) / "trained").tensors
    message = refusal(lambda: sw.save(Path(root) / "x", run.model, only="frozen"))
    assert "only='frozen' is not known" in message


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def has(folder: Path, values: dict[str, torch.Tensor]) -> bool:
    model = sw.shard(pair(), plan=sw.presets.zero1())
    sw.load(folder, model)
    return all(torch.equal(value, values[name]) for name, value in sw.state_dict(model).items())


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sw.state_dict(model).items()}


def test_an_optimizer_that_was_built_later_waits(tmp_path: Path) -> None:
    model = sw.shard(pair(), plan=sw.presets.zero1())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = values_of(model)
    with slow(pause_s=0.05):
        pending = sw.save(tmp_path / "a", model, optimizer, asynchronous=True)
        step(model, optimizer)
        pending.wait()
    assert has(tmp_path / "a", values)


def test_what_rests_in_full_is_written_after_it_was_read(tmp_path: Path) -> None:
    model = sw.shard(pair(), plan=sw.presets.zero1())
    values = values_of(model)
    with slow(pause_s=0.05):
        pending = sw.save(tmp_path / "a", model, asynchronous=True)
        with sw.full_params(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        pending.wait()
    assert has(tmp_path / "a", values)


def test_hooks_of_the_user_stay(tmp_path: Path) -> None:
    """A save that is over leaves the step's hooks while the step runs them."""
    model = pair()
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
    sw.save(tmp_path / "a", model, optimizer, asynchronous=True)._thread.join()
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    step(model, optimizer)
    step(model, optimizer)
    assert called == [1, 1]


class TestBeside:
    def test_two_ranks(self, two: Workers, tmp_path: Path) -> None:
        two.run(beside, str(tmp_path), ["infinity", "lean"])

    def test_written_meanwhile(self, two: Workers, tmp_path: Path) -> None:
        two.run(written, str(tmp_path))

    def test_failures_are_told(self, two: Workers, tmp_path: Path) -> None:
        two.run(told, str(tmp_path))

    def test_trained_parameters_alone(self, two: Workers, tmp_path: Path) -> None:
        two.run(adapters, str(tmp_path))
