"""The examples run as they say."""

import re
import subprocess
import sys
from pathlib import Path

from tests.harness import free_port

ROOT = Path(__file__).parent.parent


def test_the_training_loop_learns():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
               f"--master-port={free_port()}", str(ROOT / "examples/train_loop.py")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0], losses


def test_the_resumed_loop_goes_on_under_another_plan(tmp_path):
    """Ended between two saves and started again on other ranks: the losses are those without a break."""

    def run(folder: str, ranks: int, steps: int, plan: str) -> dict[int, float]:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
                   "--master-addr=127.0.0.1", f"--master-port={free_port()}",
                   str(ROOT / "examples/resume.py"), str(tmp_path / folder), str(steps), plan]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-2000:]
        return {
            int(n): float(x) for n, x in re.findall(r"step +(\d+)  loss (\d+\.\d+)", done.stdout)
        }

    whole = run("whole", 1, 6, "zero3")
    first, then = run("run", 2, 4, "zero3"), run("run", 1, 6, "zero1")
    assert (list(first), list(then)) == ([0, 1, 2, 3], [3, 4, 5])
    for step, loss in (first | then).items():
        assert abs(loss - whole[step]) < 2e-3, (step, first, then, whole)


def test_the_benchmark_of_hops_runs(tmp_path):
    out = tmp_path / "hops.json"
    command = [sys.executable, str(ROOT / "benchmarks/hops.py"), "--numel", "4096", "--rounds", "1",
               "--json", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    ways = ("gloo collective", "point to point", "peers' memory")
    assert all(way in done.stdout for way in ways)
    assert out.exists()
