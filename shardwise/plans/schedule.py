"""Every operation of a unit under a plan, as data: the one description of what a plan does.

``UnitOps`` has the operations by what sets them off. Which of them are issued when is for the
issuer to say (``order.py``), which the runtime and the simulator share; ``expected.py`` drives it
through a whole pass, for ``explain``, for the simulator and for tests.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from shardwise.core.layout import FlatSpec, UnitSpec
from shardwise.plans.hops import Sizes, hops_between, shard_bytes
from shardwise.plans.ops import Hop, Kind, Lane, Op, Place
from shardwise.plans.plan import Plan, Rungs, has_master

OPTIM_WORDS = 2
"""What the optimizer is taken to store for an element; Adam's kin have two."""

Ops = tuple[Op, ...]
Holds = tuple[bool, ...]
"""By trained flat: whether something rests there to add to."""

_HAVE_VALUES = (Kind.FETCH, Kind.GATHER, Kind.REFRESH)
"""What brings values to the full buffer."""


def trained_flats(unit: UnitSpec) -> tuple[FlatSpec, ...]:
    """The flats that have gradients and optimizer states."""
    return tuple(flat for flat in unit.flats if flat.requires_grad)


def travels(rungs: Rungs, plan: Plan) -> bool:
    """Whether a unit's parameters come and go: they rest as shards, or on another tier."""
    return rungs.params > 0 or plan.params.tier != "device"


def kept_rung(rungs: Rungs, plan: Plan, *, encloses: bool) -> int | None:
    """What stays in memory of gathered parameters after forward; None: nothing but P's shard."""
    if encloses or plan.keep == "full":
        return 0
    return rungs.keep if rungs.keep < rungs.params else None


def updates_in_windows(plan: Plan, rungs: Rungs, dtype: str) -> bool:
    """Whether the update borrows slices of what it works on, because some of it is on a tier."""
    if plan.grads.tier != "device" or plan.optim.tier != "device":
        return True
    return plan.params.tier == "nvme" and not has_master(plan, rungs, dtype)


def outer_step(unit: UnitSpec, rungs: Rungs, plan: Plan) -> int | None:
    """The last hop of an encoded reduction of several: it overlaps the inner hops of later chunks.

    None where nothing is encoded, and where replicas get the sums back: they wait for it.
    """
    ops = UnitOps(unit, rungs, plan)
    reduce = next((op for op in ops.ready() if op.kind is Kind.REDUCE), None)
    return reduce.hops[-1].step if reduce is not None and reduce.overlaps else None


