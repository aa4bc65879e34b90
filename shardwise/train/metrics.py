"""What a run measures: one flat JSON line per step, memory, and the summary at the end."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Here for auto.py and cli/explain.py only, which shall import them from where they are.

METRICS_FILE = "metrics.jsonl"
PLAN_FILE = "plan.toml"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of the metrics file. Memory is that of rank 0."""

    step: int
    """Counts from 1."""
    loss: float
    """Mean over the global batch."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens_per_s: float
    step_s: float
    rss_bytes: int
    peak_rss_bytes: int
    val_loss: float | None = None
    """Only after steps with a validation; absent from the line otherwise."""

    def to_json(self) -> str:
        """The record as one line. JSON has neither NaN nor Inf: they become null."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        known = {name: value if math.isfinite(value) else None for name, value in fields.items()}
        return json.dumps(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a finished run."""

    model: str
    num_parameters: int
    plan: str
    ranks: int
    steps: int
    first_loss: float
    last_loss: float
    val_loss: float
    tokens_per_s: float
    """Median over the steps: the first ones are not representative."""
    step_s: float
    """Seconds per step, likewise the median."""
    predicted_step_s: float | None
    """The planner's prediction, if it chose the plan."""
    seconds: float
    """Duration of all steps and validations, without probing and planning."""
    peak_rss_bytes: list[int]
    """One value per rank."""
    metrics: str
    """Path of the metrics file."""
    plan_file: str
    """Path of the plan that ran, whether chosen by the user or by the planner."""

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data."""
        return asdict(self)


class MetricsWriter:
    """Appends records to a file, each written before the next step begins.

    With path None it drops them, so that ranks other than 0 run the same code. A resumed run
    replaces the lines of steps that it makes again, those after ``done``.
    """

    def __init__(self, path: Path | None, done: int = 0) -> None:
        if path is not None and path.exists():
            _drop_after(path, done)
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        if self._file is not None:
            self._file.write(record.to_json() + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def _drop_after(path: Path, done: int) -> None:
    """Keep the lines of steps up to ``done``; what a killed process wrote in part goes too."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= done:
                kept.append(line + "\n")
        except ValueError:
            break
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(path)


def read_records(path: Path) -> list[StepRecord]:
    """What a metrics file has."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        fields: dict[str, Any] = json.loads(line)
        lost: dict[str, Any] = {key: math.nan for key, value in fields.items() if value is None}
        found.append(StepRecord(**{**fields, **lost}))
    return found


def rss_bytes() -> int:
    """Resident memory of this process now; 0 where the system does not report it."""
    return _status_bytes("VmRSS:") or 0


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far."""
    peak = _status_bytes("VmHWM:")
    if peak is not None:
        return peak
    # The fallback: on Linux getrusage also counts the parent that this process was forked from.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)
