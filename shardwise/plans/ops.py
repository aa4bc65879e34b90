"""Operations: the vocabulary of schedules and of the records of runs.

A *trigger* is a moment of training. It sets off *operations* on units: data that says what moves,
from where to where, over which hops, how many bytes, on which lane, and what must be done first.
The runtime executes them and the simulator prices them; both know only what is in them.
"""

from dataclasses import dataclass
from enum import StrEnum

from shardwise.core.wire import Format


class Phase(StrEnum):
    """Which pass of a step this is; passes differ under gradient accumulation."""

    ONLY = "only"
    """The only micro-batch of a step without accumulation."""
    FIRST = "first"
    """The first of several micro-batches under ``no_sync``."""
    MIDDLE = "middle"
    """A further micro-batch under ``no_sync``."""
    LAST = "last"
    """The micro-batch that synchronises."""
    EVAL = "eval"
    """A forward without gradients."""

    @property
    def synchronises(self) -> bool:
        return self in (Phase.ONLY, Phase.LAST)


class Trigger(StrEnum):
    """The moments that set off operations."""

    BEGIN_FORWARD = "begin forward"
    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    END_FORWARD = "end forward"
    BEGIN_BACKWARD = "begin backward"
    BEFORE_BACKWARD = "before backward"
    BEFORE_RECOMPUTE = "before recompute"
    AFTER_RECOMPUTE = "after recompute"
    AFTER_BACKWARD = "after backward"
    FIRST_GRAD = "first gradient"
    """A unit is about to get its first gradient: it needs a buffer for its gradients."""
    GRADS_READY = "gradients ready"
    END_BACKWARD = "end backward"
    STEP = "step"

    @property
    def in_forward(self) -> bool:
        return self in _FORWARD


_FORWARD = {
    Trigger.BEGIN_FORWARD,
    Trigger.BEFORE_FORWARD,
    Trigger.AFTER_FORWARD,
    Trigger.END_FORWARD,
}


class Kind(StrEnum):
    """What an operation does."""

    FETCH = "fetch"
    """Reads this rank's shard of P from its tier."""
    GATHER = "gather"
    """All-gather: parameters climb from the held rung to rung 0, the full buffer."""
    KEEP = "keep"
    """Copies the kept rung out of the full buffer before that is freed."""
    FREE = "free"
    """Returns the full buffer to its pool."""
    DROP = "drop"
    """Drops what was kept or fetched: it is stale or not needed any more."""
    SAVE = "save"
    """Writes the inputs of a call to the tier of activations."""
    RELEASE = "release"
    """Gives back the buffers from which inputs were written."""
    LOAD = "load"
    """Reads the inputs back for the call's recomputation."""
    COLLECT = "collect"
    """Copies autograd's gradients into the unit's full gradient buffer, one by one."""
    REDUCE = "reduce"
    """Reduce-scatter: gradients descend, summed at each hop."""
    REPLICATE = "replicate"
    """Summed gradients climb back to the replicas that share them."""
    STORE = "store"
    """Writes summed gradients to their tier."""
    UPDATE = "update"
    """The optimizer updates this rank's shard of the master weights."""
    REFRESH = "refresh"
    """Copies updated parameters from the master to P's shard; they climb from OS's rung to P's."""


class Lane(StrEnum):
    """The queue that runs an operation. Each queue is in order; queues run concurrently."""

    COMPUTE = "compute"
    """The program itself."""
    TIER = "tier"
    """The threads that read and write a tier."""
    GATHER = "gather"
    REDUCE = "reduce"
    OUTER = "outer"
    """Refreshes, and the last hop of encoded reductions, beside the inner hops of later chunks."""
    UPDATE = "update"
    """The host's thread for updates beside backward."""


class Place(StrEnum):
    """Where values come from or go to."""

    FULL = "full parameters"
    KEPT = "kept parameters"
    SHARD = "parameters"
    MASTER = "master weights"
    GRADS = "full gradients"
    HELD = "held gradients"
    """Gradients accumulated under ``no_sync``, on G's rung."""
    SUMS = "summed gradients"
    """On OS's rung."""
    INPUTS = "inputs"


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
    """The wire format; None: every flat travels raw."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes that a rank moves between memory and a tier.

    Tier ``cpu`` is host memory beside a device: reads go to the device and writes leave it.
    """

    tier: str
    reads: int = 0
    writes: int = 0


def moves(*wanted: Move) -> tuple[Move, ...]:
    """Moves, each tier's together, without empty ones and those of the device.

    >>> moves(Move("nvme", 1), Move("device", 2), Move("nvme", 0, 3), Move("cpu"))
    (Move(tier='nvme', reads=1, writes=3),)
    """
    tiers = dict.fromkeys(move.tier for move in wanted if move.tier != "device")
    summed = (
        Move(
            tier,
            sum(move.reads for move in wanted if move.tier == tier),
            sum(move.writes for move in wanted if move.tier == tier),
        )
        for tier in tiers
    )
    return tuple(move for move in summed if move.reads or move.writes)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on one unit, with its hops in order."""

    kind: Kind
    unit: str
    lane: Lane = Lane.COMPUTE
    source: Place | None = None
    target: Place | None = None
    hops: tuple[Hop, ...] = ()
    moves: tuple[Move, ...] = ()
    """What it reads from tiers and writes to them, at most one entry for each tier."""
    after: tuple[Kind, ...] = ()
    """Earlier operations of the unit of these kinds must be done first."""
    copies: int = 0
    """Bytes that are copied or added within memory, without those of hops and codecs."""
    adds: tuple[bool, ...] = ()
    """For a reduction, per trained flat: whether it adds to the values in its target."""
    joins: tuple[bool, ...] = ()
    """For a reduction, per trained flat: whether held gradients are added on G's rung."""
    overlaps: bool = False
    """Whether the last hop runs on the outer lane, beside the inner hops of later chunks."""
    call: int = 0
    """For inputs of units: which call of the model's units they belong to, counted from 1."""

    @property
    def sent_bytes(self) -> int:
        return sum(hop.sent_bytes for hop in self.hops)

    def on(self, tier: str) -> Move:
        """What it moves from and to one tier."""
        return next((move for move in self.moves if move.tier == tier), Move(tier))
