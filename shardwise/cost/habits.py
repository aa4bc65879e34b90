"""How a system runs the steps of a plan: ours, or another one whose figures are predicted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Habits:
    """What other systems do otherwise."""

    flat: bool = False
    """One collective over all ranks of a group, whatever links it crosses."""
    all_reduces: bool = False
    """A rank gets the sums of all gradients of its parameters, and drops what others update."""
    waits: bool = False
    """The next step begins when all parameters are refreshed."""
    late: bool = False
    """The last backward of a step is over before its gradients are reduced."""


OURS = Habits()
