"""Ranks that fail are noticed in time, named once, and the others end: hearts without a model.

All cases run at once, each with three processes of a tenth of a second (``beating.py``).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from shardwise.bench.cluster import Cluster
from shardwise.comm import alive, watch
from shardwise.core.flight import read_folder
from tests.bench.conftest import real_network  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
WORLD = 3
TIMEOUT_S = 2.0
SLACK_S = 6.0
"""A busy machine starts and ends processes slowly."""


@dataclass
class Case:
    how: str
    failing: str
    kind: str | None
    """What the report says; None: there is none."""
    words: str = ""
    forked: bool = False
    """Whether ranks are forks of ``multiprocessing``, as a notebook's are."""
    files: int = 0
    """How many files each rank has open."""


CASES = {
    "killed": Case("kill", "1", "ended", "rank 1 ended without a word"),
    "the first is killed": Case("kill", "0", "ended", "rank 0 ended without a word"),
    "two are killed": Case("kill", "0,2", "ended", "ranks 0 and 2 ended"),
    "stopped": Case("stop", "1", "stopped", "rank 1 is stopped"),
    "the first is stopped": Case("stop", "0", "stopped", "rank 0 is stopped"),
    "two are stopped": Case("stop", "0,1", "stopped", "ranks 0 and 1 are stopped"),
    "an exception": Case("raise", "2", "raised", "rank 2 raised ZeroDivisionError: divided"),
    "left alone": Case("sync", "1", "stuck", "rank 1 gave up: SyncError: rank 0 waited for"),
    "vanished": Case("vanish", "1", "ended", "rank 1 ended without a word", files=1100),
    "preempted": Case("terminate", "0,1,2", None),
    "leaves": Case("leave", "1", None),
    "holds Python's lock": Case("hold", "1", None),
    "handles SIGTERM itself": Case("handle", "1", None),
    "a fork leaves": Case("leave", "1", None, forked=True),
    "an exception in a fork": Case("raise", "2", "raised", "rank 2 raised ZeroDiv", forked=True),
}


