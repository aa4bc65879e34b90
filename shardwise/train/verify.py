"""Does a plan train to the same numbers as one process? Run both, compare, and give a verdict."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import UsageError
from shardwise.plans.file import load_plan
from shardwise.train import launch
from shardwise.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.train.trajectory import Trajectory

TOLERANCES: dict[str, dict[str, float]] = {
    "float64": {
        "loss": 1e-9,
        "gradient norm": 1e-9,
        "gradients": 1e-9,
        "parameters": 1e-9,
        "optimizer states": 1e-9,
    },
    "float32": {"loss": 1e-5, "gradient norm": 1e-5, "gradients": 1e-5},
}
"""Largest relative differences that pass. Quantities without a tolerance in float32 are shown but
not judged: there, splitting the batch alone moves single parameters by 1e-4."""

LOSSY_TOLERANCES = {"loss": 2e-2}
"""For plans with lossy wires, which train to nearly the same losses, not to the same numbers."""

_NOISE_SHARE = 1e-3
"""Differences are relative to at least this share of the largest tensor of a kind: tensors far
smaller than that are rounding noise, such as the gradient of a key bias, which is exactly zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far one quantity is from the reference."""

    quantity: str
    difference: float
    """The largest relative difference."""
    worst: str
    """The step or tensor where it is."""
    tolerance: float | None
    """None: shown, not judged."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.tolerance is None or self.difference <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of `verify`."""

    plan: str
    model: str
    workers: int
    steps: int
    dtype: str
    comparisons: list[Comparison]

    @property
    def passed(self) -> bool:
        """Whether everything that is judged is within its tolerance."""
        return all(comparison.passed for comparison in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain data."""
        rows = [{**asdict(row), "passed": row.passed} for row in self.comparisons]
        return {**asdict(self), "comparisons": rows, "passed": self.passed}


def verify(config: TrainConfig, tolerance: float | None = None) -> Verdict:
    """Run the job under its plan and in plain PyTorch, and compare.

    ``tolerance`` replaces the tolerances of all quantities.
    """
    if launch.under_torchrun():
        raise UsageError("verify starts its own workers; run it without torchrun")
    if config.model.dtype not in TOLERANCES:
        raise UsageError(f"verify compares in float64 or float32, not in {config.model.dtype}")
    if config.plan == "auto":
        raise UsageError(
            "verify compares one plan with a plain process, but auto may choose a different plan "
            "each time; name a preset or a plan's file, such as one that shardwise plan -o writes"
        )
    config.batching(config.workers)  # raises now what would fail later
    sharded, reference = _record_both(config)
    if tolerance is not None:
        tolerances = dict.fromkeys(TOLERANCES["float64"], tolerance)
    elif load_plan(config.plan).is_lossy(config.model.dtype):
        tolerances = LOSSY_TOLERANCES
    else:
        loss = max(
            TOLERANCES[dtype]["loss"] for dtype in (config.model.dtype, reference.loss_dtype)
        )
        tolerances = TOLERANCES[config.model.dtype] | {"loss": loss}
    return Verdict(
        plan=config.plan,
        model=config.model.name,
        workers=config.workers,
        steps=config.train.steps,
        dtype=config.model.dtype,
        comparisons=compare(sharded, reference, tolerances),
    )


def _record_both(config: TrainConfig) -> tuple["Trajectory", "Trajectory"]:
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as directory:
        for side, workers in (("sharded", config.workers), ("reference", 1)):
            arguments = {
                "config": config.model_dump(mode="json"),
                "directory": directory,
                "name": f"{side}.pt",
            }
            launch.run(f"shardwise.train.trajectory:{side}_worker", arguments, workers=workers)
        from shardwise.train.trajectory import Trajectory

        sharded, reference = (
            Trajectory.load(Path(directory) / f"{side}.pt") for side in ("sharded", "reference")
        )
        return sharded, reference


def compare(
    sharded: "Trajectory", reference: "Trajectory", tolerances: Mapping[str, float]
) -> list[Comparison]:
    """One comparison per quantity, each at its worst step or tensor."""
    gradients = [
        _worst_norm(ours, theirs, step)
        for step, (ours, theirs) in enumerate(
            zip(sharded.grad_norms, reference.grad_norms, strict=True), start=1
        )
    ]
    worst = {
        "loss": _worst_step(sharded.losses, reference.losses),
        "gradient norm": _worst_step(sharded.total_norms, reference.total_norms),
        "gradients": max(gradients),
        "parameters": _worst_tensor(sharded.parameters, reference.parameters),
        "optimizer states": _worst_tensor(sharded.optimizer_states, reference.optimizer_states),
    }
    return [
        Comparison(
            quantity=quantity, difference=value, worst=where, tolerance=tolerances.get(quantity)
        )
        for quantity, (value, where) in worst.items()
    ]


def _worst_step(ours: list[float], theirs: list[float]) -> tuple[float, str]:
    return max(
        (_relative(abs(a - b), abs(b)), f"step {step}")
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1)
    )


def _worst_norm(ours: dict[str, float], theirs: dict[str, float], step: int) -> tuple[float, str]:
    missing = ours.keys() ^ theirs.keys()
    if missing:
        return math.inf, f"{min(missing)} is on one side only, step {step}"
    floor = _NOISE_SHARE * max(theirs.values(), default=0.0)
    return max(
        (_relative(abs(ours[name] - norm), max(norm, floor)), f"{name}, step {step}")
        for name, norm in theirs.items()
    )


def _worst_tensor(ours: dict[str, "Tensor"], theirs: dict[str, "Tensor"]) -> tuple[float, str]:
    missing = ours.keys() ^ theirs.keys()
    if missing:
        return math.inf, f"{min(missing)} is on one side only"
    largest: dict[str, float] = {}  # by kind: exp_avg and exp_avg_sq have different scales
    for name, tensor in theirs.items():
        kind = name.partition(":")[2]
        largest[kind] = max(largest.get(kind, 0.0), _peak(tensor))
    return max(
        (_tensor_difference(ours[name], tensor, largest[name.partition(":")[2]]), name)
        for name, tensor in theirs.items()
    )


def _tensor_difference(ours: "Tensor", theirs: "Tensor", largest: float) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    return _relative(_peak(ours - theirs), max(_peak(theirs), _NOISE_SHARE * largest))


def _peak(tensor: "Tensor") -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def _relative(difference: float, scale: float) -> float:
    """A relative difference; infinite if either side is NaN."""
    if math.isnan(difference) or math.isnan(scale):
        return math.inf
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else math.inf
