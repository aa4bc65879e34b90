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
    return _bytes(_at_once(sizes, at_once))


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
    """Of the host: what moves between memory and a disk.

    Buffers are reused by size, and those of passes serve the update as well where sizes are equal.
    """
    fetched = [
        unit.compute_bytes(unit.rungs.params)
        for unit in units[1:]
        if unit.rests("params", "nvme") and unit.rungs.params > 0
    ]
    away = [unit for unit in units if unit.rests("grads", "nvme") and not unit.sums_in_pieces]
    summed = {unit.sums_bytes() for unit in away}
    reading = _at_once(fetched, max(1, 2 * plan.prefetch))
    updating = _windows(units, plan.tiers.window_numel, optim_words)
    beside = unpinned_bytes(units, plan, optim_words)
    if updating or summed:
        moving = (reading + Counter(summed)) | updating
        return _bytes(moving) + max(WRITES_IN_FLIGHT_BYTES, *summed, 0) + beside
    if not fetched:
        return 0
    # What is updated elsewhere comes to be written when nothing is read: in the same buffers.
    writing = max(fetched) + max(max(fetched), WRITES_IN_FLIGHT_BYTES)
    return max(_bytes(reading), writing) + beside


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


def _windows(units: list[Sized], size: int, optim_words: int) -> Counter[int]:
    """Buffers of windows for all states that rest on the disk: two windows of the same numel."""
    found: Counter[int] = Counter()
    windows: Counter[tuple[int, int, int, int, int]] = Counter()
    for unit in units:
        for flat in trained_flats(unit.unit):
            if not updates_in_windows(unit.plan, unit.rungs, flat.dtype):
                continue
            separate = has_master(unit.plan, unit.rungs, flat.dtype)
            words = (optim_words + separate) * unit.rests("optim", "nvme")
            words += unit.rests("grads", "nvme")
            word, copy = unit.dtype_bytes("master", flat), unit.dtype_bytes("compute", flat)
            kind = word, words, copy, int(unit.rests("params", "nvme"))
            full, tail = divmod(unit.part_numel(flat, unit.rungs.optim), size)
            windows[size, *kind] += full
            windows[tail, *kind] += 1
    for (numel, word, words, copy, copies), count in windows.items():
        found[numel * word] += min(count, 2) * words
        found[numel * copy] += min(count, 2) * copies
    return Counter({size: count for size, count in found.items() if size and count})


def _at_once(sizes: list[int], count: int) -> Counter[int]:
    """How many buffers of each size are lent at most."""
    return Counter({size: min(there, count) for size, there in Counter(sizes).items()})


def _bytes(buffers: Counter[int]) -> int:
    return sum(size * count for size, count in buffers.items())
