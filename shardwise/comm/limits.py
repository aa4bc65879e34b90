"""How long ranks wait for each other."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import UsageError

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Two limits, because a rank that is late and one that is gone are told apart."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Within so long all ranks end after one of them died, was stopped or was cut off."""
    patience_s: float = DEFAULT_PATIENCE_S
    """So long a rank waits for another one that lives, before it raises an error."""
    folder: Path | None = None
    """Where the report of a failure goes."""

    @classmethod
    def of(
        cls,
        timeout_s: float | None,
        patience_s: float | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> "Limits":
        """As users give them: without a patience of its own, a given time limit is both.

        >>> Limits.of(None).patience_s, Limits.of(5).patience_s, Limits.of(5, 90).timeout_s
        (600.0, 5.0, 5.0)
        """
        for name, value in (("timeout_s", timeout_s), ("patience_s", patience_s)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is {value}; give a positive number of seconds.")
        return cls(
            float(timeout_s or DEFAULT_TIMEOUT_S),
            float(patience_s or timeout_s or DEFAULT_PATIENCE_S),
            None if folder is None else Path(folder),
        )
