"""What a step does under a plan, as data: triggers, and the operations that they set off.

One schedule, two interpreters: at run time hooks fire the triggers and the runtime executes the
operations; ``explain`` (and the simulator) walk the expected order and price them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shardwise.core.layout import DTYPE_BYTES, FlatSpec, ModelSpec, UnitSpec
from shardwise.core.topology import Topology
from shardwise.core.wire import BLOCKS, Format, wire_bytes
from shardwise.plans.plan import Plan, Rungs, format_of, has_master, resolve, untiled

REDUCTIONS_IN_FLIGHT = 2
"""At most this many units' full gradients travel while another one is being filled."""


class Phase(StrEnum):
    """Which pass of a step this is; accumulation makes the difference."""

    ONLY = "only"
    """The one micro-batch of a step without accumulation."""
    FIRST = "first"
    """The first of several micro-batches under ``no_sync``."""
    MIDDLE = "middle"
    """A further micro-batch under ``no_sync``."""
    LAST = "last"
    """The micro-batch that synchronises."""
    EVAL = "eval"
    """A forward without backward."""

    @property
    def synchronises(self) -> bool:
        return self in (Phase.ONLY, Phase.LAST)

    @property
    def opens_step(self) -> bool:
        return self in (Phase.ONLY, Phase.FIRST)


class Trigger(StrEnum):
    """The moments at which operations are set off."""

    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"
    GRADS_READY = "gradients ready"
    STEP = "step"


class Kind(StrEnum):
    """What an operation does."""

    FETCH = "fetch"
    """P's part comes from its tier."""
    GATHER = "gather"
    """Parameters climb from the rung that is held to rung 0."""
    KEEP = "keep"
    """The kept rung is copied out before the full buffer goes."""
    FREE = "free"
    """The full buffer goes back to its pool."""
    REDUCE = "reduce"
    """Gradients descend, summed at each hop."""
    SPREAD = "spread"
    """Gradients that replicas share climb back from the bottom to OS's rung."""
    STORE = "store"
    """Reduced gradients go to their tier; what rests there already is read and added first."""
    STEP = "step"
    """The optimizer updates OS's part."""
    REFRESH = "refresh"
    """Updated parameters climb from OS's rung to P's."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange between the ``size`` ranks of a step of the ladder."""

    step: int
    """Index of the ladder's step: the hop joins rung ``step`` and rung ``step + 1``."""
    level: str
    size: int
    sent_bytes: int
    """What each rank sends (and receives) on this hop."""
    format: Format | None = None
    """The wire format; None: every flat as it is."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on one unit, with the hops that it walks in order."""

    kind: Kind
    unit: str
    hops: tuple[Hop, ...] = ()
    moved_bytes: int = 0
    """What a rank moves between memory and the tier where the state rests, both ways together."""
    written_bytes: int = 0
    """Of an update: what of it leaves the device's memory for the tier."""
    crossing_bytes: tuple[int, int] = (0, 0)
    """Of an update by a host whose states rest on a disk: gradients that come from the device, and
    the new parameters that go back."""

    @property
    def sent_bytes(self) -> int:
        return sum(hop.sent_bytes for hop in self.hops)


@dataclass(frozen=True, slots=True)
class Event:
    """A trigger on a unit, and what it sets off; ``unit`` is empty for the step."""

    trigger: Trigger
    unit: str
    ops: tuple[Op, ...]


UnitOps = dict[Trigger, tuple[Op, ...]]


def unit_ops(unit: UnitSpec, rungs: Rungs, plan: Plan, phase: Phase, *, encloses: bool) -> UnitOps:
    """The operations of one unit in one phase.

    ``encloses`` marks the root unit: its forward surrounds all others', so that its parameters
    stay gathered from the beginning of forward to the end of backward.
    """
    kept = kept_rung(rungs, plan, encloses=encloses)
    source = None
    if plan.keep_until == "step" and not phase.opens_step and phase is not Phase.EVAL:
        source = kept
    ops: UnitOps = dict.fromkeys(Trigger, ())
    if not unit.flats:
        return ops
    if travels(rungs, plan):
        ops[Trigger.BEFORE_FORWARD] = gather_ops(unit, rungs, plan, source)
        ops[Trigger.AFTER_FORWARD] = _after_forward(unit, source, kept, phase)
        if phase is not Phase.EVAL:
            ops[Trigger.BEFORE_BACKWARD] = gather_ops(unit, rungs, plan, kept)
            if not (plan.keep_until == "step" and kept == 0 and not phase.synchronises):
                ops[Trigger.AFTER_BACKWARD] = (Op(Kind.FREE, unit.name),)
    if phase is not Phase.EVAL and (trained := trained_flats(unit)):
        ops[Trigger.GRADS_READY] = _grads_ready(unit, trained, rungs, plan, phase)
        if phase.synchronises:
            read, written, crossing = _step_moves(trained, rungs, plan)
            update = Op(Kind.STEP, unit.name, (), read + written, written, crossing)
            when = Trigger.GRADS_READY if _updates_early(plan, encloses) else Trigger.STEP
            ops[when] += (update,)
            ops[Trigger.STEP] += _refresh(unit, trained, rungs, plan)
    return ops