class UnitOps:
    """The operations of one unit. Each is made once, when it is first asked for.

    ``encloses`` marks the root unit: its forward surrounds all others', so that its parameters stay
    gathered from the beginning of forward to the end of backward.
    """

    def __init__(
        self,
        unit: UnitSpec,
        rungs: Rungs,
        plan: Plan,
        *,
        encloses: bool = False,
        optim_words: int = OPTIM_WORDS,
    ) -> None:
        self.unit, self.name, self.rungs, self.plan = unit, unit.name, rungs, plan
        self.encloses, self.is_tile = encloses, "/" in unit.name
        self.trained = trained_flats(unit)
        self.travels = bool(unit.flats) and travels(rungs, plan)
        self.kept_rung = kept_rung(rungs, plan, encloses=encloses)
        away = plan.grads.tier != "device" or plan.optim.tier != "device"
        self.updates_early = plan.tiers.update == "backward" and away and not encloses
        """Whether the update runs beside backward; the root's gradients are its very last."""
        self._optim_words = optim_words
        self._made: dict[Hashable, Ops] = {}
        self._alike: UnitOps | None = None

    def named(self, unit: UnitSpec) -> "UnitOps":
        """The same for an alike unit, which has these operations under its own name."""
        found = UnitOps(unit, self.rungs, self.plan, encloses=self.encloses)
        found._optim_words, found._alike = self._optim_words, self
        return found

    def with_optim_words(self, count: int) -> None:
        """Learns what the optimizer really stores for an element."""
        self._optim_words = count
        self._made.clear()

    # --- parameters ---------------------------------------------------------------------------

    def gather(self, source: int | None = None, *, exact: bool = False) -> Ops:
        """How parameters get to the full buffer: from a rung that is held, or (None) from P.

        ``exact`` is for people who look at values, or change them: nothing is lost on the way.
        """
        return self._once("_gather", source, exact)

    @property
    def keep(self) -> Op:
        return self._once("_keep")[0]

    @property
    def free(self) -> Op:
        return self._once("_free")[0]

    def drop(self, what: Place) -> Op:
        """``KEPT``, or ``SHARD``: what was fetched and not gathered."""
        return self._once("_drop", what)[0]

    # --- gradients ----------------------------------------------------------------------------

    def ready(
        self, *, synchronises: bool = True, held: Holds | None = None, summed: Holds | None = None
    ) -> Ops:
        """What is done with a unit's complete gradients.

        ``held`` and ``summed`` say what rests already: accumulated by micro-batches on G's rung,
        and reduced, on OS's.
        """
        nothing = (False,) * len(self.trained)
        return self._once("_ready", synchronises, held or nothing, summed or nothing)

    def update(self) -> Ops:
        """The optimizer's update, and the way of the new values to P's rung."""
        return self._once("_update")

    @property
    def sends_differences(self) -> bool:
        """Whether a refresh tells others how the new values differ from the old."""
        return any(hop.format is not None and hop.format.delta for hop in self._climb())

    # --- inside -------------------------------------------------------------------------------

    def _once(self, make: str, *args: Hashable) -> Ops:
        key = (make, *args)
        found = self._made.get(key)
        if found is None:
            if self._alike is not None:
                found = tuple(replace(op, unit=self.name) for op in self._alike._once(make, *args))
            else:
                found = tuple(getattr(self, make)(*args))
            self._made[key] = found
        return found

    def _op(
        self,
        kind: Kind,
        lane: Lane = Lane.COMPUTE,
        source: Place | None = None,
        target: Place | None = None,
        **more: object,
    ) -> Op:
        return Op(kind, self.name, lane, source, target, **more)  # type: ignore[arg-type]

    def _sizes(self, flats: Sequence[FlatSpec], use: str) -> Sizes:
        dtype = getattr(self.plan.precision, f"{use}_dtype")
        return [(flat, dtype(flat.dtype)) for flat in flats]

    def _bytes(self, flats: Sequence[FlatSpec], use: str, rung: int) -> int:
        return shard_bytes(self._sizes(flats, use), self.rungs, rung)

    def _gather(self, source: int | None, exact: bool) -> Iterable[Op]:
        if source == 0:
            return
        rungs, plan = self.rungs, self.plan
        rung = rungs.params if source is None else source
        own = self._bytes(self.unit.flats, "compute", rung)
        if source is None and plan.params.tier != "device":
            # With P in full on the tier there is nothing to climb: it goes where it is used.
            target = Place.FULL if rung == 0 else Place.SHARD
            yield self._op(
                Kind.FETCH, Lane.TIER, Place.SHARD, target, reads=own,
                tier=plan.params.tier, after=(Kind.REFRESH,),
            )  # fmt: skip
        if rung > 0:
            sizes = self._sizes(self.unit.flats, "compute")
            wire = "" if exact else plan.params.wire
            yield self._op(
                Kind.GATHER, Lane.GATHER, Place.SHARD if source is None else Place.KEPT, Place.FULL,
                hops=_up(hops_between(sizes, rungs, 0, rung, wire)),
                copies=own, after=(Kind.FETCH, Kind.REFRESH),
            )  # fmt: skip

    def _keep(self) -> Iterable[Op]:
        assert self.kept_rung
        copies = self._bytes(self.unit.flats, "compute", self.kept_rung)
        yield self._op(
            Kind.KEEP, source=Place.FULL, target=Place.KEPT, copies=copies, after=_HAVE_VALUES
        )

    def _free(self) -> Iterable[Op]:
        yield self._op(Kind.FREE, source=Place.FULL, after=_HAVE_VALUES)

    def _drop(self, what: Place) -> Iterable[Op]:
        yield self._op(Kind.DROP, source=what)

    def _ready(self, synchronises: bool, held: Holds, summed: Holds) -> Iterable[Op]:
        if not self.trained:
            return
        grads = self._bytes(self.trained, "reduce", 0)
        yield self._op(Kind.COLLECT, target=Place.GRADS, copies=grads)
        if synchronises or self.rungs.grads == self.rungs.bottom:
            yield from self._sum(held, summed)
        else:
            yield from self._hold(held)

    def _hold(self, held: Holds) -> Iterable[Op]:
        """Under ``no_sync``: the hops stop at G's rung, where micro-batches add up."""
        rungs, tier = self.rungs, self.plan.grads.tier
        rests = self._bytes(self.trained, "master", rungs.grads)
        adding = self._bytes(_chosen(self.trained, held), "master", rungs.grads)
        hops = self._down(0, rungs.grads)
        away = tier != "device"
        yield self._op(
            Kind.REDUCE, Lane.REDUCE, Place.GRADS, Place.HELD, hops=hops, adds=held,
            # Hops write where sums are held; adding reads what they write to as well.
            copies=(0 if hops else rests) + adding // 2,
            reads=adding if away else 0, tier=tier, after=(Kind.COLLECT,),
        )  # fmt: skip
        if away:
            yield self._op(
                Kind.STORE, Lane.REDUCE, Place.HELD, Place.HELD, writes=rests,
                tier=tier, after=(Kind.REDUCE,),
            )  # fmt: skip

    def _sum(self, held: Holds, summed: Holds) -> Iterable[Op]:
        """The hops go on to the bottom, so that each element is summed in exactly one place.

        Replicas of OS's shard get it back from there: all of them the same bits.
        """
        rungs, tier = self.rungs, self.plan.grads.tier
        joins = held if rungs.grads != rungs.bottom else (False,) * len(held)
        joining = self._bytes(_chosen(self.trained, joins), "master", rungs.grads)
        adding = self._bytes(_chosen(self.trained, summed), "master", rungs.optim)
        rests = self._bytes(self.trained, "master", rungs.optim)
        hops, away = self._down(0, rungs.bottom), tier != "device"
        replicates = rungs.optim != rungs.bottom
        overlaps = not replicates and len(hops) > 1 and any(hop.format for hop in hops)
        # Alone, a rank sums piece by piece on the way to a disk: no hop needs sums as a whole.
        in_pieces = tier == "nvme" and rungs.bottom == 0
        inner = [hop for hop in hops if hop.step < rungs.grads]
        yield self._op(
            Kind.REDUCE, Lane.REDUCE, Place.GRADS, Place.SUMS, hops=hops, adds=summed, joins=joins,
            # What was held is added to, and goes back to where it travels on from.
            copies=adding // 2 + joining // 2 + joining + (0 if inner else joining),
            reads=joining + adding if away else 0, writes=rests if in_pieces else 0,
            tier=tier, after=(Kind.COLLECT,), overlaps=overlaps,
        )  # fmt: skip
        if replicates:
            yield self._op(
                Kind.REPLICATE, Lane.REDUCE, Place.SUMS, Place.SUMS,
                hops=_up(self._down(rungs.optim, rungs.bottom)), after=(Kind.REDUCE,),
            )  # fmt: skip
        if away and not in_pieces:
            yield self._op(
                Kind.STORE, Lane.OUTER if overlaps else Lane.REDUCE, Place.SUMS, Place.SUMS,
                writes=rests, tier=tier, after=(Kind.REDUCE, Kind.REPLICATE),
            )  # fmt: skip

    def _down(self, top: int, bottom: int) -> tuple[Hop, ...]:
        sizes = self._sizes(self.trained, "reduce")
        return hops_between(sizes, self.rungs, top, bottom, self.plan.grads.wire)

    def _climb(self) -> tuple[Hop, ...]:
        """The hops of a refresh."""
        rungs, sizes = self.rungs, self._sizes(self.trained, "compute")
        if not self.trained or rungs.params == rungs.optim:
            return ()
        return _up(hops_between(sizes, rungs, rungs.params, rungs.optim, self.plan.optim.wire))

    def _update(self) -> Iterable[Op]:
        if not self.trained:
            return
        moves = _UpdateMoves()
        for flat in self.trained:
            self._move(flat, moves)
        streams = self.plan.moving_tier is not None
        yield self._op(
            Kind.UPDATE, Lane.UPDATE if self.updates_early else Lane.COMPUTE,
            Place.SUMS, Place.MASTER, reads=moves.reads, writes=moves.writes,
            tier=self.plan.moving_tier or "device", crossing=(moves.out, moves.back),
            copies=moves.copies if streams else 0,
            after=(Kind.REDUCE, Kind.REPLICATE, Kind.STORE),
        )  # fmt: skip
        refresh = self._refresh()
        if refresh is not None:
            yield refresh

    def _move(self, flat: FlatSpec, moves: "_UpdateMoves") -> None:
        """What the update of a flat reads from tiers and writes there.

        States in host memory are updated where they are: only gradients come, and the new P leaves.
        Those on a disk are updated in host memory as well, where gradients and P may be already.
        """
        plan, rungs = self.plan, self.rungs
        params, grads, optim = plan.params.tier, plan.grads.tier, plan.optim.tier
        separate = has_master(plan, rungs, flat.dtype)
        word = self._bytes([flat], "master", rungs.optim)
        own = self._bytes([flat], "compute", rungs.optim)
        windowed = updates_in_windows(plan, rungs, flat.dtype)
        copies_out = separate and windowed and not self.sends_differences
        moves.copies += own if copies_out else 0
        if optim == "cpu":
            moves.writes += word if grads == "device" else 0
            moves.reads += own if params == "device" else 0
            return
        if optim == "nvme":
            moves.reads += (self._optim_words + separate) * word
            moves.writes += (self._optim_words + separate) * word
            moves.out += word if grads == "device" else 0
            moves.back += own if params == "device" else 0
        here = {"device", "cpu"} if optim == "nvme" else {"device"}
        moves.reads += word if grads not in here else 0
        if params not in here:
            moves.reads += own if not separate else 0  # P itself is the master
            moves.writes += own if not separate or copies_out else 0

    def _refresh(self) -> Op | None:
        plan, rungs, hops = self.plan, self.rungs, self._climb()
        away, by_difference = plan.params.tier != "device", self.sends_differences
        reads = writes = copies = 0
        works = masters = False
        for flat in self.trained:
            separate = has_master(plan, rungs, flat.dtype)
            windowed = updates_in_windows(plan, rungs, flat.dtype)
            own_is_new = windowed and not by_difference
            if not hops and (own_is_new or not separate):
                continue  # the update itself wrote P
            works = True
            shard = self._bytes([flat], "compute", rungs.params)
            from_master = by_difference or (separate and not own_is_new)
            if away:
                reads += shard if by_difference or own_is_new or not separate else 0
                writes += shard
            if from_master:
                masters = True
                copies += self._bytes([flat], "compute", rungs.optim)
                if plan.optim.tier != "device":
                    reads += self._bytes([flat], "master", rungs.optim)
        if not works:
            return None
        return self._op(
            Kind.REFRESH, Lane.OUTER if hops else Lane.COMPUTE,
            Place.MASTER if masters else Place.SHARD, Place.SHARD if self.travels else Place.FULL,
            hops=hops, reads=reads, writes=writes, copies=copies,
            tier=plan.params.tier if away else plan.optim.tier, after=(Kind.UPDATE,),
        )  # fmt: skip


class _UpdateMoves:
    """Bytes of an update, summed over flats."""

    def __init__(self) -> None:
        self.reads = self.writes = self.out = self.back = self.copies = 0


def _up(hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
    return tuple(reversed(hops))


def _chosen(flats: Sequence[FlatSpec], chosen: Holds) -> list[FlatSpec]:
    return [flat for flat, wanted in zip(flats, chosen, strict=True) if wanted]
