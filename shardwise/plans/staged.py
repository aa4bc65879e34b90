"""Buffers between tiers: of the host, beside a disk or a device, and of the device itself."""

from collections import Counter

from shardwise.plans.placed import trained_flats, updates_in_windows
from shardwise.plans.plan import Plan, has_master
from shardwise.plans.sized import Sized

WRITES_IN_FLIGHT_BYTES = 1 << 26
"""Limit of all writes to a disk in flight; a single larger write is always allowed."""
DISK_SCRATCH_BYTES = 32 << 20
"""Memory of the disk's threads for data that does not begin or end on a page: four blocks of 8 MiB
(``tier/aio.py``)."""


def pooled(sizes: list[int], at_once: int) -> int:
    """Bytes of a pool that lends at most ``at_once`` buffers of each size."""
    return sum(size * min(count, at_once) for size, count in Counter(sizes).items())


def on_device_bytes(units: list[Sized], *, accumulates: bool) -> int:
    """Of an accelerator: shards that rest elsewhere, while hops work on them, and those on their
    way from an update on the device. One of each size."""
    return sum(_sums_on_device(units, accumulates) | _params_on_device(units))


def sums_on_device_bytes(units: list[Sized], *, accumulates: bool) -> int:
    """The part of it that only backward needs."""
    return sum(_sums_on_device(units, accumulates) - _params_on_device(units))


def _sums_on_device(units: list[Sized], accumulates: bool) -> set[int]:
    away = [u for u in units if not u.rests("grads", "device") and not u.sums_in_pieces]
    return {u.sums_bytes() for u in away} | {u.held_bytes() for u in away if accumulates}


def _params_on_device(units: list[Sized]) -> set[int]:
    return {
        unit.compute_bytes(unit.rungs.params)
        for unit in units
        if not unit.rests("params", "device")
        and (unit.rungs.params != unit.rungs.optim or unit.rests("optim", "device"))
    }


def beside_device_bytes(units: list[Sized], plan: Plan) -> int:
    """Of its host: windows of gradients that come for the update, and of parameters that leave."""
    found = [0]
    for unit in units:
        if unit.rests("optim", "device"):
            continue
        for flat in trained_flats(unit.unit):
            numel = min(plan.tiers.window_numel, unit.part_numel(flat, unit.rungs.optim))
            word, copy = unit.dtype_bytes("master", flat), unit.dtype_bytes("compute", flat)
            comes = 2 * numel * word if unit.rests("grads", "device") else 0
            found.append(comes + (2 * numel * copy if unit.rests("params", "device") else 0))
    return max(found)


def staging_bytes(units: list[Sized], plan: Plan, optim_words: int) -> int:
    """Of the host: what moves between memory and a disk."""
    fetched = [
        unit.compute_bytes(unit.rungs.params)
        for unit in units[1:]
        if unit.rests("params", "nvme") and unit.rungs.params > 0
    ]
    reading = pooled(fetched, max(1, 2 * plan.prefetch))
    away = [unit for unit in units if unit.rests("grads", "nvme")]
    largest = max((unit.sums_bytes() for unit in away if not unit.sums_in_pieces), default=0)
    windows = max(_window(unit, plan.tiers.window_numel, optim_words) for unit in units)
    beside = unpinned_bytes(units, plan, optim_words)
    if windows or largest:
        writing = max(largest, WRITES_IN_FLIGHT_BYTES)
        return reading + largest + 2 * windows + writing + beside
    if not fetched:
        return 0
    # What is updated elsewhere comes to be written when nothing is read: in the same buffers.
    return max(reading, max(fetched) + max(max(fetched), WRITES_IN_FLIGHT_BYTES)) + beside


def unpinned_bytes(units: list[Sized], plan: Plan, optim_words: int) -> int:
    """The part of it that no copy of a device uses: memory of the disk's threads, and states that
    the optimizer has just created."""
    if not any(
        unit.rests(state, "nvme") for unit in units for state in ("params", "grads", "optim")
    ):
        return 0
    made = max(_made_states(unit, plan.tiers.window_numel, optim_words) for unit in units)
    return made + DISK_SCRATCH_BYTES


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
        if not updates_in_windows(placed.plan, placed.rungs, flat.dtype):
            continue
        numel = min(window_numel, placed.part_numel(flat, placed.rungs.optim))
        word, copy = placed.dtype_bytes("master", flat), placed.dtype_bytes("compute", flat)
        separate = has_master(placed.plan, placed.rungs, flat.dtype)
        each = (optim_words + separate) * word if placed.rests("optim", "nvme") else 0
        each += word if placed.rests("grads", "nvme") else 0
        each += copy if placed.rests("params", "nvme") else 0
        largest = max(largest, numel * each)
    return largest
