"""How many bytes each rank needs under a plan: one small function per term.

These terms are what the runtime allocates for states and transfers; activations depend on the
model. ``parts[x]`` is the number of shards on the rung of x, ``numel`` a flat's padded size.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.core.layout import FlatSpec, ModelSpec
from shardwise.core.topology import Topology
from shardwise.core.work import Saved
from shardwise.plans.placed import kept_rung, trained_flats, travels
from shardwise.plans.plan import Plan, has_master, resolve
from shardwise.plans.sized import Sized
from shardwise.plans.updates import OPTIM_WORDS
from shardwise.plans.working import working_bytes

WRITES_IN_FLIGHT_BYTES = 1 << 26
"""Limit of all writes to a disk in flight; a single larger write is always allowed."""
DISK_SCRATCH_BYTES = 32 << 20
"""Memory of the disk's threads for data that does not begin or end on a page: four blocks of 8 MiB
(``tier/aio.py``)."""

HOLES = 8
"""Malloc's gaps between optimizer states take 1/HOLES of their memory."""


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
    and two of each size of inner units: backward fills one while the other travels."""
    optim: int
    """sum over trained flats: (optim_words + 1 if there is a master copy) * numel / parts[OS]
    * bytes(master)."""
    staging: int = 0
    """Buffers between memory and a disk. P: shards that are read ahead. G: a unit's shard while it
    is summed. OS: two windows of everything that the update touches, and states while the optimizer
    creates them. Also writes in flight, and memory of the disk's threads. With accelerators these
    are in host memory, and count in ``cpu``."""
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
    measured peak in ``benchmarks/step.py`` at sequences of 128 to 1024."""

    budget: int | None = None
    """Limit of all states and buffers of the device together: idle buffers are freed before it is
    exceeded."""

    @property
    def total(self) -> int:
        """The sum of all terms: an upper bound of the peak."""
        states = self.params + self.grads + self.optim
        held = states + self.kept + self.gathered + self.grad_buffers + self.staging
        if self.budget is not None:
            held = min(held, self.budget)
        return held + self.wires + self.activations + self.allowance


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
    staging = staging_bytes(placed, plan, optim_words)

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
        grad_buffers=_grad_buffers(placed),
        staging=0 if accelerated else staging,
        cpu=sum(resting("cpu").values()) + (staging if accelerated else 0),
        nvme=sum(resting("nvme").values()),
        wires=working_bytes(placed, accumulates=accumulates, accelerated=accelerated),
        budget=plan.tiers.device_bytes,
        allowance=_largest_gradient(placed) + optim // HOLES,
    )
    return found if saved is None else with_activations(found, saved, plan.activations)


def kept_bytes(plan: Plan, model: ModelSpec, topology: Topology) -> dict[str, int]:
    """Bytes kept between forward and backward, by unit."""
    root, *inner = _placed(plan, model, topology)
    return {root.unit.name: 0, **{placed.unit.name: _kept(placed) for placed in inner}}


def _placed(plan: Plan, model: ModelSpec, topology: Topology) -> list[Sized]:
    return [
        Sized(unit, plan.for_unit(unit.name), resolve(plan, topology, unit.name))
        for unit in model.units
    ]


def with_activations(needed: Memory, saved: Saved, setting: str) -> Memory:
    """Memory including activations, on the tier of the setting, and their gradients."""
    held = saved.held(setting)
    away = {tier: saved.movable if tier == setting else 0 for tier in ("cpu", "nvme")}
    return replace(
        needed,
        activations=held,
        cpu=needed.cpu + away["cpu"],
        nvme=needed.nvme + away["nvme"],
        allowance=needed.allowance + held // 4,
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


def _staging(units: list[Sized], plan: Plan, optim_words: int) -> int:
    fetched = [
        unit.compute_bytes(unit.rungs.params)
        for unit in units[1:]
        if unit.rests("params", "nvme") and unit.rungs.params > 0
    ]
    summed = [_grads(unit, False) for unit in units if unit.rests("grads", "nvme")]
    if units[0].rungs.bottom == 0:  # one rank: summed in pieces no larger than windows
        summed = []
    largest = max(summed, default=0)
    windows = max(_window(unit, plan.tiers.window_numel, optim_words) for unit in units)
    if not (fetched or largest or windows):
        return 0
    writing = max(largest, WRITES_IN_FLIGHT_BYTES) if windows or largest else 0
    made = max(_made_states(unit, plan.tiers.window_numel, optim_words) for unit in units)
    moving = pooled(fetched, max(1, 2 * plan.prefetch)) + largest + 2 * windows + made + writing
    return moving + DISK_SCRATCH_BYTES


def _made_states(placed: Sized, window_numel: int, optim_words: int) -> int:
    """States that the optimizer creates in the first step of a window, before they are moved."""
    if not placed.rests("optim", "nvme"):
        return 0
    numels = (placed.part_numel(f, placed.rungs.optim) for f in trained_flats(placed.unit))
    return max((min(window_numel, n) for n in numels), default=0) * optim_words * 4


def _window(placed: Sized, window_numel: int, optim_words: int) -> int:
    """Buffers of one window for all states that rest on the disk."""
    largest = 0
    for flat in trained_flats(placed.unit):
        numel = min(window_numel, placed.part_numel(flat, placed.rungs.optim))
        word, copy = placed.dtype_bytes("master", flat), placed.dtype_bytes("compute", flat)
        separate = has_master(placed.plan, placed.rungs, flat.dtype)
        each = (optim_words + separate) * word if placed.rests("optim", "nvme") else 0
        each += word if placed.rests("grads", "nvme") else 0
        each += copy if placed.rests("params", "nvme") else 0
        largest = max(largest, numel * each)
    return largest


def pooled(sizes: list[int], at_once: int) -> int:
    """Bytes of a pool that lends at most ``at_once`` buffers of each size."""
    return sum(size * min(count, at_once) for size, count in Counter(sizes).items())


def _grads(placed: Sized, accumulates: bool) -> int:
    rungs = placed.rungs
    rests = [rungs.optim]
    if accumulates and rungs.grads != rungs.optim:
        rests.append(rungs.grads)
    return sum(
        placed.part_numel(flat, rung) * placed.dtype_bytes("master", flat)
        for flat in trained_flats(placed.unit)
        for rung in rests
    )


def _grad_buffers(units: list[Sized]) -> int:
    root, *inner = (
        sum(flat.numel * unit.dtype_bytes("reduce", flat) for flat in trained_flats(unit.unit))
        for unit in units
    )
    return root + pooled(inner, 2)


def _largest_gradient(units: list[Sized]) -> int:
    return max(
        sum(flat.numel * unit.dtype_bytes("compute", flat) for flat in trained_flats(unit.unit))
        for unit in units
    )


def _optim(placed: Sized, optim_words: int) -> int:
    def words(flat: FlatSpec) -> int:
        return optim_words + has_master(placed.plan, placed.rungs, flat.dtype)

    return sum(
        words(flat)
        * placed.part_numel(flat, placed.rungs.optim)
        * placed.dtype_bytes("master", flat)
        for flat in trained_flats(placed.unit)
    )
