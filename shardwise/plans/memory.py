"""How many bytes each rank needs under a plan: one small function per term.

These terms are what the runtime allocates for states and transfers; activations depend on the
model. ``parts[x]`` is the number of shards on the rung of x, ``numel`` a flat's padded size.

[Note: Coming and going]
On a CPU buffers and gradients stay for all steps, because fresh pages are expensive. An
accelerator's allocator hands freed memory to whatever comes next, so there sums of gradients are
allocated when they are made and freed when they are dropped: while backward goes on, activations
go and gradients come. The peak is early in backward or at its end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.core.layout import FlatSpec, ModelSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Saved
from shardwise.plans.placed import kept_rung, trained_flats, travels
from shardwise.plans.plan import Plan, has_master, resolve
from shardwise.plans.sized import Sized
from shardwise.plans.staged import (
    beside_device_bytes,
    on_device_bytes,
    pooled,
    staging_bytes,
)
from shardwise.plans.updates import OPTIM_WORDS
from shardwise.plans.working import working_bytes

HOLES = 8
"""Malloc's gaps between optimizer states take 1/HOLES of their memory."""
TEMPORARIES = 2
"""On an accelerator the temporaries of a unit's backward take 1/TEMPORARIES of what it saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of each term on one rank."""

    params: int
    """sum over flats: numel / parts[P] * bytes(compute). States count here only if they rest on
    the device."""
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
    measured peak in ``benchmarks/step.py`` at sequences of 128 to 1024. On an accelerator: the
    gradients of the largest unit and of the root, which come first and are reduced last, and the
    temporaries of one unit."""

    budget: int | None = None
    """Limit of all states and buffers of the device together: idle buffers are freed before it is
    exceeded."""
    accelerated: bool = False
    """Whether the device is an accelerator; see [Note: Coming and going]."""
    absent_early: int = 0
    """On an accelerator: bytes of these terms that are not there when backward's first unit is
    over."""
    absent_late: int = 0
    """The same, when its last unit is over."""

    @property
    def total(self) -> int:
        """An upper bound of the peak: the sum of the terms that are there together."""
        states = self.params + self.grads + self.optim
        held = states + self.kept + self.gathered + self.grad_buffers + self.staging
        passing = self.wires + self.activations + self.allowance
        most = held + passing - min(self.absent_early, self.absent_late)
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
    memory; then the disk's buffers are in host memory, and encoded reductions have longer chunks.
    """
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
        allowance=_largest_gradient(placed)
        + (placed[0].full_bytes("compute") if accelerated else optim // HOLES),
        accelerated=accelerated,
    )
    if accelerated:
        found = _on_accelerator(found, placed, plan, accumulates=accumulates)
    return found if saved is None else with_activations(found, saved, plan.activations)


def _on_accelerator(found: Memory, units: list[Sized], plan: Plan, *, accumulates: bool) -> Memory:
    """With what is not there early and late in backward."""
    root, *inner = units
    early = 0
    if not accumulates:
        sums = [unit.sums_bytes() for unit in units if unit.rests("grads", "device")]
        early = sum(sums) - max(sums, default=0)
    if inner:
        # The root's gradients come first (a head's) and last (an embedding's); they leave last.
        early += root.full_bytes("reduce") + root.full_bytes("compute") // 2
        early += 0 if root.rests("grads", "device") else root.sums_bytes()
    ahead = _gathered_inner(inner, plan.prefetch) - _gathered_inner(inner, 0)
    return replace(found, absent_early=early, absent_late=found.kept + ahead)


def kept_bytes(plan: Plan, model: ModelSpec, topology: Topology) -> dict[str, int]:
    """Bytes kept between forward and backward, by unit."""
    root, *inner = _placed(plan, model, topology)
    return {root.unit.name: 0, **{placed.unit.name: _kept(placed) for placed in inner}}


def sums_bytes(plan: Plan, model: ModelSpec, topology: Topology) -> dict[str, int]:
    """Bytes of summed gradients on the device, by unit."""
    return {
        placed.unit.name: placed.sums_bytes() if placed.rests("grads", "device") else 0
        for placed in _placed(plan, model, topology)
    }


def _placed(plan: Plan, model: ModelSpec, topology: Topology) -> list[Sized]:
    return [
        Sized(unit, plan.for_unit(unit.name), resolve(plan, topology, unit.name))
        for unit in model.units
    ]


def with_activations(needed: Memory, saved: Saved, setting: str) -> Memory:
    """Memory including activations, on the tier of the setting, and their gradients."""
    held = saved.held(setting)
    unit = min(held, saved.largest_unit)
    temporary = saved.largest_unit // TEMPORARIES if needed.accelerated else held // 4
    away = {tier: saved.movable if tier == setting else 0 for tier in ("cpu", "nvme")}
    return replace(
        needed,
        activations=held,
        absent_early=needed.absent_early + (unit if needed.accelerated else 0),
        absent_late=needed.absent_late
        + (max(0, held - saved.root - unit) if needed.accelerated else 0),
        cpu=needed.cpu + away["cpu"],
        nvme=needed.nvme + away["nvme"],
        allowance=needed.allowance + temporary,
    )


def _params(placed: Sized) -> int:
    return placed.compute_bytes(placed.rungs.params)


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
