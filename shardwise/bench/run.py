"""A benchmark on an emulated cluster: contenders take turns at each rate of the slow link.

At every rate all contenders train in turn, round after round, so that a noisy machine affects all
of them alike; while one trains, the others wait and use no CPU. What crossed the link comes from
the kernel's counters of each node's interface, read before and after the timed steps.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from shardwise.bench.cluster import Cluster, Rate, signals_raised
from shardwise.bench.jobs import Job
from shardwise.bench.messages import Build, Measured, Setting, Turn
from shardwise.core.errors import UsageError
from shardwise.core.topology import Topology

HEADER_BYTES = 66
"""Headers of a packet: Ethernet 14, IPv4 20, TCP 20, its timestamps 12. The kernel counts them for
each packet that crosses the link, including acknowledgements; the rest is what programs sent."""

PEERS = ("fsdp2", "hsdp", "ddp", "deepspeed")
NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBench:
    """What is compared, on which cluster."""

    nodes: int = 2
    ranks: int = 2
    """Ranks per node."""
    rates: tuple[Rate, ...]
    latency_us: int = 0
    model: str = "gpt-small"
    seq: int = 128
    dtype: str = "bfloat16"
    in_float32: bool = False
    """Whether bfloat16 products are computed in float32 (`matmul`)."""
    steps: int = 2
    """Timed steps per turn."""
    warmup: int = 1
    """Untimed steps of every contender at every rate, before the timed ones."""
    rounds: int = 3
    plans: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    deepspeed_python: str = sys.executable
    """The Python interpreter of an environment with deepspeed."""

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise UsageError(f"there is no peer {peer!r}: use some of {', '.join(PEERS)}")
        for name in ("ranks", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        names = self.contenders
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"{name} is given twice; name each plan and peer once")
        if not names or not self.rates:
            raise UsageError("there is nothing to compare; give plans or peers, and rates")

    @property
    def setting(self) -> Setting:
        return Setting(
            model=self.model,
            dtype=self.dtype,
            seq=self.seq,
            levels=f"node={self.ranks},world={self.nodes}",
            in_float32=self.in_float32,
        )

    @property
    def contenders(self) -> list[str]:
        """Peers first, in the order given."""
        return [self._peer_name(peer) for peer in self.peers] + list(self.plans)

    @property
    def peer_names(self) -> list[str]:
        return [self._peer_name(peer) for peer in self.peers]

    def _peer_name(self, peer: str) -> str:
        if peer == "ddp" and self.setting.is_mixed:
            return "torch-ddp-hook"
        return peer if peer == "deepspeed" else f"torch-{peer}"


@dataclass(slots=True)
class Row:
    """One contender at one rate."""

    contender: str
    predicted_bytes: int | None
    """Bytes that a node sends per step according to `explain`; None for peers."""
    seconds: list[float] = field(default_factory=list)
    """Seconds per step, by round."""
    loss: float = float("nan")
    """The loss of the last step, mean over ranks."""
    steps: int = 0
    sent_bytes: dict[int, int] = field(default_factory=dict)
    """What each node sent in all timed steps, including headers."""
    sent_packets: dict[int, int] = field(default_factory=dict)
    received_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def sent_per_step(self, node: int) -> float:
        """Bytes per step that a node sent on its slow link, from the kernel's counters."""
        return self.sent_bytes[node] / self.steps

    def payload_per_step(self, node: int) -> float:
        """The same without headers of packets."""
        return (self.sent_bytes[node] - HEADER_BYTES * self.sent_packets[node]) / self.steps

    @property
    def most_sent(self) -> float:
        """Bytes per step of the node that sent most."""
        return max(map(self.sent_per_step, self.sent_bytes))

    @property
    def most_payload(self) -> float:
        return max(map(self.payload_per_step, self.sent_bytes))

    @property
    def payload_to_predicted(self) -> float | None:
        return self.most_payload / self.predicted_bytes if self.predicted_bytes else None


