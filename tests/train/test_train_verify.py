"""`verify`: equal runs pass, and every kind of difference is seen and named."""

import copy
import json
import math

import pytest
import torch

from shardwise.cli.main import run
from shardwise.core.errors import UsageError
from shardwise.train.config import load_config
from shardwise.train.trajectory import Trajectory
from shardwise.train.verify import TOLERANCES, Comparison, compare, verify

pytestmark = pytest.mark.timeout(240)


def trajectory() -> Trajectory:
    return Trajectory(
        losses=[3.0, 2.0],
        total_norms=[1.0, 0.5],
        grad_norms=[{"a": 1.0, "noise": 1e-18}, {"a": 0.5, "noise": 1e-18}],
        parameters={"a": torch.ones(3), "noise": torch.zeros(2)},
        optimizer_states={"a:exp_avg": torch.ones(3), "a:step": torch.tensor(2.0)},
    )


def worst(ours: Trajectory) -> dict[str, Comparison]:
    rows = compare(ours, trajectory(), TOLERANCES["float64"])
    return {row.quantity: row for row in rows}


def test_equal_runs_pass() -> None:
    rows = worst(trajectory())
    assert all(row.passed and row.difference == 0 for row in rows.values())


def test_each_kind_of_difference_is_seen_and_named() -> None:
    ours = copy.deepcopy(trajectory())
    ours.losses[1] += 1e-3
    ours.total_norms[0] += 1e-3
    ours.grad_norms[1]["a"] += 1e-3
    ours.parameters["a"][2] += 1e-3
    ours.optimizer_states["a:step"] += 1
    rows = worst(ours)
    assert not any(row.passed for row in rows.values())
    assert {name: row.worst for name, row in rows.items()} == {
        "loss": "step 2",
        "gradient norm": "step 1",
        "gradients": "a, step 2",
        "parameters": "a",
        "optimizer states": "a:step",
    }


def test_noise_is_judged_by_the_scale_of_its_kind() -> None:
    ours = trajectory()
    ours.grad_norms[0]["noise"] = 5e-18
    assert worst(ours)["gradients"].passed


def test_missing_misshapen_and_undefined_tensors_fail() -> None:
    for change in ({"a": torch.ones(3)}, {"a": torch.ones(4), "noise": torch.zeros(2)}):
        ours = trajectory()
        ours.parameters = change
        assert worst(ours)["parameters"].difference == math.inf
    ours = trajectory()
    ours.losses[0] = math.nan
    assert worst(ours)["loss"].difference == math.inf


def test_a_lossless_plan_passes_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["verify", "--workers", "2", "--steps", "3", "--accumulation", "2", "--json"])
    verdict = json.loads(capsys.readouterr().out)
    assert code == 0
    assert verdict["passed"]
    assert {row["quantity"] for row in verdict["comparisons"]} == set(TOLERANCES["float64"])
    assert all(row["difference"] < 1e-9 for row in verdict["comparisons"])


def test_a_difference_ends_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trajectory()
    ours.losses[0] = 9.0
    monkeypatch.setattr("shardwise.train.verify._record_both", lambda _: (ours, trajectory()))
    assert run(["verify"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert run(["verify", "--tolerance", "3"]) == 0


def test_a_loss_that_the_model_computes_in_float32_is_judged_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = trajectory(), trajectory()
    ours.losses[0] *= 1 + 1e-6
    monkeypatch.setattr("shardwise.train.verify._record_both", lambda _: (ours, theirs))
    job = load_config(None, {"plan": "zero3", "model.dtype": "float64"})
    assert not verify(job).passed
    theirs.loss_dtype = "float32"
    assert verify(job).passed


def test_it_starts_its_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match="without torchrun"):
        verify(load_config(None))


def test_a_lossy_plan_is_judged_by_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trajectory()
    monkeypatch.setattr("shardwise.train.verify._record_both", lambda config: (ours, trajectory()))
    for plan, judged in (("zeropp", {"loss"}), ("zero3", set(TOLERANCES["float64"]))):
        changes = {"plan": plan, "model.dtype": "float64"}
        verdict = verify(load_config(None, changes))
        found = {row.quantity for row in verdict.comparisons if row.tolerance is not None}
        assert found == judged, plan
