"""`shardwise bench cluster` for real: bytes as planned, and a clean end however it comes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shardwise.bench import report
from shardwise.bench.cluster import Cluster, Rate, list_namespaces
from shardwise.bench.jobs import Job, processors_of
from shardwise.bench.messages import Build, Setting
from shardwise.bench.run import HEADER_BYTES, ClusterBench, RateResult, Result, Row
from shardwise.cli.main import app
from shardwise.core.errors import UsageError
from shardwise.train.launch import WorkerError

SMALL = ["bench", "cluster", "--nodes", "2", "--ranks", "1", "--rate", "100mbit", "--model", "gpt-tiny",
         "--seq", "16", "--dtype", "float32"]  # fmt: skip


def test_the_kernel_counts_what_the_plan_says(real_network: None, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *SMALL, "--plans", "zero3,ddp", "--peers", "fsdp2",
         "--steps", "2", "--rounds", "2", "--json", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "cluster.json").read_text()) == answer
    ElementTree.parse(tmp_path / "out" / "cluster.svg")
    rows = {row["name"]: row for row in answer["rates"][0]["contenders"]}
    assert set(rows) == {"torch-fsdp2", "zero3", "ddp"}
    for name in ("zero3", "ddp"):
        row = rows[name]
        for payload in row["payload_bytes_per_step"]:
            assert payload == pytest.approx(row["predicted_bytes_per_step"], rel=0.05)
        for sent in row["sent_bytes_per_step"]:
            assert sent == pytest.approx(row["predicted_bytes_per_step"], rel=0.1)  # headers
        assert row["ratio_to_best_peer"] > 0
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows["torch-fsdp2"]["loss"], rel=1e-3)
        # 100 Mbit/s are 12.5 MB/s; the bucket may let a burst through before.
        assert min(row["seconds_per_step"]) > 0.8 * max(row["sent_bytes_per_step"]) / 12.5e6


def test_a_killed_rank_is_told_in_one_sentence(real_network: None) -> None:
    with Cluster(2) as cluster:
        job = Job(cluster, "job", sys.executable, ranks_per_node=1, number=0)
        job.wait_until_started()
        inside = _inside(cluster.name)
        assert len(inside) == 4  # torchrun and a rank in each node
        os.kill(max(inside), signal.SIGKILL)
        with pytest.raises(WorkerError) as failure:
            job.ask(Build("zero3", Setting()))
        job.close()
    told = re.fullmatch(
        r"rank \d on node \d was stopped by SIGKILL \(logs in (.*)\)", str(failure.value)
    )
    assert told
    shutil.rmtree(told[1])
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


def test_an_environment_that_lacks_something_is_told(real_network: None, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ImportError: no x\nChildFailedError: one" >&2; exit 1\n')
    python.chmod(0o755)
    with Cluster(2) as cluster:
        job = Job(cluster, "job", str(python), ranks_per_node=1, number=0)
        with pytest.raises(WorkerError) as failure:
            job.wait_until_started()
        job.close()
    told = re.fullmatch(
        r"torchrun ended before its ranks started: ImportError: no x \(logs in (.*)\)",
        str(failure.value),
    )
    assert told
    shutil.rmtree(told[1])


def test_nodes_apart_have_processors_of_their_own(real_network: None) -> None:
    allowed = os.sched_getaffinity(0)
    with Cluster(2) as cluster:
        job = Job(cluster, "job", sys.executable, ranks_per_node=1, number=0, apart=True)
        try:
            job.wait_until_started()
            found = [os.sched_getaffinity(rank.hello.pid) for rank in job._ranks]
            assert found == [processors_of(node, 2, allowed) for node in range(2)]
            assert os.sched_getaffinity(0) == allowed
            job.leave()
        finally:
            job.close()


def test_ctrl_c_takes_the_cluster_down(real_network: None) -> None:
    command = [sys.executable, "-m", "shardwise", *SMALL, "--plans", "zero3", "--peers", ""]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        assert bench.stderr.readline().startswith("cluster of 2 nodes")
        name = f"swbench-{bench.pid}-"
        while len(inside := _inside(name)) < 2:
            time.sleep(0.05)
        bench.send_signal(signal.SIGINT)
        _, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert errors.strip().splitlines()[-1] == "error: interrupted; the cluster is removed"
    assert not [left for left in list_namespaces() if left.startswith(name)]
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rate", "fast"], "'fast' is not a rate"),
        (["--latency", "5"], "'5' is not a latency"),
        (["--dtype", "int8"], "--dtype int8 is not supported"),
    ],
)
def test_mistakes_are_told_before_anything_starts(options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["bench", "cluster", *options])
    assert isinstance(done.exception, UsageError)
    assert sentence in str(done.exception)


def test_not_root_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["bench", "cluster"])
    assert "only root may create network namespaces" in str(done.exception)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peers": ("megatron",)}, "there is no peer 'megatron'"),
        ({"plans": ("zero3", "zero3")}, "zero3 is given twice"),
        ({"plans": ()}, "nothing to compare"),
        ({"steps": 0}, "steps must be at least 1"),
    ],
)
def test_benches_that_cannot_be(changes: dict, sentence: str) -> None:
    given = {"rates": (Rate(None),), "plans": ("zero3",)} | changes
    with pytest.raises(UsageError, match=sentence):
        ClusterBench(**given)


def test_the_report_compares_round_by_round() -> None:
    result = _result()
    answer = report.to_dict(result)
    zero3 = answer["rates"][0]["contenders"][1]
    assert zero3["median_s"] == 2.0
    assert zero3["ratio_to_best_peer"] == 0.5
    assert zero3["payload_bytes_per_step"] == [1e6, 1e6 - HEADER_BYTES]
    assert zero3["payload_to_predicted"] == 1.0
    console = Console(record=True, width=80)
    report.print_tables(result, console)
    text = console.export_text()
    for part in ("link 100mbit", "torch-fsdp2", "zero3", "1.000", "a remark", "not installed"):
        assert part in text
    assert "…" not in text  # nothing is cut off at 80 columns


def _result() -> Result:
    rate = Rate.parse("100mbit")
    bench = ClusterBench(rates=(rate,), plans=("zero3",), peers=("fsdp2", "deepspeed"))
    peer = Row(
        "torch-fsdp2", None, [4.0, 4.0, 40.0], 1.5, 1, {0: 300, 1: 300}, {0: 1, 1: 1}, {0: 3, 1: 3}
    )
    sent = 1_000_000 + 10 * HEADER_BYTES
    ours = Row(
        "zero3",
        1_000_000,
        [2.0, 1.0, 20.0],
        1.5,
        1,
        {0: sent, 1: sent},
        {0: 10, 1: 11},
        {0: 0, 1: 0},
    )
    remarks, absent = ["a remark"], {"deepspeed": "not installed"}
    return Result(bench, absent, remarks, [RateResult(rate, [peer, ours])])


def _inside(name: str) -> list[int]:
    """The processes in the namespaces whose names start so."""
    found: list[int] = []
    for namespace in list_namespaces():
        if namespace.startswith(name):
            listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True)
            found += map(int, listed.stdout.split())
    return found