@dataclass(slots=True)
class RateResult:
    """All contenders at one rate."""

    rate: Rate
    rows: list[Row]

    def best_peer(self, peers: Sequence[str]) -> Row | None:
        rows = [row for row in self.rows if row.contender in peers]
        return min(rows, key=lambda row: row.median_s, default=None)

    def ratio(self, row: Row, peer: Row) -> float:
        """The median of the rounds' ratios of step times."""
        pairs = zip(row.seconds, peer.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


@dataclass(slots=True)
class Result:
    """The result of a benchmark."""

    bench: ClusterBench
    absent: dict[str, str]
    """Contenders that could not take part, and why."""
    remarks: list[str]
    rates: list[RateResult] = field(default_factory=list)


def run(bench: ClusterBench, tell: Callable[[str], None]) -> Result:
    """Build the cluster, let all contenders take turns, and remove it however this ends."""
    from shardwise.probing.matmul import REMARK

    absent = {}
    if "deepspeed" in bench.contenders and not _has_deepspeed(bench.deepspeed_python):
        absent["deepspeed"] = NOT_INSTALLED
    predicted = {name: predict(name, bench.setting) for name in bench.plans}
    result = Result(bench, absent, [REMARK] if bench.in_float32 else [])
    with signals_raised(), Cluster(bench.nodes) as cluster, ExitStack() as ending:
        tell(f"cluster of {bench.nodes} nodes with {bench.ranks} rank(s) each")
        cluster.shape(bench.rates[0], bench.latency_us)  # errors come before the work
        cluster.shape(Rate(None))
        present = [name for name in bench.contenders if name not in absent]
        jobs = _start_jobs(bench, cluster, present, ending, tell)
        for rate in bench.rates:
            cluster.shape(rate, bench.latency_us)
            at = RateResult(rate, [Row(name, predicted.get(name)) for name in present])
            result.rates.append(at)
            for number in range(bench.rounds):
                for row in at.rows:
                    _take_turn(bench, jobs[row.contender], row, first=number == 0)
                    tell(f"{rate}, round {number + 1} of {bench.rounds}: {row.contender} "
                         f"{row.seconds[-1]:.2f} s/step, loss {row.loss:.4f}")  # fmt: skip
        for job in {id(job): job for job in jobs.values()}.values():
            job.leave()
    return result


def predict(plan_name: str, setting: Setting) -> int:
    """Bytes per step that leave one node, from the plan's schedule; raises on a wrong plan."""
    import torch

    from shardwise.bench.contenders import plan_of
    from shardwise.model.units import describe
    from shardwise.plans.traffic import step_traffic
    from shardwise.plans.validate import check
    from shardwise.train.config import ModelConfig
    from shardwise.train.models import build_model

    topology = Topology.parse(setting.levels)
    plan = plan_of(plan_name, setting)
    check(plan, topology)
    with torch.device("meta"):
        module = build_model(ModelConfig(name=setting.model))
    spec = describe(module, plan, topology)
    leaving = step_traffic(plan, spec, topology).leaving(topology)
    return next(item.sent_bytes for item in leaving if item.level == topology.levels[0].name)


def _start_jobs(
    bench: ClusterBench,
    cluster: Cluster,
    names: list[str],
    ending: ExitStack,
    tell: Callable[[str], None],
) -> dict[str, Job]:
    """The job of each contender. DeepSpeed patches torch, so it gets separate processes."""
    alone = [name for name in names if name == "deepspeed"]
    together = [name for name in names if name not in alone]
    jobs: dict[str, Job] = {}
    for number, (members, python) in enumerate(
        [(together, sys.executable), (alone, bench.deepspeed_python)]
    ):
        if not members:
            continue
        job = Job(cluster, f"job{number}", python, ranks_per_node=bench.ranks, number=number)
        ending.callback(job.close)
        job.wait_until_started()
        for name in members:
            tell(f"building {name}")
            job.ask(Build(name, bench.setting))
            jobs[name] = job
    return jobs


def _take_turn(bench: ClusterBench, job: Job, row: Row, *, first: bool) -> None:
    turn = Turn(row.contender, bench.warmup if first else 0, bench.steps)
    answers: list[Measured] = job.ask(turn)
    row.seconds.append(max(answer.seconds for answer in answers) / bench.steps)
    row.loss = statistics.mean(answer.loss for answer in answers)
    row.steps += bench.steps
    seen = {job.node_of(rank): answer for rank, answer in enumerate(answers)}
    for node, answer in sorted(seen.items()):  # all ranks of a node read the same counters
        row.sent_bytes[node] = row.sent_bytes.get(node, 0) + answer.sent.num_bytes
        row.sent_packets[node] = row.sent_packets.get(node, 0) + answer.sent.num_packets
        row.received_bytes[node] = row.received_bytes.get(node, 0) + answer.received.num_bytes


def _has_deepspeed(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    try:
        return subprocess.run([python, "-c", code], check=False).returncode == 0
    except OSError:
        raise UsageError(
            f"--deepspeed-python {python} does not exist; give a Python interpreter"
        ) from None
