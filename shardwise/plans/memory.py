"""How many bytes each rank needs under a plan: one small function per term.

These terms are what the runtime allocates for states and transfers; activations depend on the
model. ``parts[x]`` is the number of shards on the rung of x, ``numel`` a flat's padded size.

[Note: Coming and going]
On a CPU buffers and gradients stay for all steps, because fresh pages are expensive. An
accelerator's allocator hands freed memory to whatever comes next, so there sums of gradients are
allocated when they are made and freed when they are dropped: while backward goes on, activations
go and gradients come. The peak is at the beginning of backward or at its end: when the gradient of
the loss is computed, or in the backward of the first, the second or the last unit (``passing.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.core.layout import FlatSpec, ModelSpec
from shardwise.core.topology import Topology
from shardwise.core.work import IN_FLIGHT, Saved
from shardwise.plans.passing import (
    Absent,
    absent_activations,
    absent_states,
    allowance_bytes,
    nothing,
    temporary_bytes,
)
from shardwise.plans.placed import kept_rung, trained_flats, travels
from shardwise.plans.plan import Plan, has_master, resolve, rests_in_master
from shardwise.plans.sized import Sized
from shardwise.plans.staged import (
    beside_device_bytes,
    on_device_bytes,
    pooled,
    staging_bytes,
    sums_on_device_bytes,
)
from shardwise.plans.updates import OPTIM_WORDS
from shardwise.plans.working import working_bytes

HOLES = 8
"""Malloc's gaps between optimizer states take 1/HOLES of their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of each term on one rank."""

    params: int
    """sum over flats: numel / parts[P] * bytes(compute), unless P's shard is the master. States
    count here only if they rest on the device."""
    kept: int
    """sum over flats of inner units with keep < P: numel / parts[keep] * bytes(compute)."""
    gathered: int
    """root in full + buffers for inner units in full, in the compute dtype: prefetch + 1 of each
    size; only for units with P > rung 0, and inner ones only if they are not kept in full."""
    grads: int
    """sum over trained flats: numel / parts[OS] * bytes(master), and, if accumulation rests on
    another rung, numel / parts[G] * bytes(master)."""
    grad_buffers: int
    """trained flats in full * bytes(reduce): those of root, which fill during the whole backward,
    and two of each size of inner units: backward fills one while the other travels. On an
    accelerator one: a unit's gradients are copied there together, when the last one has left."""
    optim: int
    """sum over trained flats: (optim_words + 1 if there is a master copy) * numel / parts[OS]
    * bytes(master)."""
    staging: int = 0
    """Buffers between memory and a disk. P: shards that are read ahead. G: a unit's shard while it
    is summed. OS: two windows of everything that the update touches, and states while the optimizer
    creates them. Also writes in flight, and memory of the disk's threads. With accelerators these
    are in host memory, and count in ``cpu``; here are those of the device, for shards on their way
    to or from a tier."""
    wires: int = 0
    """For wire formats: payloads and chunks in flight, and what error feedback keeps:
    (size - 1) * numel / ranks * 4 bytes on the outermost hop of every trained flat."""
    activations: int = 0
    """What forward saves for backward and keeps in the device's memory."""

    cpu: int = 0
    """Host memory, if the device is an accelerator; not in ``total``."""
    nvme: int = 0
    """States and activations that rest on the disk; not in ``total``."""

    allowance: int = 0
    """Memory that no plan controls: the largest unit's gradients while autograd computes them, a
    quarter of the activations for their gradients and other temporaries of backward, and an eighth
    of the optimizer states for malloc's gaps between them. Rules of thumb, within 5 % of the
    measured peak in ``benchmarks/step.py`` at sequences of 128 to 1024. On an accelerator:
    gradients of a unit and of the root before they are reduced, and temporaries of backward
    (``passing.py``)."""

    budget: int | None = None
    """Limit of all states and buffers of the device together: idle buffers are freed before it is
    exceeded."""
    accelerated: bool = False
    """Whether the device is an accelerator; see [Note: Coming and going]."""
    absent_loss: int = 0
    """On an accelerator: bytes of these terms that are not there when the gradient of the loss is
    computed."""
    absent_first: int = 0
    """The same, in the backward of its first unit."""
    absent_second: int = 0
    """The same, in that of the second."""
    absent_last: int = 0
    """The same, in that of the last."""

    @property
    def absent(self) -> int:
        """Bytes of these terms that are not there at the peak."""
        return min(self.absent_loss, self.absent_first, self.absent_second, self.absent_last)

    @property
    def total(self) -> int:
        """An upper bound of the peak: the sum of the terms that are there together."""
        states = self.params + self.grads + self.optim
        held = states + self.kept + self.gathered + self.grad_buffers + self.staging
        passing = self.wires + self.activations + self.allowance
        most = held + passing - self.absent
        return most if self.budget is None else min(most, self.budget + passing)


