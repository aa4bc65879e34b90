"""A job: ranks on all nodes of a cluster, started by torchrun and controlled over a Unix socket.

Imports no torch.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import shardwise
from shardwise.bench.cluster import INTERFACE, Cluster
from shardwise.bench.messages import Failed, Hello, Leave
from shardwise.core.errors import UsageError
from shardwise.train.launch import WorkerError, rank_environment

START_LIMIT_S = 180.0
"""How long ranks may take to start Python and connect to each other."""
_GRACE_S = 5.0
_FIRST_PORT = 29400
_ERROR = re.compile(r"^\w*Error: .*$", re.MULTILINE)
_EXIT_CODE = re.compile(r"exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")


@dataclass(slots=True)
class _Rank:
    hello: Hello
    connection: Connection

    @property
    def place(self) -> str:
        return f"rank {self.hello.rank} on node {self.hello.node}"


def processors_of(node: int, num_nodes: int, processors: Collection[int]) -> set[int]:
    """A node's share of the processors; nodes share processors if there are fewer than nodes.

    >>> [processors_of(node, 2, range(5)) for node in range(2)]
    [{0, 1}, {2, 3}]
    >>> [processors_of(node, 4, range(2)) for node in range(4)]
    [{0}, {1}, {0}, {1}]
    """
    ordered = sorted(processors)
    each = len(ordered) // num_nodes
    if each == 0:
        return {ordered[node % len(ordered)]}
    return set(ordered[node * each : (node + 1) * each])


class Job:
    """Ranks that wait for messages. A cluster may have several jobs, one of them busy at a time.

    ``apart`` gives each node its own processors, if there are enough. Otherwise ranks of all nodes
    move between all processors, and steps vary more from turn to turn.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        python: str,
        *,
        ranks_per_node: int,
        number: int,
        apart: bool = False,
    ) -> None:
        self.name = name
        self._apart = apart
        self._cluster = cluster
        self._world = cluster.num_nodes * ranks_per_node
        self._socket_path = cluster.directory / f"{name}.socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._socket_path))
        self._listener.listen(self._world)
        self._agents = [
            self._start_agent(node, python, ranks_per_node, _FIRST_PORT + number)
            for node in range(cluster.num_nodes)
        ]
        self._ranks: list[_Rank] = []

    def wait_until_started(self) -> None:
        """Return when every rank has sent Hello."""
        self._listener.settimeout(0.2)
        give_up_at = time.monotonic() + START_LIMIT_S
        while len(self._ranks) < self._world:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                for node, agent in enumerate(self._agents):
                    if agent.poll() is not None:
                        self._fail(f"torchrun ended before its ranks started{self._cause(node)}")
                if time.monotonic() > give_up_at:
                    self._fail(f"the ranks did not start within {START_LIMIT_S:.0f} s")
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            self._ranks.append(_Rank(connection.recv(), connection))
        self._ranks.sort(key=lambda rank: rank.hello.rank)

    def ask(self, message: Any) -> list[Any]:
        """Send a message to all ranks; return their answers by rank. Raises the first failure."""
        answers: dict[int, Any] = {}
        try:
            for rank in self._ranks:
                rank.connection.send(message)
        except BrokenPipeError:
            pass  # the answers tell which rank ended, and why
        while len(answers) < self._world:
            waiting = {r.connection: r for r in self._ranks if r.hello.rank not in answers}
            for connection in wait(list(waiting)):
                rank = waiting[connection]  # type: ignore[index]
                answers[rank.hello.rank] = _receive(rank)
            self._check(answers)
        return [answers[rank] for rank in sorted(answers)]

    def node_of(self, rank: int) -> int:
        return self._ranks[rank].hello.node

    def leave(self) -> None:
        """Ask the ranks to leave; those that do not are ended with the cluster."""
        for rank in self._ranks:
            rank.connection.send(Leave())
        give_up_at = time.monotonic() + _GRACE_S
        for agent in self._agents:
            try:
                agent.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def close(self) -> None:
        """Close this side of the connections."""
        for rank in self._ranks:
            rank.connection.close()
        self._listener.close()

    # --- inside -----------------------------------------------------------------------------------

    def _start_agent(
        self, node: int, python: str, ranks: int, port: int
    ) -> subprocess.Popen[bytes]:
        cluster = self._cluster
        address = cluster.address(node)
        command = [python, "-m", "torch.distributed.run",
                   f"--nnodes={cluster.num_nodes}", f"--nproc-per-node={ranks}",
                   "--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.address(0)}:{port}",
                   f"--rdzv-id={self.name}", f"--rdzv-conf=is_host={int(node == 0)}",
                   f"--local-addr={address}", "--max-restarts=0",
                   f"--log-dir={cluster.directory / 'elastic'}",
                   "-m", "shardwise.bench.worker", str(self._socket_path), str(node)]  # fmt: skip
        allowed = os.sched_getaffinity(0)
        own = processors_of(node, cluster.num_nodes, allowed) if self._apart else allowed
        with self._log(node).open("wb") as log:
            os.sched_setaffinity(0, own)  # inherited by the agent and its ranks
            try:
                return cluster.start(node, command, _environment(self._world), log)
            finally:
                os.sched_setaffinity(0, allowed)

    def _log(self, node: int) -> Path:
        return self._cluster.directory / f"{self.name}-node{node}.log"

    def _cause(self, node: int) -> str:
        """The first error in a node's log; later ones are torchrun's reports of it."""
        error = _ERROR.search(self._log(node).read_text(errors="replace"))
        return f": {error.group()}" if error else ""

    def _check(self, answers: dict[int, Any]) -> None:
        """Raise the earliest failure: the others are usually its consequences."""
        for number, answer in answers.items():
            if answer is None:
                self._fail(f"{self._ranks[number].place} {self._end_of(self._ranks[number])}")
        for number, answer in answers.items():
            if isinstance(answer, Failed):
                if answer.is_mistake:
                    raise UsageError(answer.sentence)
                self._fail(f"{self._ranks[number].place}: {answer.sentence}", answer.trace)

    def _end_of(self, rank: _Rank) -> str:
        """How a rank without an answer ended, from torchrun's log, which has it a moment later."""
        give_up_at = time.monotonic() + _GRACE_S
        while time.monotonic() < give_up_at:
            log = self._log(rank.hello.node).read_text(errors="replace")
            for code, pid in _EXIT_CODE.findall(log):
                if int(pid) == rank.hello.pid:
                    return _how(int(code))
            time.sleep(0.1)
        return "ended without a message"

    def _fail(self, sentence: str, trace: str = "") -> NoReturn:
        kept = Path(tempfile.mkdtemp(prefix="shardwise-"))
        for node in range(self._cluster.num_nodes):
            shutil.copy(self._log(node), kept)
        if trace:
            (kept / "trace.txt").write_text(trace, encoding="utf-8")
        raise WorkerError(f"{sentence} (logs in {kept})")


def _receive(rank: _Rank) -> Any:
    """A rank's answer; None: it ended without one."""
    try:
        return rank.connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _how(exit_code: int) -> str:
    if exit_code < 0:
        return f"was stopped by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} and no message"


def _environment(world: int) -> dict[str, str]:
    """Environment of ranks: all share this machine's cores, and gloo uses the slow link."""
    ours = str(Path(shardwise.__file__).parents[1])
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "GLOO_"))
    }
    paths = [ours, *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | rank_environment(world) | {
        "PYTHONPATH": os.pathsep.join(paths),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
