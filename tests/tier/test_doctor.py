"""`shardwise doctor`: the facts of a machine and a disk, and what is left on it."""

import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest

from shardwise.bench import cluster
from shardwise.cli.main import run
from shardwise.tier.folder import file_system, try_direct
from shardwise.tier.nvme import NvmeStore


def leave_folder(path: Path, name: str, **changes) -> Path:
    """What a killed process leaves."""
    note = {"kind": "shardwise run folder", "pid": 4321, "host": socket.gethostname(), "rank": 5}
    note |= {"started": time.time() - 7200, "bytes": 3 << 30, **changes}
    folder = path / name
    folder.mkdir()
    (folder / "owner.lock").touch()
    (folder / "owner.json").write_text(json.dumps(note))
    return folder


def answer(capsys, *arguments: str) -> dict:
    assert run(["doctor", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_facts_of_the_machine(capsys, monkeypatch):
    found = answer(capsys)
    assert set(found) == {"machine"}
    machine = found["machine"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert 0 < machine["memory_free_bytes"] <= machine["memory_bytes"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in answer(capsys)["machine"]["bench_cluster"]
    monkeypatch.setattr(cluster, "check_machine", lambda: None)
    assert answer(capsys)["machine"]["bench_cluster"] == "possible"
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("torch", "cores", "memory", "bfloat16 instructions", "bench cluster"):
        assert word in shown


def test_facts_of_a_disk(tmp_path, capsys):
    found = answer(capsys, str(tmp_path))
    disk = found["disk"]
    assert disk["direct"] is not bool(try_direct(tmp_path))
    assert disk["file_system"] == file_system(tmp_path) != ""
    assert 0 < disk["free_bytes"] < disk["total_bytes"]
    assert found["folders"] == found["removed"] == []
    assert list(tmp_path.iterdir()) == []  # it leaves nothing itself


def test_a_disk_without_direct_io(tmp_path, capsys, monkeypatch):
    real = os.pwritev

    def refuse(*args):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refuse)
    found = answer(capsys, str(tmp_path))["disk"]
    assert (found["direct"], found["obstacle"]) == (False, "Invalid argument")
    monkeypatch.setattr(os, "pwritev", lambda file, data, at: real(file, [bytes(4096)], at) and 0)
    assert try_direct(tmp_path) != ""


def test_folders_are_shown_and_only_cleaned_when_asked(tmp_path, capsys):
    stale = leave_folder(tmp_path, "shardwise-4321-00000001")
    leave_folder(tmp_path, "shardwise-4321-00000002", host="elsewhere")
    (tmp_path / "shardwise-4321-00000003").mkdir()
    (tmp_path / "data").mkdir()
    found = answer(capsys, str(tmp_path))
    states = {Path(folder["path"]).name: folder["state"] for folder in found["folders"]}
    assert states == {
        "shardwise-4321-00000001": "left behind",
        "shardwise-4321-00000002": "another host's",
        "shardwise-4321-00000003": "not ours",
    }
    left = found["folders"][0]
    assert (left["pid"], left["rank"], left["bytes"]) == (4321, 5, 3 << 30)
    assert 7200 <= left["age_s"] < 7300
    assert run(["doctor", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("left behind", "4321", "2:00:0", "3.22 GB", "--clean"):
        assert word in shown
    assert stale.exists()
    assert run(["doctor", str(tmp_path), "--clean"]) == 0
    assert f"removed {stale}" in capsys.readouterr().out.replace("\n", "")
    assert not stale.exists()
    assert answer(capsys, str(tmp_path), "--clean")["removed"] == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_running_store_is_in_use(tmp_path, capsys):
    store = NvmeStore(str(tmp_path), rank=7)
    [folder] = answer(capsys, str(tmp_path), "--clean")["folders"]
    assert (folder["state"], folder["pid"], folder["rank"]) == ("in use", os.getpid(), 7)
    store.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--clean"], "--clean needs a folder"), (["/nowhere/at/all"], "is not a folder")],
)
def test_mistakes_are_one_sentence(capsys, arguments, sentence):
    assert run(["doctor", *arguments]) == 2
    assert sentence in capsys.readouterr().err
