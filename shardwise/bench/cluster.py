"""A cluster with slow links on one machine: one network namespace per node, joined by shaped links.

Two nodes share one veth pair; more nodes are joined by a bridge in a separate namespace. Every
node's end of its link is called `slow0`, and a token bucket shapes both ends, so the kernel paces
what leaves a node, and the kernel's counters of that interface count it. Ranks of one node
communicate over the namespace's own loopback, which is not shaped.

[Note: Cleaning up]
The name of a namespace has the id and start time of the process that created it. `close` ends
every process inside a namespace before it removes it, and the links with it; it runs on every exit
that Python sees (`signals_raised` turns signals into exceptions). If a run is killed, the next run
removes its namespaces, but only if the name has this form and the owner has ended.

Imports no torch. Needs root, `ip` and `tc`.
"""

import contextlib
import ctypes
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from shardwise.core.errors import UsageError

INTERFACE = "slow0"
"""A node's end of its slow link, in the node's namespace."""
BURST_BYTES = 256 * 1024
QUEUE_MS = 200
"""How long a packet may wait at the token bucket before it is dropped."""
CONGESTION_CONTROL = "reno"
"""TCP's congestion control in all nodes, whatever the host uses; every kernel has it. With `bbr`,
ranks that share a link got unequal shares: at 50 Mbit/s a hop of 1 MB took up to 1.6 times as long
as others."""
GSO_BYTES = 16384
"""Larger super-packets would not fit into the bucket and would be dropped."""
MAX_NODES = 99
_NAME = re.compile(r"swbench-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{6}(-\w+)?")
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kmg]?)bit")
_LATENCY = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>us|ms|s)")
_UNIT_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_UNIT_US = {"us": 1, "ms": 10**3, "s": 10**6}
_ETC = Path("/etc/netns")
_PATIENCE_S = 3.0
_SYSTEM_PATHS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
_PR_SET_PDEATHSIG = 1
"""From the kernel's prctl.h."""


class ClusterError(UsageError):
    """The machine cannot emulate a cluster; the message tells why."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of a link; None: not limited."""

    bits_per_s: int | None

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """
        >>> Rate.parse("1.5gbit").bits_per_s
        1500000000
        >>> str(Rate.parse("none"))
        'none'
        """
        if text == "none":
            return cls(None)
        found = _RATE.fullmatch(text.lower())
        if not found or float(found["number"]) == 0:
            raise UsageError(f"{text!r} is not a rate: write 200mbit, 1.5gbit, 64kbit or none")
        return cls(round(float(found["number"]) * _UNIT_BITS[found["unit"]]))

    def __str__(self) -> str:
        if self.bits_per_s is None:
            return "none"
        for unit in ("g", "m", "k"):
            if self.bits_per_s >= _UNIT_BITS[unit]:
                return f"{self.bits_per_s / _UNIT_BITS[unit]:g}{unit}bit"
        return f"{self.bits_per_s}bit"


def parse_latency_us(text: str) -> int:
    """
    >>> parse_latency_us("1.5ms")
    1500
    """
    found = _LATENCY.fullmatch(text.lower())
    if not found:
        raise UsageError(f"{text!r} is not a latency: write 0ms, 1.5ms, 300us or 1s")
    return round(float(found["number"]) * _UNIT_US[found["unit"]])


