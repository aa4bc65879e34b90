"""Bytes on each link in a step: the schedule's hops summed by what they carry and by level."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from shardwise.core.layout import ModelSpec
from shardwise.core.topology import Topology
from shardwise.plans.expected import Event, schedule
from shardwise.plans.ops import Kind, Phase, Trigger
from shardwise.plans.plan import Plan


class Use(StrEnum):
    """What bytes travel for."""

    GATHER_FORWARD = "gather forward"
    GATHER_BACKWARD = "gather backward"
    REDUCE = "reduce"
    REPLICATE = "replicate"
    REFRESH = "refresh"


@dataclass(frozen=True, slots=True)
class Flow:
    """What each rank sends for one use on the links of one level."""

    use: Use
    level: str
    sent_bytes: int
    num_hops: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """What all ranks of one member of a level together send out of it."""

    level: str
    num_ranks: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """The flows of a pass or a step, as each rank sends (and receives) them."""

    flows: tuple[Flow, ...]

    def sent_bytes(self, *, use: Use | None = None, level: str | None = None) -> int:
        """Bytes a rank sends, of all uses and levels or of the given ones."""
        return sum(
            flow.sent_bytes
            for flow in self.flows
            if use in (None, flow.use) and level in (None, flow.level)
        )

    def leaving(self, topology: Topology) -> Iterator[Leaving]:
        """For each level but the outermost: what leaves one full member of it.

        A hop on an outer level joins ranks of equal inner position, so every byte of it leaves.
        """
        levels = topology.levels
        for index, level in enumerate(levels[:-1], start=1):
            num_ranks = prod(inner.size for inner in levels[:index])
            sent = sum(self.sent_bytes(level=outer.name) for outer in levels[index:])
            yield Leaving(level.name, num_ranks, num_ranks * sent)


def step_phases(accumulate: int) -> Counter[Phase]:
    """How often each phase runs in a step of ``accumulate`` micro-batches under ``no_sync``.

    >>> {phase.value: count for phase, count in step_phases(4).items()}
    {'first': 1, 'middle': 2, 'last': 1}
    """
    if accumulate == 1:
        return Counter({Phase.ONLY: 1})
    return Counter({Phase.FIRST: 1, Phase.MIDDLE: accumulate - 2, Phase.LAST: 1})


def step_traffic(
    plan: Plan, model: ModelSpec, topology: Topology, *, accumulate: int = 1
) -> Traffic:
    """The traffic of one optimizer step with ``accumulate`` micro-batches."""
    sent: Counter[tuple[Use, str]] = Counter()
    hops: Counter[tuple[Use, str]] = Counter()
    for phase, count in step_phases(accumulate).items():
        for flow in pass_traffic(schedule(plan, model, topology, phase)).flows:
            sent[flow.use, flow.level] += count * flow.sent_bytes
            hops[flow.use, flow.level] += count * flow.num_hops
    return _traffic(sent, hops)


def pass_traffic(events: Iterable[Event]) -> Traffic:
    """The traffic of the events of one pass."""
    sent: Counter[tuple[Use, str]] = Counter()
    hops: Counter[tuple[Use, str]] = Counter()
    for event in events:
        for op in event.ops:
            for hop in op.hops:
                key = (_use(op.kind, event.trigger), hop.level)
                sent[key] += hop.sent_bytes
                hops[key] += 1
    return _traffic(sent, hops)


def _traffic(sent: Counter[tuple[Use, str]], hops: Counter[tuple[Use, str]]) -> Traffic:
    return Traffic(
        tuple(Flow(*key, sent_bytes, hops[key]) for key, sent_bytes in sent.items() if hops[key])
    )


def _use(kind: Kind, trigger: Trigger) -> Use:
    if kind is Kind.GATHER:
        return Use.GATHER_FORWARD if trigger.in_forward else Use.GATHER_BACKWARD
    return Use(kind.value)
