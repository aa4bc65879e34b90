"""What a model's passes compute and save, unit by unit: the planner's view of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass

IN_FLIGHT = 2
"""At most this many inputs of units are in buffers on their way to a tier; the last ones stay there
until backward takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Bytes that backward needs of a forward; every storage counts once in each figure."""

    total: int
    """All that autograd saves when nothing is recomputed."""
    root: int
    """What it saves outside the calls of units: embeddings, the head, the loss."""
    checkpoints: int
    """The inputs of units' calls, which these are recomputed from, unless in ``root``."""
    small: int
    """Those of the checkpoints that never leave memory."""
    largest_unit: int
    """What one call of a unit saves beside its inputs: the largest of them."""
    largest_input: int
    """The inputs of one call that rest on a tier: the largest of them."""

    def held(self, activations: str) -> int:
        """What is in memory at most, at the beginning of a unit's backward, under a setting.

        From a tier come the inputs of one unit, beside those in buffers.

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
        """What rests on a tier if activations do."""
        return self.checkpoints - self.small


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One micro-batch of one rank."""

    tokens: int
    dtype: str
    """In which it is computed."""
    forward_flops: Mapping[str, float]
    """Operations of the matrix products of each unit's forward, by the unit's name without tiles.
    What the root's modules compute (a tied head, say) is the root's. Backward has twice as many."""
    saved: Saved

    @property
    def flops(self) -> float:
        """Of forward and backward, nothing recomputed."""
        return 3 * sum(self.forward_flops.values())

    @property
    def input_bytes(self) -> int:
        """Of one call of a unit: the inputs that may rest on a tier, in the mean."""
        return max(0, self.saved.movable) // max(1, len(self.forward_flops) - 1)
