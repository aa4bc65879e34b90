"""Predictions beside measurements, and the file that has them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The prediction and measurement of one plan on one cluster."""

    grid: str
    rate: str
    plan: str
    predicted_s: float
    first_s: float
    """The prediction from the first probe alone."""
    measured_s: float
    """The median of its steps."""
    exposed: dict[str, float]
    """The breakdown of the prediction."""
    steps: Sequence[float]
    """Seconds of each timed step, of all turns."""
    finals: Sequence[float] = ()
    """Seconds per step by meeting, if the plan might be the fastest."""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of a plan on a grid: of the largest rank, above that of a process without it."""

    grid: str
    plan: str
    predicted_bytes: int
    peak_bytes: int

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_bytes / self.peak_bytes - 1


Recorded = TypeVar("Recorded", Comparison, Footprint)


def read(results: Path, kind: type[Recorded]) -> list[Recorded]:
    """The results in a file; for each plan on each cluster the last one."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [kind(**json.loads(line)) for line in lines]
    return list({(one.grid, getattr(one, "rate", ""), one.plan): one for one in found}.values())


def write(results: Path, one: Comparison | Footprint) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(one)) + "\n")
