"""How much of a tier a rank may use: all memory is claimed before it is allocated."""

import threading
from collections.abc import Callable

from shardwise.core.errors import ShardwiseError


class BudgetError(ShardwiseError, MemoryError):
    """A tier's budget is used up."""


class Budget:
    """What a rank holds of a tier, and its limit."""

    def __init__(self, tier: str, limit_bytes: int | None = None) -> None:
        self.tier, self.limit_bytes = tier, limit_bytes
        self._lock = threading.Lock()
        self._trims: list[Callable[[], None]] = []
        self.held_bytes = 0
        self.peak_bytes = 0

    def admits(self, nbytes: int) -> bool:
        return self.limit_bytes is None or self.held_bytes + nbytes <= self.limit_bytes

    def before_refusing(self, trim: Callable[[], None]) -> None:
        """Register a function that frees idle memory when the budget is used up."""
        self._trims.append(trim)

    def claim(self, nbytes: int, what: str) -> None:
        """Count bytes that will be allocated; raise if they exceed the budget.

        >>> Budget("cpu", 10).claim(11, "a test")
        Traceback (most recent call last):
        shardwise.tier.budget.BudgetError: a test needs 11 bytes of tier cpu, but 0 of its budget \
of 10 bytes are in use; raise tiers.cpu_bytes in the plan, or move states to another tier.
        """
        if not self.admits(nbytes):
            for trim in self._trims:
                trim()
        with self._lock:
            if not self.admits(nbytes):
                raise BudgetError(
                    f"{what} needs {nbytes} bytes of tier {self.tier}, but {self.held_bytes} of "
                    f"its budget of {self.limit_bytes} bytes are in use; raise "
                    f"tiers.{self.tier}_bytes in the plan, or move states to another tier."
                )
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, nbytes: int) -> None:
        with self._lock:
            self.held_bytes -= nbytes
