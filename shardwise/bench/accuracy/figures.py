"""The figures of merit of the planner."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.bench.accuracy.results import Comparison
from shardwise.bench.accuracy.setup import CHOSEN


@dataclass(frozen=True, slots=True)
class Accuracy:
    """All comparisons together."""

    median_error: float
    worst_error: float
    first_median_error: float
    """The error of predictions from the first probe alone."""
    first_worst_error: float
    rank_correlation: float
    """Spearman's rank correlation, of all plans on all clusters together."""
    least_correlation: float
    """The lowest of all single clusters. Where plans take about the same time, it is noise."""
    agreement: float
    """Likewise of the first half of all plans' steps with the second: how well the machine agrees
    with itself, from half as many steps. Predictions are compared with all steps."""
    regrets: dict[tuple[str, str], float]
    """By cluster: measured time of the chosen plan relative to the fastest plan."""


def summarise(found: Sequence[Comparison]) -> Accuracy:
    """The figures of merit of the planner."""
    errors = [abs(one.error) for one in found]
    firsts = [abs(one.first_s / one.measured_s - 1) for one in found]
    clusters: dict[tuple[str, str], list[Comparison]] = {}
    for one in found:
        clusters.setdefault((one.grid, one.rate), []).append(one)
    return Accuracy(
        statistics.median(errors),
        max(errors),
        statistics.median(firsts),
        max(firsts),
        _correlation(found),
        min(_correlation(some) for some in clusters.values()),
        _agreement(found),
        {key: _regret(some) for key, some in clusters.items()},
    )


def _regret(found: Sequence[Comparison]) -> float:
    """The regret in the finals, meeting by meeting: the fastest of many in few steps is also lucky.

    A plan that equals the chosen one (its simulated step takes the same time) does not count: a
    difference between them is noise of the machine.
    """
    chosen = next(one for one in found if one.plan == CHOSEN)
    rivals = [
        one for one in found if not math.isclose(one.predicted_s, chosen.predicted_s, rel_tol=1e-9)
    ]
    if not chosen.finals:  # no plan came close
        return chosen.measured_s / min(one.measured_s for one in [chosen, *rivals])
    ratios = [
        statistics.median(a / b for a, b in zip(chosen.finals, one.finals, strict=True))
        for one in rivals
        if one.finals
    ]
    return max([1.0, *ratios])


def _correlation(found: Sequence[Comparison]) -> float:
    return _spearman([one.predicted_s for one in found], [one.measured_s for one in found])


def _agreement(found: Sequence[Comparison]) -> float:
    middles = [
        len(one.steps) / 2 for one in found
    ]  # both halves have the middle one of an odd number
    early = [
        statistics.median(one.steps[: math.ceil(middle)])
        for one, middle in zip(found, middles, strict=True)
    ]
    late = [
        statistics.median(one.steps[math.floor(middle) :])
        for one, middle in zip(found, middles, strict=True)
    ]
    return _spearman(early, late)


def _spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of ranks; equal values share a rank.

    >>> _spearman([1, 2, 3], [10, 30, 20])
    0.5
    >>> round(_spearman([1, 2, 2], [10, 20, 30]), 3) == round(_spearman([1, 2, 2], [10, 30, 20]), 3)
    True
    """

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks(first), ranks(second))
