"""What of a step's memory is not there together: see [Note: Coming and going] in ``memory.py``.

The peak of an accelerator is at one of four moments of backward. ``absent`` says what is not there
at each of them, by term of ``Memory``.

[Note: Temporaries of a backward]
A unit's backward frees what the unit saved while it makes gradients. A transformer block's needs
most at its activation function: the gradients of its result and of its input, each as large as
the result, which is freed by then. That is a quarter of what the block saved. By then the gradients
of the matrix after it are there, a third of the block's, and never more than half of them.
"""

from collections import Counter
from dataclasses import dataclass

from shardwise.core.work import Saved
from shardwise.plans.sized import Sized

Terms = Counter[str]
"""Bytes by term of ``Memory``."""
LOSS = 2
"""A loss needs for a moment so many times what it saves: cross entropy saves log-probabilities, and
computes them from logits and a copy of them without the last position; in backward their gradient
and that of the logits are as large."""
TEMPORARIES, GRADIENTS = 4, 2
"""Shares of what a unit saved, and of its gradients; see [Note: Temporaries of a backward]."""


@dataclass(frozen=True, slots=True)
class Absent:
    """What is not there, by term, at four moments of backward."""

    loss: Terms
    """The loss and its gradient are computed: all activations are there."""
    first: Terms
    """The first unit's backward. What autograd saved outside of units is gone by then: most of it
    is the head's and the loss's."""
    second: Terms
    """The second unit's, while the first one's gradients are reduced."""
    last: Terms
    """The last unit's: nearly all sums are made."""

    def __add__(self, other: "Absent") -> "Absent":
        return Absent(
            self.loss + other.loss,
            self.first + other.first,
            self.second + other.second,
            self.last + other.last,
        )


def nothing() -> Absent:
    return Absent(Counter(), Counter(), Counter(), Counter())


def absent_states(
    units: list[Sized], *, sums: list[int], kept: list[int], ahead: int, buffers: int, staging: int
) -> Absent:
    """Of what the plan controls; the root's first. ``sums``: bytes of gradients on the device that
    this backward makes, by unit. ``kept``: what is kept of parameters, by unit. ``ahead``: buffers
    of units that are gathered ahead. ``buffers``: of gradients. ``staging``: of sums that rest on
    a tier."""
    root = units[0]
    # The root's gradients come first (a head's) and last (an embedding's), and are reduced last.
    allowance = allowance_bytes(units)
    root_late = Counter(
        grad_buffers=root.full_bytes("reduce"),
        staging=0 if root.rests("grads", "device") else root.sums_bytes(),
        allowance=root.full_bytes("compute") // 2,
    )
    return Absent(
        loss=Counter(grads=sum(sums), grad_buffers=buffers, staging=staging, allowance=allowance),
        first=Counter(
            grads=sum(sums),
            grad_buffers=buffers,
            staging=staging,
            allowance=root_late["allowance"],
        ),
        second=root_late + Counter(grads=sum(sums) - max(sums)),
        last=Counter(kept=sum(kept) - max(kept), gathered=ahead),
    )


def absent_activations(saved: Saved, setting: str) -> Absent:
    """Of activations and what is made of them."""
    unit = min(saved.held(setting), saved.largest_unit)
    recomputed = 0 if setting == "keep" else unit
    temporaries = unit // TEMPORARIES
    gone = Counter(activations=saved.root, allowance=LOSS * saved.root)
    return Absent(
        loss=Counter(activations=recomputed, allowance=temporaries),
        first=gone,
        second=gone + Counter(activations=unit - recomputed),
        last=gone + Counter(activations=max(0, saved.held(setting) - saved.root - unit)),
    )


def allowance_bytes(units: list[Sized]) -> int:
    """Gradients that autograd holds before they are reduced: a part of a unit's, and the root's."""
    root, *inner = units
    largest = max((unit.full_bytes("compute") for unit in inner), default=0)
    return largest // GRADIENTS + root.full_bytes("compute")


def temporary_bytes(saved: Saved, setting: str) -> int:
    """What backward makes for a moment: for the gradient of the loss, which is outside of units;
    later a share of a unit's activations."""
    unit = min(saved.held(setting), saved.largest_unit)
    return LOSS * saved.root + unit // TEMPORARIES
