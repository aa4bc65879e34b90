"""The emulated cluster: what it is asked for, what it refuses, and that it cleans up."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.bench import cluster as module
from shardwise.bench.cluster import (
    CONGESTION_CONTROL,
    INTERFACE,
    Cluster,
    ClusterError,
    Rate,
    check_machine,
    is_abandoned,
    list_namespaces,
    parse_latency_us,
    sweep,
)
from shardwise.core.errors import UsageError

HOLD = """
import sys, time
from shardwise.bench.cluster import Cluster, signals_raised
with signals_raised(), Cluster(2) as cluster:
    with open("/dev/null", "wb") as log:
        inside = cluster.start(1, ["sleep", "600"], {"PATH": "/usr/bin:/bin"}, log)
    print(cluster.name, inside.pid, flush=True)
    while True:
        time.sleep(0.1)  # a signal that comes just before a long sleep would wait for its end
"""


@pytest.mark.parametrize(
    ("text", "bits", "shown"),
    [("200mbit", 200_000_000, "200mbit"), ("1.5Gbit", 1_500_000_000, "1.5gbit"),
     ("64kbit", 64_000, "64kbit"), ("none", None, "none")],
)  # fmt: skip
def test_rates(text: str, bits: int | None, shown: str) -> None:
    assert Rate.parse(text).bits_per_s == bits
    assert str(Rate.parse(text)) == shown


@pytest.mark.parametrize("text", ["", "200", "fast", "-1mbit", "0mbit", "10mbyte", "1 gbit"])
def test_no_rates(text: str) -> None:
    with pytest.raises(UsageError, match="is not a rate: write 200mbit"):
        Rate.parse(text)


def test_latencies() -> None:
    assert [parse_latency_us(text) for text in ("0ms", "1.5ms", "300us", "1s")] == [
        0, 1500, 300, 1_000_000,
    ]  # fmt: skip
    with pytest.raises(UsageError, match="is not a latency"):
        parse_latency_us("5")


@pytest.mark.parametrize("nodes", [0, 1, 100])
def test_number_of_nodes(nodes: int) -> None:
    with pytest.raises(UsageError, match="2 to 99 nodes"):
        Cluster(nodes)


def test_only_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"only root .*: run it as root or with sudo"):
        check_machine()


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found: Callable[..., str | None] = lambda name, **_: None if name == missing else name  # noqa: E731
    monkeypatch.setattr(shutil, "which", found)
    with pytest.raises(ClusterError, match=f"no `{missing}` command: install iproute2"):
        check_machine()


def test_what_is_abandoned() -> None:
    mine = Cluster(2).name
    assert not is_abandoned(f"{mine}-n0")
    pid, start = mine.split("-")[1:3]
    assert is_abandoned(f"swbench-{pid}-{int(start) + 1}-abcdef-n0")  # another process of that id
    assert is_abandoned(f"swbench-4194999-{start}-abcdef-hub")  # beyond the largest id
    for foreign in ("swbench", "swbench-1-n0", "other-4194999-1-abcdef-n0", "swbench-x-1-abcdef"):
        assert not is_abandoned(foreign)


def test_a_refusal_of_the_kernel_is_one_sentence_and_leaves_nothing(
    real_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GSO_BYTES", -1)
    with pytest.raises(ClusterError, match=r"^the kernel refused `ip .*gso_max_size.*`: .+$"):
        Cluster(2).__enter__()


@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_reach_each_other_at_the_given_rate(real_network: None, nodes: int) -> None:
    with Cluster(nodes) as cluster:
        for rate in ("8mbit", "none", "16mbit"):
            cluster.shape(Rate.parse(rate))
        shaped = _inside(cluster, 0, "tc", "qdisc", "show", "dev", INTERFACE)
        assert "tbf" in shaped
        assert "rate 16Mbit" in shaped
        congestion = _inside(cluster, 0, "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
        assert congestion.strip() == CONGESTION_CONTROL
        answer = _inside(cluster, 0, sys.executable, "-c", _TALK, cluster.address(nodes - 1))
        sent, seconds = map(float, answer.split())
    assert sent == pytest.approx(1_000_000, rel=0.1)  # the kernel's counter
    assert seconds > 0.25  # 1 MB at 16 Mbit/s takes 0.5 s, less the bucket's burst of 256 KiB


_TALK = f"""
import socket, sys, time
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
counter = "/sys/class/net/{INTERFACE}/statistics/tx_bytes"
def count(): return int(open(counter).read())
before, begin = count(), time.monotonic()
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(1000):
    sender.sendto(bytes(958), (sys.argv[1], 9))  # with headers 1000 bytes; nobody listens
    while count() - before < (_ - 100) * 1000:  # no more than 100 packets wait in the bucket
        time.sleep(0.001)
while count() - before < 990_000: time.sleep(0.001)
print(count() - before, time.monotonic() - begin)
"""


def _inside(cluster: Cluster, node: int, *command: str) -> str:
    with (cluster.directory / "log").open("wb") as log:
        process = cluster.start(node, command, dict(os.environ), log)
        process.wait(30)
    return (cluster.directory / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_takes_everything_down(real_network: None, number: signal.Signals) -> None:
    owner, name, inside = _hold()
    owner.send_signal(number)
    assert owner.wait(20) != 0
    assert not [left for left in list_namespaces() if left.startswith(name)]
    assert not Path(f"/proc/{inside}").exists()
    assert not (Path(module.tempfile.gettempdir()) / name).exists()


def test_what_a_killed_run_left_is_swept_and_nothing_else(real_network: None) -> None:
    owner, name, inside = _hold()
    other, other_name, _ = _hold()
    owner.kill()
    owner.wait()
    _until(lambda: not Path(f"/proc/{inside}").exists())  # the kernel ended it with its parent
    assert [left for left in list_namespaces() if left.startswith(name)]
    sweep()
    assert not [left for left in list_namespaces() if left.startswith(name)]
    assert not (Path(module.tempfile.gettempdir()) / name).exists()
    assert [kept for kept in list_namespaces() if kept.startswith(other_name)]
    other.terminate()
    other.wait(20)


def _hold() -> tuple[subprocess.Popen[str], str, int]:
    """A process that holds a cluster with a process inside."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name, pid = owner.stdout.readline().split()
    return owner, name, int(pid)


def _until(is_done: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
