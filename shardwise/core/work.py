"""What forward and backward of a model compute and save, by unit, as the planner sees it."""

from collections.abc import Mapping
from dataclasses import dataclass

IN_FLIGHT = 2
"""At most this many inputs of units are in buffers on their way to a tier. The last ones stay in
these buffers until backward uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Bytes of a forward that backward needs; every storage counts once in each figure."""

    total: int
    """All that autograd saves when nothing is recomputed."""
    root: int
    """What autograd saves outside the calls of units: embeddings, the head, the loss."""
    checkpoints: int
    """The inputs from which units are recomputed, except those that are in ``root``."""
    small: int
    """The checkpoints that are too small to leave memory."""
    largest_unit: int
    """What a call of a unit saves besides its inputs; the largest of all units."""
    largest_input: int
    """The inputs of a call that rest on a tier; the largest of all units."""

    def held(self, activations: str) -> int:
        """The most that is in memory, at the beginning of a unit's backward, with a setting.

        With a tier these are the inputs of one unit and those in buffers.

        >>> sizes = dict(root=10, checkpoints=40, small=4, largest_unit=30, largest_input=9)
        >>> saved = Saved(total=200, **sizes)
        >>> [saved.held(setting) for setting in ("keep", "recompute", "nvme")]
        [200, 80, 71]
        """
        if activations == "keep":
            return self.total
        if activations == "recompute":
            return self.root + self.checkpoints + self.largest_unit
        moving = (1 + IN_FLIGHT) * self.largest_input
        return self.root + self.small + self.largest_unit + moving

    @property
    def movable(self) -> int:
        """The bytes that rest on a tier if activations do."""
        return self.checkpoints - self.small


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one micro-batch on one rank."""

    tokens: int
    dtype: str
    """The dtype of compute."""
    forward_flops: Mapping[str, float]
    """Operations of the matrix products of each unit's forward, by the unit's name without tiles.
    What modules of the root compute (such as a tied head) counts as the root's. Backward has twice
    as many."""
    saved: Saved

    @property
    def flops(self) -> float:
        """Operations of forward and backward, without recomputation."""
        return 3 * sum(self.forward_flops.values())

    @property
    def input_bytes(self) -> int:
        """Of one call of a unit: the inputs that may rest on a tier, in the mean."""
        return max(0, self.saved.movable) // max(1, len(self.forward_flops) - 1)
