"""A short version of the quality benchmark: few bits learn what all bits learn."""

from dataclasses import asdict

import pytest

from shardwise.bench.quality import BASELINE, Outcome, Setting, read, run, summarise, techniques
from shardwise.core.errors import UsageError
from shardwise.core.topology import Topology
from shardwise.plans.validate import violations

SHORT = Setting(model="gpt-tiny", steps=20, seq=64, global_batch=4, lr=3e-3, eval_batches=4)


def test_every_technique_is_a_legal_plan():
    for name, plan in techniques().items():
        assert violations(plan, Topology.parse(SHORT.levels)) == [], name


@pytest.mark.timeout(280)
def test_few_bits_learn_alike(tmp_path):
    results = tmp_path / "quality.jsonl"
    names = [BASELINE, "zeropp", "lean"]
    outcomes = list(run(names, [0], SHORT, results))
    assert read(results) == outcomes
    rows = {row.technique: row for row in summarise(outcomes)}
    assert rows[BASELINE].val_losses[0] < 4.0  # bytes at random cost ln 256 = 5.5
    for name in names[1:]:
        assert rows[name].mean_percent < 2, rows
        assert rows[name].val_losses != rows[BASELINE].val_losses  # it did travel in few bits
    again = list(run(names, [0], SHORT, results))  # nothing is run twice
    assert again == outcomes


def test_an_unknown_technique_is_named():
    with pytest.raises(UsageError, match="'zeroqq' is not a technique; use zero3, amsp"):
        list(run(["zeroqq"], [0], SHORT))


def test_losses_are_compared_seed_by_seed():
    def outcome(technique: str, seed: int, loss: float) -> Outcome:
        return Outcome(
            technique=technique, seed=seed, val_loss=loss, train_loss=0.0, seconds=0.0,
            setting=asdict(SHORT),
        )  # fmt: skip

    rows = summarise(
        [
            outcome(BASELINE, 0, 2.0),
            outcome("lean", 0, 2.02),
            outcome(BASELINE, 1, 1.0),
            outcome("lean", 1, 1.0),
        ]
    )
    assert rows[1].percent == pytest.approx([1.0, 0.0])
