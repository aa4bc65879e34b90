"""How much of a tier one rank may use: every byte that is handed out is claimed first."""

import threading
from collections.abc import Callable

from shardwise.core.errors import ShardwiseError


class BudgetError(ShardwiseError, MemoryError):
    """A tier's budget is used up."""


class Budget:
    """What one rank holds of a tier, and may hold."""

    def __init__(self, tier: str, limit_bytes: int | None = None) -> None:
        self.tier, self.limit_bytes = tier, limit_bytes
        self._lock = threading.Lock()
        self._trims: list[Callable[[], None]] = []
        self.held_bytes = 0
        self.peak_bytes = 0

    def admits(self, nbytes: int) -> bool:
        return self.limit_bytes is None or self.held_bytes + nbytes <= self.limit_bytes

    def before_refusing(self, trim: Callable[[], None]) -> None:
        """Registers who can give idle memory back when the budget is used up."""
        self._trims.append(trim)

    def claim(self, nbytes: int, what: str) -> None:
        """Counts bytes that are about to be taken; raises instead if they are too many.

        >>> Budget("cpu", 10).claim(11, "a test")
        Traceback (most recent call last):
        shardwise.tier.budget.BudgetError: a test needs 11 bytes of tier cpu, of whose budget of \
10 bytes 0 are in use; raise tiers.cpu_bytes in the plan, or rest more states elsewhere.
        """
        if not self.admits(nbytes):
            for trim in self._trims:
                trim()
        with self._lock:
            if not self.admits(nbytes):
                raise BudgetError(
                    f"{what} needs {nbytes} bytes of tier {self.tier}, of whose budget of "
                    f"{self.limit_bytes} bytes {self.held_bytes} are in use; raise "
                    f"tiers.{self.tier}_bytes in the plan, or rest more states elsewhere."
                )
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, nbytes: int) -> None:
        with self._lock:
            self.held_bytes -= nbytes
