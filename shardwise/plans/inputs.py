"""Inputs of units' calls on a tier: when they go there, and when they come back.

Under ``activations = "cpu"`` or ``"nvme"`` the inputs that a unit is recomputed from are written
after its forward. Backward reads them one call ahead: while one call is recomputed, the inputs of
the call before it are on their way. What is still being written has its values in a buffer, so that
no load waits for a save.
"""

from shardwise.plans.ops import Kind, Lane, Op, Place
from shardwise.plans.plan import Plan


class Inputs:
    """The inputs that rest on a tier; ``nbytes`` is what one call has.

    The runtime does not issue these operations yet: its hooks of autograd move the very tensors
    that autograd saves (``runtime/activations/offload.py``), by the same rule.
    """

    def __init__(self, plan: Plan, nbytes: int) -> None:
        self._tier, self._nbytes = plan.activations, nbytes
        self._resting: list[str] = []
        """Units by call, in the order of forward."""
        self._coming: list[str] = []

    def save(self, unit: str) -> tuple[Op, ...]:
        """After the forward of a call."""
        if not self._moves:
            return ()
        self._resting.append(unit)
        return (
            Op(
                Kind.SAVE, unit, Lane.TIER, target=Place.INPUTS,
                writes=self._nbytes, tier=self._tier,
            ),
        )  # fmt: skip

    def load(self, unit: str) -> tuple[Op, ...]:
        """Before a call is recomputed: its own inputs, and those of the call before it."""
        ops = []
        if unit in self._coming:
            self._coming.remove(unit)
        elif unit in self._resting:
            del self._resting[max(i for i, name in enumerate(self._resting) if name == unit)]
            ops.append(self._load(unit))
        else:
            return ()
        if self._resting:
            self._coming.append(self._resting.pop())
            ops.append(self._load(self._coming[-1]))
        return tuple(ops)

    def forget(self) -> None:
        """Backward is over: the graph that needed them is gone."""
        self._resting.clear()
        self._coming.clear()

    @property
    def _moves(self) -> bool:
        return self._nbytes > 0 and self._tier in ("cpu", "nvme")

    def _load(self, unit: str) -> Op:
        return Op(
            Kind.LOAD, unit, Lane.TIER, source=Place.INPUTS, reads=self._nbytes, tier=self._tier
        )
