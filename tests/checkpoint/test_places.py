"""Where checkpoints are: none that is needed is removed, whatever ends a process, and when."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.training import appender, place


class Killed(BaseException):
    """Nothing is cleaned up after it."""


def save(path: Path, value: float = 0.0) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    sw.save(path, sw.shard(model))


def value_in(path: Path) -> float:
    model = sw.shard(torch.nn.Linear(2, 1, bias=False))
    sw.load(path, model)
    return float(sw.state_dict(model)["weight"][0, 0])


def test_rotation_keeps_what_a_run_saved_after_it_went_back(tmp_path: Path) -> None:
    for step in (10, 20, 90, 100):
        save(tmp_path / f"step-{step}", step)
    save(tmp_path / "step-30", 30)  # resumed from step-20
    assert [path.name for path in place.rotate(tmp_path, 1)] == ["step-10", "step-20"]
    assert place.find(tmp_path).name == "step-30"
    save(tmp_path / "step-40", 40)
    assert [path.name for path in place.rotate(tmp_path, 1)] == ["step-30"]
    assert value_in(tmp_path) == 40


@pytest.mark.parametrize("renames", [1, 2])
def test_killed_while_it_replaces_on_a_system_without_exchange(
    tmp_path: Path, renames: int
) -> None:
    """As NFS is: two renames, and something has the name's place at any instant."""
    path, rename, done = tmp_path / "best", os.rename, []

    def renamed(*args: Path) -> None:
        if len(done) == renames:
            raise Killed
        done.append(rename(*args))

    def killed(*_: object) -> None:
        raise Killed

    save(path, 1)
    with mock.patch.object(place, "exchange", return_value=False):
        with (
            mock.patch("os.rename", renamed),
            mock.patch.object(place.Target, "discard"),
            mock.patch("shutil.rmtree", killed),
            pytest.raises(Killed),
        ):
            save(path, 2)
        assert value_in(path) == renames
        save(path, 3)
        save(path, 4)
    assert value_in(path) == 4
    assert os.listdir(tmp_path) == ["best"]


def test_a_failed_replacement_leaves_the_old_one(tmp_path: Path) -> None:
    path, rename, done = tmp_path / "best", os.rename, []

    def renamed(*args: Path) -> None:
        done.append(args)
        if len(done) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(*args)

    save(path, 1)
    with (
        mock.patch.object(place, "exchange", return_value=False),
        mock.patch("os.rename", renamed),
        pytest.raises(sw.UsageError, match="Input/output error"),
    ):
        save(path, 2)
    assert value_in(path) == 1
    assert os.listdir(tmp_path) == ["best"]


@pytest.mark.parametrize("folder", [False, True])
def test_nothing_of_others_is_removed_with_a_checkpoint(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "best"
    save(path, 1)
    other = path / "tokenizer"
    other.mkdir() if folder else other.write_text("of the user")
    with pytest.raises(sw.UsageError, match="has 'tokenizer' beside its checkpoint"):
        save(path, 2)
    assert other.exists()
    assert value_in(path) == 1


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    """So that the trainer passes over it to the checkpoint before."""
    save(tmp_path / "step-1")
    save(tmp_path / "step-2")
    (tmp_path / "step-2/__0_0.distcp").unlink()
    with pytest.raises(sw.UsageError, match=r"is damaged: its file .* is missing.*before it is"):
        value_in(tmp_path)


def test_direct_writes_that_are_refused_go_through_the_page_cache(tmp_path: Path) -> None:
    write, direct = os.pwrite, []

    def refused(file: int, data: memoryview, offset: int) -> int:
        if file == direct[0]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, data, offset)

    data = os.urandom((4 << 20) + 5)
    new = appender.Appender(tmp_path / "file")
    if new._direct == new._file:
        pytest.skip("no direct I/O here")
    direct.append(new._direct)
    with mock.patch("os.pwrite", refused):
        new.write(data)
        new.sync()
    new.close()
    assert (tmp_path / "file").read_bytes() == data


def test_parameters_without_elements(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.none = torch.nn.Parameter(torch.empty(0, 2))

    model = Model()
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()))
    sw.save(tmp_path / "a", model, optimizer)
    assert sw.load(tmp_path / "a", model, optimizer).missing == ()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_buffer_that_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(sw.UsageError, match=r"'model\.odd' is a tensor of .* persistent=False"):
        sw.save(tmp_path / "a", sw.shard(model))
    assert os.listdir(tmp_path) == []