def memory(
    plan: Plan,
    model: ModelSpec,
    topology: Topology,
    *,
    optim_words: int = OPTIM_WORDS,
    accumulates: bool = False,
    saved: Saved | None = None,
    accelerated: bool = False,
) -> Memory:
    """What each rank holds in a training step.

    ``optim_words`` is the number of values that the optimizer stores per element (Adam: 2).
    ``accumulates``: steps have several micro-batches under ``no_sync``. ``saved`` is what forward
    saves for backward; without it activations do not count. ``accelerated`` devices have their own
    memory, whatever the plan was made for; then the disk's buffers are in host memory, and encoded
    reductions have longer chunks.
    """
    if accelerated:
        plan = plan.on_accelerator()
    placed = _placed(plan, model, topology)
    host = staging_bytes(placed, plan, optim_words)
    if accelerated:
        host += beside_device_bytes(placed, plan)

    def resting(tier: str) -> dict[str, int]:
        terms: dict[str, Callable[[Sized], int]] = {
            "params": _params,
            "grads": lambda unit: _grads(unit, accumulates),
            "optim": lambda unit: _optim(unit, optim_words),
        }
        return {
            state: sum(term(unit) for unit in placed if unit.rests(state, tier))
            for state, term in terms.items()
        }

    states = resting("device")
    optim = states["optim"]
    found = Memory(
        **states,
        kept=sum(_kept(unit) for unit in placed[1:]),
        gathered=_gathered_root(placed[0]) + _gathered_inner(placed[1:], plan.prefetch),
        grad_buffers=_grad_buffers(placed, at_once=1 if accelerated else 2),
        staging=on_device_bytes(placed, accumulates=accumulates) if accelerated else host,
        cpu=sum(resting("cpu").values()) + (host if accelerated else 0),
        nvme=sum(resting("nvme").values()),
        wires=working_bytes(placed, accumulates=accumulates, accelerated=accelerated),
        budget=plan.tiers.device_bytes,
        allowance=allowance_bytes(placed)
        if accelerated
        else _largest_gradient(placed) + optim // HOLES,
        accelerated=accelerated,
    )
    if accelerated:
        found = _without(found, _absent_states(placed, plan, accumulates=accumulates))
    return found if saved is None else with_activations(found, saved, plan.activations)


def absent(
    plan: Plan, model: ModelSpec, topology: Topology, saved: Saved, *, accumulates: bool
) -> Absent:
    """What of an accelerator's memory is not there together."""
    plan = plan.on_accelerator()
    states = _absent_states(_placed(plan, model, topology), plan, accumulates=accumulates)
    return states + absent_activations(saved, plan.activations)


def _absent_states(units: list[Sized], plan: Plan, *, accumulates: bool) -> Absent:
    inner = units[1:]
    if not inner:
        return nothing()
    return absent_states(
        units,
        sums=[_made_in_backward(unit, accumulates) for unit in units],
        kept=[_kept(unit) for unit in inner],
        ahead=_gathered_inner(inner, plan.prefetch) - _gathered_inner(inner, 0),
        buffers=_grad_buffers(units, at_once=1),
        staging=sums_on_device_bytes(units, accumulates=accumulates),
    )


