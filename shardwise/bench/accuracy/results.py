"""What was predicted and measured, and the file of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One plan on one cluster."""

    grid: str
    rate: str
    plan: str
    predicted_s: float
    first_s: float
    """What the first probe alone predicts."""
    measured_s: float
    """The median of its steps."""
    exposed: dict[str, float]
    """What the prediction is made of."""
    steps: Sequence[float]
    """Seconds of each step that was timed, of all turns."""
    finals: Sequence[float] = ()
    """Seconds of a step, meeting by meeting, of those that might be the fastest."""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of one plan on one grid: of the rank that has most, above a process without it."""

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
    """What a file has; of one plan on one cluster the last that was written."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [kind(**json.loads(line)) for line in lines]
    return list({(one.grid, getattr(one, "rate", ""), one.plan): one for one in found}.values())


def write(results: Path, one: Comparison | Footprint) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(one)) + "\n")
