"""Operations: the words in which a schedule says what happens, and in which a run is recorded.

A *trigger* is a moment of training. It sets off *operations* on units: data that says what moves,
from where to where, over which hops, how many bytes, on which lane, and what must be over first.
The runtime executes them, the simulator prices them; neither knows anything that is not in them.
"""

from dataclasses import dataclass
from enum import StrEnum

from shardwise.core.wire import Format


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
    """A unit is about to get the first of its gradients: it needs a buffer for them."""
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
    """This rank's shard of P comes from the tier where it rests."""
    GATHER = "gather"
    """All-gather: parameters climb from the rung that is held to rung 0, the full buffer."""
    KEEP = "keep"
    """The kept rung is copied out of the full buffer, which is about to go."""
    FREE = "free"
    """The full buffer goes back to its pool."""
    DROP = "drop"
    """What is kept or was fetched goes: it is stale, or nobody needs it any more."""
    SAVE = "save"
    """The inputs of a unit's call go to the tier where activations rest."""
    LOAD = "load"
    """They come back, for the unit's backward."""
    COLLECT = "collect"
    """Autograd's gradients are copied into the unit's full gradient buffer, one by one."""
    REDUCE = "reduce"
    """Reduce-scatter: gradients descend, summed at each hop."""
    REPLICATE = "replicate"
    """Summed gradients climb back to the replicas that share them."""
    STORE = "store"
    """Summed gradients go to the tier where they rest."""
    UPDATE = "update"
    """The optimizer updates this rank's shard of the master weights."""
    REFRESH = "refresh"
    """Updated parameters go from the master to P's shard, and climb from OS's rung to P's."""


class Lane(StrEnum):
    """Which queue does an operation. Each is in order; they run beside one another."""

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
    """What micro-batches under ``no_sync`` add up, on G's rung."""
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
    """The wire format; None: every flat as it is."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on one unit, with the hops that it walks in order."""

    kind: Kind
    unit: str
    lane: Lane = Lane.COMPUTE
    source: Place | None = None
    target: Place | None = None
    hops: tuple[Hop, ...] = ()
    reads: int = 0
    """Bytes that a rank reads from ``tier``."""
    writes: int = 0
    """Bytes that a rank writes to ``tier``."""
    after: tuple[Kind, ...] = ()
    """The unit's operations of these kinds that were issued before must be over first."""
    tier: str = "device"
    crossing: tuple[int, int] = (0, 0)
    """Of an update by a host whose states rest on a disk: gradients that come from the device, and
    the new parameters that go back."""
    copies: int = 0
    """Bytes that are copied within memory, or as long to add: beside what hops and codecs do."""
    adds: tuple[bool, ...] = ()
    """Of a reduction, by trained flat: whether it adds to what its target holds."""
    joins: tuple[bool, ...] = ()
    """Of a reduction, by trained flat: whether what micro-batches have held joins on G's rung."""
    overlaps: bool = False
    """Whether the last hop travels on the outer lane, beside the inner hops of later chunks."""

    @property
    def sent_bytes(self) -> int:
        return sum(hop.sent_bytes for hop in self.hops)

    @property
    def moved_bytes(self) -> int:
        """What a rank moves between memory and a tier, both ways together."""
        return self.reads + self.writes