def _without(found: Memory, absent: Absent) -> Memory:
    return replace(
        found,
        absent_loss=found.absent_loss + absent.loss.total(),
        absent_first=found.absent_first + absent.first.total(),
        absent_second=found.absent_second + absent.second.total(),
        absent_last=found.absent_last + absent.last.total(),
    )


def kept_bytes(plan: Plan, model: ModelSpec, topology: Topology) -> dict[str, int]:
    """Bytes kept between forward and backward, by unit."""
    root, *inner = _placed(plan, model, topology)
    return {root.unit.name: 0, **{placed.unit.name: _kept(placed) for placed in inner}}


def sums_bytes(
    plan: Plan, model: ModelSpec, topology: Topology, *, accumulates: bool
) -> dict[str, int]:
    """Bytes of gradients on the device that a step's last backward makes, by unit."""
    placed = _placed(plan, model, topology)
    return {unit.unit.name: _made_in_backward(unit, accumulates) for unit in placed}


def _placed(plan: Plan, model: ModelSpec, topology: Topology) -> list[Sized]:
    return [
        Sized(unit, plan.for_unit(unit.name), resolve(plan, topology, unit.name))
        for unit in model.units
    ]


def with_activations(needed: Memory, saved: Saved, setting: str) -> Memory:
    """Memory including activations, on the tier of the setting, and their gradients."""
    held = saved.held(setting)
    away = {tier: saved.movable if tier == setting else 0 for tier in ("cpu", "nvme")}
    if needed.accelerated and setting == "nvme":  # the host's buffers between device and disk
        away["cpu"] = IN_FLIGHT * saved.largest_input
    found = replace(
        needed,
        activations=held,
        cpu=needed.cpu + away["cpu"],
        nvme=needed.nvme + away["nvme"],
        allowance=needed.allowance
        + (temporary_bytes(saved, setting) if needed.accelerated else held // 4),
    )
    return _without(found, absent_activations(saved, setting)) if found.accelerated else found


def _params(placed: Sized) -> int:
    rungs, plan = placed.rungs, placed.plan
    there_already = sum(
        placed.part_numel(flat, rungs.params) * placed.dtype_bytes("compute", flat)
        for flat in trained_flats(placed.unit)
        if rests_in_master(plan, rungs, flat.dtype)
    )
    return placed.compute_bytes(rungs.params) - there_already


def _kept(placed: Sized) -> int:
    rung = kept_rung(placed.rungs, placed.plan, encloses=False)
    if rung is None or not travels(placed.rungs, placed.plan):
        return 0  # nothing besides P itself
    return placed.compute_bytes(rung)


def _gathered_root(root: Sized) -> int:
    return root.compute_bytes(0) if travels(root.rungs, root.plan) else 0


def _gathered_inner(inner: list[Sized], prefetch: int) -> int:
    sizes = [
        unit.compute_bytes(0)
        for unit in inner
        if travels(unit.rungs, unit.plan) and kept_rung(unit.rungs, unit.plan, encloses=False) != 0
    ]
    return pooled(sizes, prefetch + 1)


def _grads(placed: Sized, accumulates: bool) -> int:
    return placed.sums_bytes() + (placed.held_bytes() if accumulates else 0)


def _made_in_backward(placed: Sized, accumulates: bool) -> int:
    """Sums that a step's last backward makes: the first one has made those that are also what is
    held under no_sync."""
    there_before = accumulates and placed.held_bytes() == 0
    return 0 if there_before or not placed.rests("grads", "device") else placed.sums_bytes()


def _grad_buffers(units: list[Sized], at_once: int) -> int:
    root, *inner = (unit.full_bytes("reduce") for unit in units)
    return root + pooled(inner, at_once)


def _largest_gradient(units: list[Sized]) -> int:
    return max(unit.full_bytes("compute") for unit in units)


def _optim(placed: Sized, optim_words: int) -> int:
    def words(flat: FlatSpec) -> int:
        return optim_words + has_master(placed.plan, placed.rungs, flat.dtype)

    return sum(
        words(flat)
        * placed.part_numel(flat, placed.rungs.optim)
        * placed.dtype_bytes("master", flat)
        for flat in trained_flats(placed.unit)
    )
