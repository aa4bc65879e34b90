"""The messages between the parent of a benchmark and its ranks, pickled over a Unix socket.

A socket with a path works across network namespaces, so commands never use the links that are
measured, and the end of a rank is noticed at once as the end of its connection. A rank sends Hello;
then it answers each Build and Drop with Ready, each Turn with Measured, each Call with Returned, or
any of them with Failed.

Imports no torch.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders of a benchmark share."""

    model: str = "gpt-small"
    dtype: str = "float32"
    """Dtype of forward, backward and transfers; weights and optimizer stay in float32."""
    seq: int = 128
    levels: str = "node=2,world=1"
    """The grid of ranks, innermost first."""
    deferred: bool = False
    """Whether our models are built without memory; their weights then differ from peers'."""
    in_float32: bool = False
    """Whether bfloat16 products are computed in float32 (`matmul`)."""

    @property
    def is_mixed(self) -> bool:
        return self.dtype != "float32"


# --- from the parent ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Build:
    """Build a contender and keep it."""

    contender: str
    setting: Setting


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove a contender with its process groups, whose threads never rest."""

    contender: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Train some steps, first untimed, then with the clock and the counters."""

    contender: str
    warmup: int
    steps: int
    drained: bool = True
    """Whether the clock runs until all communication has ended. Otherwise it runs from the end of
    one step to the end of another while refreshes continue, as in a long training; the counters
    then also include what the warm-up left in flight."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function on all ranks at once."""

    entry: str
    """``module:function``."""
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Leave:
    """End the job."""


# --- from a rank --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank has started."""

    rank: int
    node: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The contender is built."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What crossed an interface in one direction, from the kernel's counters."""

    num_bytes: int
    num_packets: int

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(self.num_bytes - other.num_bytes, self.num_packets - other.num_packets)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank measured in the timed steps of a turn."""

    seconds: float
    steps_s: tuple[float, ...]
    """Seconds of each step."""
    loss: float
    """This rank's loss in the last step."""
    sent: Counted
    """What this rank's node sent on its slow link, all ranks of the node together."""
    received: Counted


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a called function."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank failed."""

    sentence: str
    trace: str
    is_mistake: bool
    """Whether the user corrects it by a different request."""