@dataclass
class Run:
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    ends_s: dict[int, float]
    """When each rank had ended, on the wall clock."""

    def said(self, rank: int) -> str:
        return (self.folder / f"out-{rank}").read_text()

    @property
    def code(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    @property
    def failed_s(self) -> float:
        return min(float(file.read_text()) for file in self.folder.glob("failed-*"))


def command(folder: Path, rank: int, world: int, how: str, failing: str) -> list[str]:
    program = str(Path(__file__).with_name("beating.py"))
    return [sys.executable, program, str(folder), str(rank), str(world), str(TIMEOUT_S), how, failing]  # fmt: skip


def start(folder: Path, case: Case) -> Run:
    folder.mkdir()
    processes = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["FILES"] = str(case.files)
    if case.forked:
        environment["FORKED"] = "1"
    for rank in range(WORLD):
        with (folder / f"out-{rank}").open("wb") as out:
            processes.append(
                subprocess.Popen(
                    command(folder, rank, WORLD, case.how, case.failing),
                    stdout=out,
                    stderr=out,
                    env=environment,
                )
            )
    return Run(folder, processes, {})


def collect(runs: list[Run], limit_s: float) -> None:
    """Waits until those have ended that can; ends the others."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        open_ones = 0
        for run in runs:
            for rank, process in enumerate(run.processes):
                if rank not in run.ends_s and process.poll() is not None:
                    run.ends_s[rank] = time.time()
            open_ones += len(run.ends_s) < len(run.processes)
        if not open_ones:
            break
        time.sleep(0.05)
    for run in runs:
        for process in run.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("hearts")
    found = {name: start(folder / name.replace(" ", "-"), case) for name, case in CASES.items()}
    try:
        collect(list(found.values()), 30.0)
        yield found
    finally:
        collect(list(found.values()), 0.0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind])
def test_a_failure_is_reported_once_and_in_time(name: str, runs: dict[str, Run]) -> None:
    case, run = CASES[name], runs[name]
    failing = {int(text) for text in case.failing.split(",")}
    living = set(range(WORLD)) - failing
    if case.kind in ("ended", "stopped"):  # nobody is left behind
        assert all(run.processes[rank].returncode in (0, -signal.SIGKILL) for rank in failing)
        assert set(run.ends_s) == set(range(WORLD))
    for rank in living:
        assert run.processes[rank].returncode == 1, run.said(rank)
        assert run.ends_s[rank] - run.failed_s < TIMEOUT_S + SLACK_S
    told = [rank for rank in range(WORLD) if "shardwise: " in run.said(rank)]
    speaker = min(living) if case.kind in ("ended", "stopped", "cut off") else 0
    assert told == [speaker]
    text = run.said(speaker)
    assert case.words in text
    assert any(f"in gather of unit 'blocks.{rank}'; " in text for rank in failing)
    (report_file,) = (run.folder / "run").glob("failure-*/report.json")
    report = json.loads(report_file.read_text())
    assert {cause["kind"] for cause in report["cause"]} == {case.kind}
    assert {cause["rank"] for cause in report["cause"]} == failing
    for rank in range(WORLD):  # also of those that were killed: others have their recorders
        assert report["ranks"][str(rank)]["doing"][0]["title"] == f"gather of unit 'blocks.{rank}'"
        assert report["ranks"][str(rank)]["step"] == "after step 7"
        if rank in living:
            assert "beating.py" in report["ranks"][str(rank)]["line"]
    flights = read_folder(report_file.parent)
    assert [flight.rank for flight in flights] == list(range(WORLD))


@pytest.mark.parametrize("name", ["an exception", "an exception in a fork"])
def test_only_what_began_it_shows_its_trace(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    assert ["Traceback" in run.said(rank) for rank in range(WORLD)] == [False, False, True]


@pytest.mark.parametrize(
    "name", ["leaves", "a fork leaves", "holds Python's lock", "handles SIGTERM itself"]
)
def test_no_alarm_for_a_rank_that_leaves_or_is_slow(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    assert run.code == [0] * WORLD
    assert "".join(map(run.said, range(WORLD))) == ""


def test_a_preempted_job_ends_by_its_signal(runs: dict[str, Run]) -> None:
    run = runs["preempted"]
    assert run.code == [-signal.SIGTERM] * WORLD
    assert "".join(map(run.said, range(WORLD))) == ""


def test_a_handler_of_the_program_stays() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        alive.on_sigterm(lambda: called.append(-1))
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        alive.on_sigterm(lambda: called.append(-1))
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM, -1]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("place", "goes_on"), [((0, 2), True), ((1, 2), False), ((0, 4), False)])
def test_a_heart_of_another_job_is_not_kept(place: tuple[int, int], goes_on: bool) -> None:
    """A process may join another process group, as another rank."""
    heart = mock.Mock(place=place, timeout_s=1.0)
    control = mock.Mock(world=2, rank=0, exchange_objects=lambda value: [value, True])
    with (
        mock.patch.object(alive, "current", return_value=heart),
        mock.patch.object(alive, "report_to"),
        mock.patch.object(alive, "leave", side_effect=InterruptedError) as leaves,
        nullcontext() if goes_on else pytest.raises(InterruptedError),
    ):
        watch.start(control, 7.0)
    assert leaves.called is not goes_on
    assert heart.timeout_s == (7.0 if goes_on else 1.0)


def test_nothing_is_left_in_shared_memory(runs: dict[str, Run]) -> None:
    pids = {process.pid for run in runs.values() for process in run.processes}
    mapped = [path for path in Path("/dev/shm").glob("shardwise-*.flight") if _maker(path) in pids]
    assert not mapped


def _maker(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[16:20], "little")


def test_a_node_that_is_cut_off_is_named_on_both_sides(
    real_network: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    with Cluster(2) as cluster:
        processes = []
        for rank in range(4):
            node = rank // 2
            (tmp_path / f"node{node}").mkdir(exist_ok=True)
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HOST": f"node{node}",
                "MASTER_ADDR": cluster.address(0),
            }
            with (tmp_path / f"out-{rank}").open("wb") as out:
                line = command(tmp_path, rank, 4, "nothing", "9")
                processes.append(cluster.start(node, line, environment, out))
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("beating-*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.cut(1)
        begin = time.monotonic()
        codes = [process.wait(20) for process in processes]
        seconds = time.monotonic() - begin
    said = [(tmp_path / f"out-{rank}").read_text() for rank in range(4)]
    assert codes == [1] * 4, said
    assert seconds < TIMEOUT_S + SLACK_S
    assert "shardwise: ranks 2 and 3 cannot be reached" in said[0]
    assert "shardwise: ranks 0 and 1 cannot be reached" in said[2]
    assert said[1] == said[3] == ""