class Cluster:
    """Namespaces and links, from `__enter__` to `__exit__`, and a directory for the run's files."""

    def __init__(self, nodes: int) -> None:
        if not 2 <= nodes <= MAX_NODES:
            raise UsageError(f"a cluster must have 2 to {MAX_NODES} nodes, not {nodes}")
        self.num_nodes = nodes
        self.name = f"swbench-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(3)}"
        self.directory = Path(tempfile.gettempdir()) / self.name
        self._namespaces: list[str] = []
        self._shaped = False
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        check_machine()
        sweep()
        try:
            self.directory.mkdir(mode=0o700)
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def address(self, node: int) -> str:
        """A node's address; all have equal length, as torchrun numbers nodes in string order."""
        return f"10.77.0.{100 + node}"

    def shape(self, rate: Rate, latency_us: int = 0) -> None:
        """Set the rate and one-way latency of all links, while no rank sends."""
        for node in range(self.num_nodes):
            for namespace, interface in self._ends(node):
                self._shape_end(namespace, interface, rate, latency_us)
        self._shaped = rate.bits_per_s is not None or latency_us > 0

    def cut(self, node: int) -> None:
        """Take a node's link down."""
        _must("ip", "-n", self._node_name(node), "link", "set", INTERFACE, "down")

    def start(
        self, node: int, command: Sequence[str], environment: dict[str, str], log: IO[Any]
    ) -> subprocess.Popen[bytes]:
        """Run a command in a node; the kernel kills it when this process ends, however it does."""
        process = subprocess.Popen(
            [_tool("ip"), "netns", "exec", self._node_name(node), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only us, and we end the rest in order
            preexec_fn=die_with_parent,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End the cluster's processes; remove its namespaces with their links, and its files."""
        with _signals_held():
            for process in self._processes:  # the latest may not have entered its node yet
                process.terminate()
            for namespace in self._namespaces:
                _end_processes(namespace)
            for process in self._processes:
                process.kill()
                process.wait()
            for namespace in self._namespaces:
                _remove(namespace)
            self._namespaces.clear()
            self._processes.clear()
            shutil.rmtree(self.directory, ignore_errors=True)

    # --- construction -----------------------------------------------------------------------------

    def _make(self) -> None:
        nodes = [self._node_name(node) for node in range(self.num_nodes)]
        hub = f"{self.name}-hub"
        for namespace in [*nodes, *([hub] if self._has_hub else [])]:
            self._namespaces.append(namespace)  # before it exists: an interrupt may follow at once
            _must("ip", "netns", "add", namespace)
        if self._has_hub:
            _must("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
            _must("ip", "-n", hub, "link", "set", "bridge0", "up")
            for node, namespace in enumerate(nodes):
                _join(namespace, INTERFACE, hub, f"port{node}")
                _must("ip", "-n", hub, "link", "set", f"port{node}", "master", "bridge0", "up")
        else:
            _join(nodes[0], INTERFACE, nodes[1], INTERFACE)
        for node, namespace in enumerate(nodes):
            self._name_nodes(namespace)
            _must(
                "ip", "-n", namespace, "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE
            )
            _must("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            _must("ip", "-n", namespace, "link", "set", "lo", "up")
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"  # a namespace has its own
            write = f"echo {CONGESTION_CONTROL} > {setting}"
            _must("ip", "netns", "exec", namespace, "sh", "-c", write)

    def _name_nodes(self, namespace: str) -> None:
        """Give nodes names: torch resolves them, and namespaces have no name server."""
        folder = _ETC / namespace  # `ip netns exec` mounts its files over /etc
        folder.mkdir(parents=True)
        nodes = [f"{self.address(node)} node{node}\n" for node in range(self.num_nodes)]
        local = f"127.0.0.1 localhost {platform.node()}\n"
        (folder / "hosts").write_text("".join([local, *nodes]), encoding="utf-8")

    @property
    def _has_hub(self) -> bool:
        return self.num_nodes > 2

    def _node_name(self, node: int) -> str:
        return f"{self.name}-n{node}"

    def _ends(self, node: int) -> Iterator[tuple[str, str]]:
        """Both ends of a node's link; with two nodes the other end is the other node's."""
        yield self._node_name(node), INTERFACE
        if self._has_hub:
            yield f"{self.name}-hub", f"port{node}"

    def _shape_end(self, namespace: str, interface: str, rate: Rate, latency_us: int) -> None:
        tc = ("tc", "-n", namespace, "qdisc")
        at = ("dev", interface)
        if self._shaped:
            _must(*tc, "del", *at, "root")
        parent: tuple[str, ...] = ("root",)
        if rate.bits_per_s is not None:
            burst = max(BURST_BYTES, rate.bits_per_s // 8 // 1000)
            bucket = ("tbf", "rate", f"{rate.bits_per_s}bit", "burst", f"{burst}b")
            _must(*tc, "add", *at, *parent, "handle", "1:", *bucket, "latency", f"{QUEUE_MS}ms")
            parent = ("parent", "1:1")
        if latency_us:
            delay = ("netem", "delay", f"{latency_us}us", "limit", "100000")
            _must(*tc, "add", *at, *parent, "handle", "10:", *delay)


def check_machine() -> None:
    """Raise if this machine cannot emulate a cluster."""
    if os.geteuid() != 0:
        raise ClusterError(
            "only root may create network namespaces and shape links: run it as root or with sudo"
        )
    for name in ("ip", "tc"):
        _tool(name)


def sweep() -> None:
    """Remove namespaces of killed runs: those with our form of name whose owner has ended."""
    for namespace in list_namespaces():
        if is_abandoned(namespace):
            _end_processes(namespace)
            _remove(namespace)
    for directory in Path(tempfile.gettempdir()).glob("swbench-*"):
        if is_abandoned(directory.name) and directory.stat().st_uid == os.geteuid():
            shutil.rmtree(directory, ignore_errors=True)


def list_namespaces() -> list[str]:
    """The names of all network namespaces, including others'."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def is_abandoned(name: str) -> bool:
    """Whether a name has our form and its owner has ended (the id may have been reused)."""
    found = _NAME.fullmatch(name)
    return found is not None and _start_time(int(found["pid"])) != int(found["start"])


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def signals_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program through `finally` clauses, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay signals during clean-up, which is short and must be complete."""
    waiting = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _join(namespace: str, interface: str, other: str, other_interface: str) -> None:
    ends = (interface, "netns", namespace, "type", "veth", "peer", "name", other_interface)
    _must("ip", "link", "add", *ends, "netns", other)
    for where, end in ((namespace, interface), (other, other_interface)):
        _must("ip", "-n", where, "link", "set", end, "gso_max_size", str(GSO_BYTES))


def _end_processes(namespace: str) -> None:
    """Terminate every process inside a namespace; kill those that remain."""
    force_at = time.monotonic() + _PATIENCE_S
    give_up_at = force_at + _PATIENCE_S
    asked: set[int] = set()
    while (pids := _processes_in(namespace)) and time.monotonic() < give_up_at:
        for pid in pids:
            if time.monotonic() > force_at:
                _signal(pid, signal.SIGKILL)
            elif pid not in asked:
                _signal(pid, signal.SIGTERM)
        asked |= set(pids)
        time.sleep(0.05)


def _remove(namespace: str) -> None:
    _run("ip", "netns", "del", namespace)
    shutil.rmtree(_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):  # it has files of others
        _ETC.rmdir()


def _processes_in(namespace: str) -> list[int]:
    found = _run("ip", "netns", "pids", namespace)
    return [pid for pid in map(int, found.stdout.split()) if not _is_zombie(pid)]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        os.kill(pid, number)


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None: there is no process with this id."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return not fields or fields[0] == "Z"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may have any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _tool(name: str) -> str:
    search = os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM_PATHS])
    found = shutil.which(name, path=search)
    if not found:
        raise ClusterError(
            f"there is no `{name}` command: install iproute2 (apt-get install iproute2)"
        )
    return found


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_tool(name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _must(name: str, *arguments: str) -> None:
    done = _run(name, *arguments)
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        said = said.removeprefix("Error: ").rstrip(".")
        hint = ""
        if "netem" in arguments and "unknown" in said:
            hint = " (this kernel has no netem: use --latency 0ms)"
        raise ClusterError(f"the kernel refused `{' '.join((name, *arguments))}`: {said}{hint}")