def schedule(
    plan: Plan,
    model: ModelSpec,
    topology: Topology,
    phase: Phase = Phase.ONLY,
    order: Sequence[str] | None = None,
) -> tuple[Event, ...]:
    """The expected events of one pass (and, where it synchronises, the step), in order.

    ``order`` names the units in the order of their forward; the default is the module tree's.
    The root unit is the model's first.
    """
    root = model.units[0].name
    units = {unit.name: unit for unit in model.units}
    inner = [name for name in (order or model.order) if name != root]
    ops = dict(_all_ops(plan, model, topology, phase))

    for name in _recomputed(inner, units, plan):
        gather = ops[name][Trigger.BEFORE_BACKWARD]
        if gather:
            ops[name][Trigger.BEFORE_BACKWARD] = (*gather, Op(Kind.FREE, name), *gather)

    def fire(trigger: Trigger, name: str) -> Event:
        return Event(trigger, name, ops[name][trigger])

    events = [fire(Trigger.BEFORE_FORWARD, root)]
    for name in inner:
        events += [fire(Trigger.BEFORE_FORWARD, name), fire(Trigger.AFTER_FORWARD, name)]
    events.append(fire(Trigger.AFTER_FORWARD, root))
    if phase is Phase.EVAL:
        return tuple(events)
    events.append(fire(Trigger.BEFORE_BACKWARD, root))
    reached = reached_units(model)
    for name in (name for name in reversed(inner) if name in reached):
        for trigger in (Trigger.BEFORE_BACKWARD, Trigger.GRADS_READY, Trigger.AFTER_BACKWARD):
            events.append(fire(trigger, name))
    events += [fire(Trigger.GRADS_READY, root), fire(Trigger.AFTER_BACKWARD, root)]
    if phase.synchronises:
        steps = tuple(
            op for name in dict.fromkeys((root, *inner)) for op in ops[name][Trigger.STEP]
        )
        events.append(Event(Trigger.STEP, "", steps))
    return tuple(events)


def _all_ops(
    plan: Plan, model: ModelSpec, topology: Topology, phase: Phase
) -> Iterator[tuple[str, UnitOps]]:
    """The operations of every unit; alike units of a plan without exceptions differ in name only.

    A search looks at thousands of schedules of models with dozens of alike blocks.
    """
    alike: dict[tuple[Any, ...], UnitOps] = {}
    for index, unit in enumerate(model.units):
        name, shape = unit.name, unit.shape
        found = alike.get(shape) if index and not plan.overrides else None
        if found is None:
            rungs, own = resolve(plan, topology, name), plan.for_unit(name)
            found = unit_ops(unit, rungs, own, phase, encloses=index == 0)
            if index:
                alike[shape] = found
        else:
            found = {
                trigger: tuple(replace(op, unit=name) for op in some)
                for trigger, some in found.items()
            }
        yield name, found


def _recomputed(order: Sequence[str], units: dict[str, UnitSpec], plan: Plan) -> Iterator[str]:
    """Tiles that backward gathers twice: for their block's recomputation, and for themselves.

    The gradient that sets off the recomputation has the last one gathered already, and those before
    it are used again so soon that one gather serves both uses.
    """
    blocks: dict[str, list[str]] = {}
    for name in order if plan.activations != "keep" else ():
        if units[name].inside:
            blocks.setdefault(untiled(name), []).append(name)
    for tiles in blocks.values():
        for later, name in enumerate(reversed(tiles)):
            if 2 * later - 1 > max(plan.prefetch, 1):
                yield name


def reached_units(model: ModelSpec) -> set[str]:
    """The units that backward comes to: the root, and all from the first on that is trained.

    The root is taken to be first as a whole: where any of it is trained, all others are reached.
    """
    root, *inner = model.units
    first = 0 if trained_flats(root) else len(inner)
    for index, unit in enumerate(inner[:first]):
        if trained_flats(unit):
            first = index
            break
    return {root.name, *(unit.name for unit in inner[first:])}


