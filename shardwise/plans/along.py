"""Memory along a step: what a rank holds while each unit is computed, and what the peak is made of.

States rest where they are and pools keep the buffers that they have lent, so that between two steps
only what forward leaves for backward comes and goes: activations, kept parameters, and what
backward makes for a moment. Every moment is a ``Memory`` of its own, with the same terms.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.core.layout import ModelSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Saved
from shardwise.plans.expected import Event, schedule
from shardwise.plans.memory import HOLES, Memory, absent, kept_bytes, memory, sums_bytes
from shardwise.plans.ops import Kind, Phase, Place, Trigger
from shardwise.plans.plan import Plan

TERMS = {
    "params": "parameters",
    "kept": "kept parameters",
    "gathered": "gathered parameters",
    "grads": "gradients",
    "grad_buffers": "gradients on their way",
    "optim": "optimizer states",
    "staging": "buffers of the disk",
    "wires": "encoded payloads",
    "activations": "activations",
    "allowance": "temporaries and holes",
}
"""The terms of a device's memory, in words."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held while something is computed."""

    name: str
    """As a trace calls it: ``forward blocks.0``."""
    memory: Memory

    def causes(self) -> dict[str, int]:
        """What the device's memory goes for, in words, the largest first."""
        terms = {words: getattr(self.memory, term) for term, words in TERMS.items()}
        return dict(sorted(((k, v) for k, v in terms.items() if v), key=lambda item: -item[1]))


def along(
    plan: Plan,
    model: ModelSpec,
    topology: Topology,
    saved: Saved,
    *,
    accumulates: bool = False,
    accelerated: bool = False,
) -> list[Moment]:
    """The moments of a step's last pass, in order."""
    needed = memory(
        plan, model, topology, accumulates=accumulates, saved=saved, accelerated=accelerated
    )
    phase = Phase.LAST if accumulates else Phase.ONLY
    held = _Held(plan, model, topology, saved, needed, accumulates=accumulates)
    return list(held.moments(phase))


def peak(moments: list[Moment]) -> Moment:
    """When a device holds most; the first such moment."""
    return max(moments, key=lambda moment: moment.memory.total)


class _Held:
    """Follows the events of a pass."""

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        topology: Topology,
        saved: Saved,
        needed: Memory,
        *,
        accumulates: bool,
    ) -> None:
        self._plan, self._model, self._topology = plan, model, topology
        self._saved, self._needed = saved, needed
        self._holes = 0 if needed.accelerated else needed.optim // HOLES
        self._absent = absent(plan, model, topology, saved, accumulates=accumulates)
        self._kept_bytes = kept_bytes(plan, model, topology)
        self._called = [unit.name for unit in model.units[1:] if not unit.inside]
        self._begun: list[str] = []
        """Units whose activations backward still needs."""
        self._kept: set[str] = set()
        """Units that something is kept of."""
        self._sums_bytes = sums_bytes(plan, model, topology, accumulates=accumulates)
        self._grads_before = needed.grads - sum(self._sums_bytes.values())
        self._summed: set[str] = set()
        """Units whose gradients this backward has summed."""

    def moments(self, phase: Phase) -> Iterator[Moment]:
        if self._plan.keep_until == "step" and phase is Phase.LAST:
            self._kept |= self._kept_bytes.keys()
        for event in schedule(self._plan, self._model, self._topology, phase):
            name = event.unit
            self._follow(event)
            if event.trigger is Trigger.BEFORE_FORWARD:
                if name in self._called:
                    self._begun.append(name)
                yield Moment(f"forward {name}", self._memory())
            elif event.trigger is Trigger.BEFORE_BACKWARD:
                # The root's comes first, before any unit's.
                yield Moment(f"backward {name}", self._memory(name))
            elif event.trigger is Trigger.AFTER_BACKWARD and name in self._begun:
                self._begun.remove(name)
        yield Moment("step", self._memory())

    def _follow(self, event: Event) -> None:
        """What is kept of units: a rung that is copied out and dropped, or the full buffer that is
        not freed."""
        freed = set()
        for op in event.ops:
            if op.kind is Kind.REDUCE:
                self._summed.add(op.unit)
            if op.kind is Kind.KEEP:
                self._kept.add(op.unit)
            elif op.kind is Kind.DROP and op.source is Place.KEPT:
                self._kept.discard(op.unit)
            elif op.kind is Kind.FREE:
                freed.add(op.unit)
        stays = self._plan.for_unit(event.unit).keep == "full"
        if event.trigger is Trigger.AFTER_FORWARD and stays and event.unit not in freed:
            self._kept.add(event.unit)
        self._kept -= {unit for unit in freed if self._plan.for_unit(unit).keep == "full"}

    def _memory(self, backward: str = "") -> Memory:
        """``backward``: the unit whose backward begins."""
        if self._needed.accelerated:
            return self._coming_and_going(backward)
        return self._staying(backward=backward in self._called)

    def _staying(self, *, backward: bool) -> Memory:
        needed, saved, setting = self._needed, self._saved, self._plan.activations
        share = len(self._begun) / max(1, len(self._called))
        held = saved.held(setting)
        # Of what is held at most, one unit's part is there only while its backward runs.
        passing = 0 if setting == "keep" or backward else saved.largest_unit
        activations = int(saved.root + share * (held - saved.root - passing)) if share else 0
        away = int(saved.movable * (1.0 - share))
        return replace(
            needed,
            kept=sum(self._kept_bytes[name] for name in self._kept),
            activations=activations,
            allowance=needed.allowance if backward else self._holes,
            cpu=needed.cpu - (away if setting == "cpu" else 0),
            nvme=needed.nvme - (away if setting == "nvme" else 0),
        )

    def _coming_and_going(self, backward: str) -> Memory:
        """On an accelerator: see [Note: Coming and going] in ``memory.py``."""
        found, needed = self._staying(backward=True), self._needed
        grads = self._grads_before + sum(self._sums_bytes[name] for name in self._summed)
        if not backward:
            return _there(found, Counter(), grads=grads, grad_buffers=0, allowance=0)
        if backward not in self._called:
            return _there(needed, self._absent.loss)
        first, last = self._called[-1], self._called[0]
        if backward == last:
            return _there(needed, self._absent.last)
        if backward == first:
            return _there(needed, self._absent.first)
        gone = self._absent.second
        share = (1 + self._called.index(backward)) / (len(self._called) - 1)
        lasting = needed.activations - gone["activations"]
        return _there(needed, gone, grads=grads, kept=found.kept, activations=int(share * lasting))


def _there(needed: Memory, absent: Counter[str], **changed: int) -> Memory:
    """The terms of one moment, of which nothing is absent."""
    terms = {term: getattr(needed, term) - nbytes for term, nbytes in absent.items()}
    found = replace(needed, absent_loss=0, absent_first=0, absent_second=0, absent_last=0)
    values: dict[str, Any] = terms | changed
    return replace(found, **values)
