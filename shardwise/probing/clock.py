"""Timing: all ranks measure at once, several times, and the slowest rank counts."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from shardwise.comm.control import Control
from shardwise.core.cluster import Curve
from shardwise.device.streams import synchronize
from shardwise.probing.scope import Effort, Scope

_LONG_S = 0.25
"""A first call that is shorter than this is timed again, because it ran with cold caches."""
_MOST_CALLS = 1000
_LEAST_S = 1e-7

Points = list[tuple[float, float]]
Lap = Callable[[int], Sequence[float]]
"""Makes a number of calls and returns the mean seconds of each of their parts."""


class Clock:
    """Times calls. All ranks make the same calls, and get the same results."""

    def __init__(self, control: Control, device: torch.device, scope: Scope) -> None:
        self._control, self._device, self._scope = control, device, scope

    def now(self) -> float:
        """The time when all work submitted to the device is done."""
        synchronize(self._device)
        return time.perf_counter()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks; all ranks return together."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        found: list[float] = self._control.highest(mine, "agreement of a probe").tolist()
        return found

    def mean(self, values: Sequence[float]) -> list[float]:
        """Each value's mean over the ranks."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        rows = self._control.exchange(mine, "agreement of a probe")
        found: list[float] = rows.mean(0).tolist()
        return found

    def measure(self, lap: Lap, effort: Effort | None = None) -> list[float]:
        """Seconds of each part of a call on the slowest rank: the median over batches."""
        repeats, batch_s, point_s = effort or self._scope.calls
        once = sum(self.slowest(lap(1)))  # with fresh pages, cold caches and new connections
        if once < _LONG_S:
            once = sum(self.slowest(lap(1)))
        once = max(once, _LEAST_S)
        count = min(_MOST_CALLS, max(1, math.ceil(batch_s / once)))
        batches = min(repeats, max(3, int(point_s / (count * once))))
        rows = [lap(count) for _ in range(batches)]
        parts = len(rows[0])
        flat = self.slowest([seconds for row in rows for seconds in row])
        return [statistics.median(flat[part::parts]) for part in range(parts)]

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call."""

        def lap(count: int) -> tuple[float]:
            begin = self.now()
            for _ in range(count):
                call()
            return ((self.now() - begin) / count,)

        return self.measure(lap)[0]

    def sweep(self, amounts: Iterable[int], measure: Callable[[int], tuple[float, float]]) -> Curve:
        """The curve over amounts; ``measure`` returns the actual amount, and seconds.

        The last amount is reduced if the whole amount would take too long.
        """
        points: Points = []
        for amount in amounts:
            if len(points) > 1:
                allowed = points[-1][0] * self._scope.patience_s / points[-1][1]
                if allowed < min(amount, 2 * points[-1][0]):
                    break
                amount = min(amount, int(allowed))
            points.append(measure(amount))
        return curve(points)


def curve(points: Points) -> Curve:
    """A curve of measured points, rounded to significant digits.

    A larger amount never takes less time: if it seems so, the smaller one was disturbed. If an
    amount was measured twice (many ranks round small ones up), the shorter time counts.

    >>> curve([(1, 0.5), (2, 0.123456), (2, 0.2), (4, 0.3)]).points
    ((1.0, 0.1235), (2.0, 0.1235), (4.0, 0.3))
    """
    found: dict[float, float] = {}
    least = math.inf
    for amount, seconds in sorted(points, reverse=True):
        least = min(least, seconds)
        found[float(amount)] = float(f"{max(least, _LEAST_S):.4g}")
    return Curve(tuple(sorted(found.items())))