def trained_flats(unit: UnitSpec) -> tuple[FlatSpec, ...]:
    """The flats that have gradients and optimizer states."""
    return tuple(flat for flat in unit.flats if flat.requires_grad)


def travels(rungs: Rungs, plan: Plan) -> bool:
    """Whether a unit's parameters come and go: they rest in parts, or on another tier."""
    return rungs.params > 0 or plan.params.tier != "device"


def kept_rung(rungs: Rungs, plan: Plan, *, encloses: bool) -> int | None:
    """What stays in memory of gathered parameters after forward; None: nothing but P itself."""
    if encloses or plan.keep == "full":
        return 0
    return rungs.keep if rungs.keep < rungs.params else None


def _after_forward(
    unit: UnitSpec, source: int | None, kept: int | None, phase: Phase
) -> tuple[Op, ...]:
    free = Op(Kind.FREE, unit.name)
    if phase is Phase.EVAL:
        return (free,)
    if kept == 0:
        return ()
    # Gathered from the kept rung, or from P's own: nothing new to keep.
    return (free,) if kept == source else (Op(Kind.KEEP, unit.name), free)


def _grads_ready(
    unit: UnitSpec, flats: tuple[FlatSpec, ...], rungs: Rungs, plan: Plan, phase: Phase
) -> tuple[Op, ...]:
    precision, wire = plan.precision, plan.grads.wire
    sizes = [(flat, precision.reduce_dtype(flat.dtype)) for flat in flats]
    away = plan.grads.tier != "device"
    masters = [(flat, precision.master_dtype(flat.dtype)) for flat in flats]
    held = part_bytes(masters, rungs, rungs.grads)
    if not phase.synchronises:
        hold = Op(Kind.REDUCE, unit.name, _hops(sizes, rungs, 0, rungs.grads, wire))
        if not away:
            return (hold,)
        moves = 1 if phase is Phase.FIRST else 2
        return (hold, Op(Kind.STORE, unit.name, moved_bytes=moves * held))
    # Replicas of OS's part reduce on to the bottom and gather back, so that each element is
    # summed in exactly one place and every replica gets the same bits.
    ops = [Op(Kind.REDUCE, unit.name, _hops(sizes, rungs, 0, rungs.bottom, wire))]
    if rungs.optim != rungs.bottom:
        up = tuple(reversed(_hops(sizes, rungs, rungs.optim, rungs.bottom, wire)))
        ops.append(Op(Kind.SPREAD, unit.name, up))
    if away:
        moved = part_bytes(masters, rungs, rungs.optim)
        if phase is Phase.LAST:  # what was accumulated is read, and outside OS's rung written once
            moved += held if rungs.grads == rungs.bottom else 2 * held
        ops.append(Op(Kind.STORE, unit.name, moved_bytes=moved))
    return tuple(ops)


def _updates_early(plan: Plan, encloses: bool) -> bool:
    """Whether a unit is updated while backward goes on; the root's gradients are its very last."""
    away = any(state.tier != "device" for state in (plan.grads, plan.optim))
    return plan.tiers.update == "backward" and away and not encloses


def _refresh(
    unit: UnitSpec, flats: tuple[FlatSpec, ...], rungs: Rungs, plan: Plan
) -> tuple[Op, ...]:
    if rungs.params == rungs.optim:
        return ()
    sizes = [(flat, plan.precision.compute_dtype(flat.dtype)) for flat in flats]
    climb = tuple(reversed(_hops(sizes, rungs, rungs.params, rungs.optim, plan.optim.wire)))
    # What others updated arrives beside the own elements, and both go to P's tier.
    away = plan.params.tier != "device"
    moved = 2 * part_bytes(sizes, rungs, rungs.params) if away else 0
    return (Op(Kind.REFRESH, unit.name, climb, moved),)


OPTIM_WORDS = 2
"""What the optimizer is taken to store for an element; Adam's kin have two."""


def _step_moves(
    flats: tuple[FlatSpec, ...], rungs: Rungs, plan: Plan
) -> tuple[int, int, tuple[int, int]]:
    """What an update reads from tiers and writes there: states and master, gradients, P; and what
    crosses between device and host beside that.

    States in host memory are updated where they are: only gradients come, and the new P leaves.
    Those on a disk are updated in host memory as well, where gradients and P may be already.
    """
    params, grads, optim = (getattr(plan, state).tier for state in ("params", "grads", "optim"))
    read = written = out = back = 0
    for flat in flats:
        separate = has_master(plan, rungs, flat.dtype)
        word = part_bytes([(flat, plan.precision.master_dtype(flat.dtype))], rungs, rungs.optim)
        own = part_bytes([(flat, plan.precision.compute_dtype(flat.dtype))], rungs, rungs.optim)
        if optim == "cpu":
            written += word if grads == "device" else 0
            read += own if params == "device" else 0
            continue
        if optim == "nvme":
            read += (OPTIM_WORDS + separate) * word
            written += (OPTIM_WORDS + separate) * word
            out += word if grads == "device" else 0
            back += own if params == "device" else 0
        here = {"device", "cpu"} if optim == "nvme" else {"device"}
        read += word if grads not in here else 0
        if params not in here:
            written += own
            read += 0 if separate else own
    return read, written, (out, back)


