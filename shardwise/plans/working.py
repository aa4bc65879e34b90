"""The working memory of wire formats: payloads, chunks in flight, and what error feedback keeps."""

from dataclasses import astuple, dataclass

from shardwise.core.layout import DTYPE_BYTES, FlatSpec
from shardwise.core.wire import CAST_DTYPES, Format
from shardwise.plans.hops import chunk_columns, payload_bytes
from shardwise.plans.placed import trained_flats
from shardwise.plans.plan import format_of
from shardwise.plans.schedule import outer_step
from shardwise.plans.sized import Sized


def working_bytes(units: list[Sized], *, accumulates: bool, accelerated: bool) -> int:
    """What codecs and links need beside the states; see ``Memory.wires``."""
    return (
        _climbs(units)
        + max(_spread(unit) for unit in units)
        + _reductions(units, accumulates, accelerated)
        + sum(_residuals(unit) for unit in units)
    )


def _climbs(units: list[Sized]) -> int:
    """The largest payload of a gather and of a refresh, and the largest difference."""
    payloads: dict[str, list[int]] = {"params": [0], "optim": [0]}
    differences = [0]
    for unit in units:
        rungs, steps = unit.rungs, unit.rungs.ladder.steps
        climbs = ((0, rungs.params, "params"), (rungs.params, rungs.optim, "optim"))
        for flat in unit.unit.flats:
            for top, bottom, state in climbs:
                dtype = unit.dtype("compute", flat)
                wire = getattr(unit.plan, state).wire
                for rung in range(top, bottom):
                    format = format_of(wire, steps[rung], dtype)
                    if format is None or steps[rung].size == 1:
                        continue
                    payloads[state].append(payload_bytes(flat, rungs, rung, dtype, format))
                    if format.delta:
                        words = unit.dtype_bytes("master", flat)
                        differences.append(unit.part_numel(flat, rungs.optim) * words)
    return max(payloads["params"]) + max(payloads["optim"]) + max(differences)


def _spread(placed: Sized) -> int:
    """The largest payload of sums on the way back to replicas, unless they are sent raw."""
    rungs, wire = placed.rungs, placed.plan.grads.wire
    payloads = [0]
    for flat in trained_flats(placed.unit):
        dtype = placed.dtype("reduce", flat)
        for rung in range(rungs.optim, rungs.bottom):
            step = rungs.ladder.steps[rung]
            format = format_of(wire, step, dtype)
            if step.size > 1 and (format or dtype != placed.dtype("master", flat)):
                payloads.append(payload_bytes(flat, rungs, rung, dtype, format))
    return max(payloads)


@dataclass(frozen=True)
class _Reduction:
    """Bytes of an encoded reduction by use; memory for each use is the same for all units."""

    values: int = 0
    """Sums in float32, or what waits for the outer lane."""
    encoded: int = 0
    """Payloads of inner hops, and on an accelerator what arrives."""
    plain: int = 0
    """Values in the dtype in which an accelerator's backend sums them."""
    outer: int = 0
    """The same for the outer lane."""


def _reductions(units: list[Sized], accumulates: bool, accelerated: bool) -> int:
    """What the largest encoded reductions need, while a few chunks are in flight."""
    found = [
        _reduction(unit, flat, accumulates, accelerated)
        for unit in units
        for flat in trained_flats(unit.unit)
    ]
    return int(sum(map(max, zip(*map(astuple, found), strict=True))))


def _reduction(unit: Sized, flat: FlatSpec, accumulates: bool, accelerated: bool) -> _Reduction:
    rungs, dtype, wire = unit.rungs, unit.dtype("reduce", flat), unit.plan.grads.wire
    steps = [(i, step) for i, step in enumerate(rungs.ladder.steps) if step.size > 1]
    formats = {i: format_of(wire, step, dtype) for i, step in steps}
    if accelerated:  # hops that the backend sums in place come first, and need nothing
        while steps and _is_raw(formats[steps[0][0]], dtype):
            del formats[steps.pop(0)[0]]
    if not any(formats.values()):
        return _Reduction()
    top = steps[0][0]
    granule, rows = flat.numel // rungs.granules, rungs.granules // rungs.ladder.parts[top]
    columns = next(chunk_columns(granule, rows, accelerated=accelerated))

    def share(nbytes: int) -> int:
        return int(nbytes * columns.stop // granule)

    outer, encoded, plain = outer_step(unit.unit, rungs, unit.plan), {}, {}
    for index, format in formats.items():
        sent = share(payload_bytes(flat, rungs, index, dtype, format))
        if not accelerated:
            encoded[index] = sent if format is not None else 0
        elif _is_plain(format):
            plain[index] = sent
        else:
            encoded[index] = 2 * sent
    last = encoded.pop(outer, 0) + plain.pop(outer, 0) if outer is not None else 0
    # The outer lane's chunk and the next; and under no_sync one without that lane.
    buffers = 1 if outer is None else 2 + accumulates
    alone = accelerated and len(steps) == 1
    if alone and outer is None:
        buffers = 0  # summed at once where the sum belongs
    # What only the outer lane sums is copied for it as it is, otherwise summed once before.
    numel = unit.part_numel(flat, top if alone else top + 1)
    return _Reduction(
        values=buffers * share(numel * max(4, DTYPE_BYTES[dtype])),
        encoded=max(encoded.values(), default=0),
        plain=max(plain.values(), default=0),
        outer=last,
    )


def _is_plain(format: Format | None) -> bool:
    """Whether values travel as floats that an accelerator's backend can sum."""
    return format is None or not (format.is_blocked or format.feedback)


def _is_raw(format: Format | None, dtype: str) -> bool:
    """Whether they also have the dtype of the gradients already."""
    return _is_plain(format) and (format is None or CAST_DTYPES[format.kind] == dtype)


def _residuals(placed: Sized) -> int:
    """Bytes that error feedback keeps for every trained flat."""
    total = 0
    for step in [step for step in placed.rungs.ladder.steps if step.size > 1][-1:]:
        for flat in trained_flats(placed.unit):
            format = format_of(placed.plan.grads.wire, step, placed.dtype("reduce", flat))
            if format is not None and format.feedback:
                total += (step.size - 1) * (flat.numel // placed.rungs.granules) * 4
    return total
