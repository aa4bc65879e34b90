"""Real workers: their answer, their failures, and that none is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.train import launch
from tests.train.processes import is_alive, wait_for

pytestmark = pytest.mark.timeout(240)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def entries_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def test_rank_zero_answers_and_the_launcher_is_left_as_it_was() -> None:
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    answer = launch.run("worker_entries:report", {"word": "hello"}, workers=2)
    assert answer["word"] == "hello"
    assert answer["sum"] == 2.0
    assert int(answer["threads"]) >= 1
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_failing_worker_is_told_once_with_its_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(launch.WorkerError) as caught:
        launch.run("worker_entries:fail", {"rank": 1, "how": "bug"}, workers=2, logs=tmp_path)
    trace = tmp_path / "error-rank1.txt"
    sentence = "rank 1: ZeroDivisionError: the loss was divided by nothing"
    assert str(caught.value) == f"{sentence} (stack trace in {trace})"
    assert "in fail" in trace.read_text()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_mistake_found_by_a_worker_stays_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"^this plan does not fit$"):
        launch.run("worker_entries:fail", {"rank": 0, "how": "mistake"}, workers=2)


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(launch.WorkerError, match=r"^rank 1 was killed \(SIGKILL\)"):
        launch.run("worker_entries:fail", {"rank": 1, "how": "kill"}, workers=2)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_launcher(
    end: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # one that is killed cannot tidy up
    command = [sys.executable, str(HERE / "worker_entries.py"), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            pids = [int(launcher.stdout.readline()) for _ in range(2)]
        finally:
            launcher.send_signal(end)
        code = launcher.wait(timeout=60)
    assert code == (-end if end == signal.SIGKILL else 128 + end)
    wait_for(lambda: not any(map(is_alive, pids)))


def test_threads_and_the_cure_for_unusable_amx(tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("flags : fpu avx512_bf16 amx_bf16 amx_tile\n")
    assert launch.rank_environment(10_000, cpu_info) == {
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    }
    cpu_info.write_text("flags : fpu avx2\n")
    cores = len(os.sched_getaffinity(0))
    assert launch.rank_environment(1, cpu_info) == {"OMP_NUM_THREADS": str(cores)}