def part_bytes(sizes: Sequence[tuple[FlatSpec, str]], rungs: Rungs, rung: int) -> int:
    """What a rank has of some flats on a rung."""
    return sum(payload_bytes(flat, rungs, rung, dtype, None) for flat, dtype in sizes)


def gather_ops(
    unit: UnitSpec, rungs: Rungs, plan: Plan, source: int | None, *, exact: bool = False
) -> tuple[Op, ...]:
    """How parameters come to the full buffer: from a rung that is held, or (None) from P itself.

    ``exact`` is for people who look at values, or change them: nothing is lost on the way.
    """
    if source == 0:
        return ()
    ops = []
    sizes = [(flat, plan.precision.compute_dtype(flat.dtype)) for flat in unit.flats]
    if source is None and plan.params.tier != "device":
        fetched = part_bytes(sizes, rungs, rungs.params)
        ops.append(Op(Kind.FETCH, unit.name, moved_bytes=fetched))
    start = rungs.params if source is None else source
    if start > 0:
        wire = "" if exact else plan.params.wire
        hops = tuple(reversed(_hops(sizes, rungs, 0, start, wire)))
        ops.append(Op(Kind.GATHER, unit.name, hops))
    return tuple(ops)


def outer_step(unit: UnitSpec, rungs: Rungs, plan: Plan) -> int | None:
    """The last hop of an encoded reduction of several: it overlaps the inner hops of later chunks.

    None where nothing is encoded, and where replicas get the sums back: they wait for it.
    """
    trained = trained_flats(unit)
    ready = _grads_ready(unit, trained, rungs, plan, Phase.ONLY) if trained else ()
    spreads = any(op.kind is Kind.SPREAD for op in ready)
    hops = ready[0].hops if ready and not spreads else ()
    return hops[-1].step if len(hops) > 1 and any(hop.format for hop in hops) else None


CHUNK_NUMEL = 1 << 22
"""Elements of a chunk of an encoded reduction: long for the link, short enough to overlap."""


LEAST_COLUMNS = 1 << 15
"""Elements of a chunk that any one rank gets, at least: with many ranks chunks grow, because
messages of a few kilobytes would cost a link its latency and nothing else."""


def chunk_numel(rows: int) -> int:
    """Elements of a chunk of so many granules."""
    return max(CHUNK_NUMEL, rows * LEAST_COLUMNS)


def chunk_columns(granule: int, rows: int) -> Iterator[slice]:
    """Cuts granules so that ``rows`` of them are not much longer than a chunk.

    >>> [next(chunk_columns(1 << 24, rows)).stop for rows in (4, 64, 1024)]
    [1048576, 65536, 32768]
    """
    width = max(1, chunk_numel(rows) // rows // BLOCKS[-1]) * BLOCKS[-1]  # which cuts no block
    for start in range(0, granule, width):
        yield slice(start, min(start + width, granule))


def payload_bytes(
    flat: FlatSpec, rungs: Rungs, rung: int, dtype: str, format: Format | None
) -> int:
    """One part of a flat on a rung, as it travels."""
    parts = rungs.ladder.parts[rung]
    if format is None:
        return flat.numel // parts * DTYPE_BYTES[dtype]
    return rungs.granules // parts * wire_bytes(format, flat.numel // rungs.granules)


def _hops(
    sizes: Sequence[tuple[FlatSpec, str]], rungs: Rungs, top: int, bottom: int, wire: str
) -> tuple[Hop, ...]:
    """The hops between two rungs, from the top down."""
    hops = []
    for index in range(top, bottom):
        step = rungs.ladder.steps[index]
        if step.size == 1:
            continue
        formats = [format_of(wire, step, dtype) for _, dtype in sizes]
        part_bytes = sum(
            payload_bytes(flat, rungs, index + 1, dtype, format)
            for (flat, dtype), format in zip(sizes, formats, strict=True)
        )
        sent = (step.size - 1) * part_bytes
        hops.append(Hop(index, step.level, step.size, sent, next(filter(None, formats), None)))
    return tuple(hops)
