"""What lossy wires cost: the same training with several plans and seeds, by validation loss.

All runs with a seed start from the same weights and see the same rows in the same order; only the
transfers differ. Runs are real: four ranks as two nodes of two, every hop in its format.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.core.errors import UsageError
from shardwise.plans import presets
from shardwise.plans.file import dump_plan
from shardwise.plans.plan import Plan, Precision

BASELINE = "zero3"
MIXED = Precision(compute="bfloat16", reduce="bfloat16", master="float32")


def _wired(plan: Plan, *, params: str = "", grads: str = "", optim: str = "") -> Plan:
    return replace(
        plan,
        params=replace(plan.params, wire=params),
        grads=replace(plan.grads, wire=grads),
        optim=replace(plan.optim, wire=optim),
    )


def techniques() -> dict[str, Plan]:
    """The plans by technique; the first is the baseline."""
    zero3, amsp = presets.zero3(precision=MIXED), presets.amsp(precision=MIXED)
    few_bits = "int4,node=int8"
    return {
        BASELINE: zero3,
        "amsp (nothing lost)": amsp,  # other orders of sums: the effect of rounding alone
        "zeropp": presets.zeropp(precision=MIXED),
        "lean": presets.lean(precision=MIXED),
        "qwZ int8": _wired(zero3, params="int8"),
        "qgZ int4/int4": _wired(zero3, grads="int4"),
        "qgZ int8/int4": _wired(zero3, grads=few_bits),
        "qgZ int8/int4 + feedback": _wired(zero3, grads="node=int8,world=int4/feedback"),
        "refresh int4 differences": _wired(amsp, optim="int4/delta"),
        "refresh int4 direct": _wired(amsp, optim="int4"),
        "lean + feedback": _wired(amsp, grads="node=bf16,world=int4/feedback", optim="int4/delta"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, and for how long."""

    model: str = "gpt-mini"
    steps: int = 1000
    seq: int = 64
    global_batch: int = 4
    lr: float = 3e-4
    """Low enough that rounding does not grow into different losses; see the row of amsp."""
    eval_batches: int = 64
    levels: str = "node=2,world=2"
    workers: int = 4
    native_bf16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One finished run."""

    technique: str
    seed: int
    val_loss: float
    train_loss: float
    """Mean over the last twentieth of the steps."""
    seconds: float
    setting: dict[str, Any]


def run(
    names: list[str], seeds: list[int], setting: Setting, results: Path | None = None
) -> Iterator[Outcome]:
    """Run what ``results`` does not have yet, append to it, and yield every outcome."""
    from shardwise.train import launch

    known = techniques()
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' is not a technique; use {', '.join(known)}.")
    finished = {(o.technique, o.seed): o for o in read(results) if o.setting == asdict(setting)}
    for seed in seeds:
        for name in names:
            outcome = finished.get((name, seed))
            if outcome is None:
                answer = launch.run(
                    "shardwise.bench.quality:work",
                    {"technique": name, "seed": seed, "setting": asdict(setting)},
                    workers=setting.workers,
                )
                outcome = Outcome(**answer)
                if results is not None:
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
            yield outcome


def read(results: Path | None) -> list[Outcome]:
    """The outcomes of earlier runs."""
    if results is None or not results.exists():
        return []
    lines = results.read_text(encoding="utf-8").splitlines()
    return [Outcome(**json.loads(line)) for line in lines]


def work(technique: str, seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    """One run, as one of its ranks."""
    from shardwise.probing.matmul import compute_in_float32, has_bfloat16
    from shardwise.train.config import load_config
    from shardwise.train.loop import build, evaluate, train_step

    chosen = Setting(**setting)
    if not chosen.native_bf16 and not has_bfloat16():
        compute_in_float32()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.toml"
        plan.write_text(dump_plan(techniques()[technique]), encoding="utf-8")
        config = load_config(
            None,
            {
                "plan": str(plan),
                "levels": chosen.levels,
                "model.name": chosen.model,
                "optim.lr": chosen.lr,
                "optim.min_lr_ratio": 0.0,
                "optim.warmup_steps": max(1, chosen.steps // 20),
                "train.steps": chosen.steps + 1,  # so that it never validates itself
                "train.seq": chosen.seq,
                "train.global_batch": chosen.global_batch,
                "train.eval_batches": chosen.eval_batches,
                "train.seed": seed,
            },
        )
        job = build(config)
    losses = [train_step(job, step).loss for step in range(1, chosen.steps + 1)]
    tail = losses[-max(1, chosen.steps // 20) :]
    outcome = Outcome(
        technique=technique,
        seed=seed,
        val_loss=evaluate(job),
        train_loss=statistics.mean(tail),
        seconds=time.perf_counter() - started,
        setting=setting,
    )
    return asdict(outcome)


@dataclass(frozen=True, slots=True)
class Row:
    """A technique over all seeds."""

    technique: str
    val_losses: list[float]
    percent: list[float]
    """For each seed, by how much its loss exceeds that of the baseline with the same seed."""

    @property
    def mean_percent(self) -> float:
        return statistics.mean(self.percent)


def summarise(outcomes: list[Outcome]) -> list[Row]:
    """One row per technique, in the order of their first outcome."""
    losses: dict[str, dict[int, float]] = {}
    for outcome in outcomes:
        losses.setdefault(outcome.technique, {})[outcome.seed] = outcome.val_loss
    baseline = losses.get(BASELINE, {})
    return [
        Row(
            name,
            list(by_seed.values()),
            [
                100 * (loss / baseline[seed] - 1)
                for seed, loss in by_seed.items()
                if seed in baseline
            ],
        )
        for name, by_seed in losses.items()
    ]
