"""What the parent of a benchmark and its ranks say to each other, pickled over a Unix socket.

A socket with a path works across network namespaces, so that commands never touch the links that
are measured, and a rank's end is seen at once as the end of its connection. A rank says Hello;
then it answers each Build and Drop with Ready, each Turn with Measured, each Call with Returned, or
anything with Failed.

Imports no torch.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders of a benchmark share."""

    model: str = "gpt-small"
    dtype: str = "float32"
    """Of forward, backward and the wire; weights and optimizer stay in float32."""
    seq: int = 128
    levels: str = "node=2,world=1"
    """The grid of ranks, innermost first."""
    deferred: bool = False
    """Whether our plans' models are built without memory; their weights then differ from peers'."""
    in_float32: bool = False
    """Whether bfloat16 products are computed in float32 (`matmul`)."""

    @property
    def is_mixed(self) -> bool:
        return self.dtype != "float32"


# --- from the parent ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Build:
    """Make a contender and keep it."""

    contender: str
    setting: Setting


@dataclass(frozen=True, slots=True)
class Drop:
    """A contender has had its turns: its process groups, whose threads never rest, go."""

    contender: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Train some steps, first without and then with the clock and the counters."""

    contender: str
    warmup: int
    steps: int
    drained: bool = True
    """Whether the clock runs until nothing travels any more. Otherwise it runs from the end of one
    step to the end of another while refreshes travel on, as in a long training; the counters then
    also have what the warm-up left on its way."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function on all ranks at once."""

    entry: str
    """``module:function``."""
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Leave:
    """The job is done."""


# --- from a rank --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is there."""

    rank: int
    node: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The contender is built."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What crossed an interface in one direction, by the kernel's counters."""

    num_bytes: int
    num_packets: int

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(self.num_bytes - other.num_bytes, self.num_packets - other.num_packets)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank saw in the timed steps of a turn."""

    seconds: float
    steps_s: tuple[float, ...]
    """Each step from its beginning to its end."""
    loss: float
    """Of this rank's last step."""
    sent: Counted
    """By this rank's node on its slow link, all ranks of the node together."""
    received: Counted


@dataclass(frozen=True, slots=True)
class Returned:
    """What a called function answered."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank gives up."""

    sentence: str
    trace: str
    is_mistake: bool
    """Whether the user mends it by asking for something else."""
