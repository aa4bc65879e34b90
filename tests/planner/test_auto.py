"""plan="auto": probed, planned, and then trained as one plain process would."""

import io
import re
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import auto
from shardwise.api import runtime_of
from shardwise.core.errors import PlanError, UsageError
from shardwise.cost.file import load_cluster
from shardwise.planner.request import Request
from shardwise.planner.search import search
from shardwise.planner.space import Batch, Loss
from shardwise.plans.file import load_plan
from shardwise.probing import recheck
from tests.models import TinyGPT, adamw, batch, lm_loss, make, mine, train_plain


def run_on_loss(model, micro_batch, seq):
    tokens = torch.zeros(micro_batch, seq, dtype=torch.int64)
    return lm_loss(model, tokens, tokens)


def check_choice(cache: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(recheck, "CHANGED", 1e3)  # a quick probe's links are never the same
    model = make(TinyGPT, torch.float32)
    asked = sw.Auto(seq=8, run=run_on_loss)
    chosen = auto.choose(model, asked, levels="world=2", quick=True)
    assert chosen.step_s > 0
    again = auto.choose(model, asked, levels="world=2", quick=True)
    assert again.plan == chosen.plan  # the stored probe gives the same answer
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, chosen.plan)
    assert len(set(seen)) == 1
    return str(chosen.plan.optim.spread)


def check_choice_on_rank(cache: str) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return check_choice(cache, monkeypatch)


def test_all_ranks_choose_the_same_plan(two, tmp_path):
    assert len(set(two.run(check_choice_on_rank, str(tmp_path), limit_s=120))) == 1


def record_requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the search is asked for from here on."""
    requests: list[Request] = []

    def recorded(request: Request):
        requests.append(request)
        return search(request)

    monkeypatch.setattr(auto, "search", recorded)
    return requests


def check_training(cache: str) -> None:
    losses = train_plain(make(TinyGPT, torch.float32))
    model = make(TinyGPT, torch.float32)
    optimizer = adamw(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setattr(auto, "choose", partial(auto.choose, quick=True))
        requests = record_requests(monkeypatch)
        asked = sw.Auto(seq=8, lossless=True, path=Path(cache), run=run_on_loss)
        sw.shard(model, optimizer, plan=asked, levels="world=2")
    (request,) = requests
    assert (request.seq, request.loss, request.path) == (8, Loss.NONE, cache)
    assert not runtime_of(model).plan.is_lossy("float32")
    for step in range(3):
        loss = lm_loss(model, *mine(*batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert abs(total.item() / dist.get_world_size() - losses[step]) < 1e-5
    sw.unshard(model)


def test_a_model_trains_under_the_choice(two, tmp_path):
    two.run(check_training, str(tmp_path), limit_s=120)


def test_the_length_of_sequences_must_be_known():
    with pytest.raises(UsageError, match=r"Linear does not say; give plan=shardwise\.Auto\(seq="):
        sw.shard(torch.nn.Linear(2, 2), plan="auto")


def test_a_dtype_that_no_probe_measures_is_named():
    with pytest.raises(UsageError, match="float64"):
        auto.choose(torch.nn.Linear(2, 2).double(), sw.Auto(seq=8))


def told(passes: int, capsys, steps: int = 12, accumulate: int = 1) -> list[str]:
    model = make(TinyGPT, torch.float32)
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan="zero3")
    runtime = runtime_of(model)
    runtime.observers.append(auto.Comparison(runtime.root.name, 2.0, accumulate))
    for step in range(steps):
        for _ in range(passes - 1):
            with sw.no_sync(model):
                lm_loss(model, *batch(step)).backward()
        lm_loss(model, *batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("auto: ")]


@pytest.mark.parametrize("passes", [1, 2])
def test_predicted_and_measured_are_compared_once(capsys, passes):
    (line,) = told(passes, capsys, accumulate=passes)
    assert re.fullmatch(r"auto: \d\.\d{3} s per step measured \(median of 5\), 2\.000 predicted: \+\d+%", line)  # fmt: skip


def test_steps_of_several_micro_batches_are_not_compared(capsys):
    (line,) = told(2, capsys)
    assert "2 micro-batches and were predicted for 1" in line


def test_single_units_are_looked_at_as_well(one, tmp_path):
    (asked,) = one.run(refined, str(tmp_path))
    assert asked == 1


def refined(cache: str) -> int:
    asked = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setattr(auto, "refine", lambda _, best: asked.append(best) or best)
        asked_for = sw.Auto(seq=8, run=run_on_loss)
        auto.choose(make(TinyGPT, torch.float32), asked_for, quick=True)
    return len(asked)


def trained_by_auto(folder: str) -> tuple[str, dict]:
    """The trainer on a plan of its own choice, with a probe that takes no minute."""
    from shardwise.train import loop
    from tests.train.test_train_loop import job

    changes = {"plan": "auto", "lossless": True, "train.steps": 9, "train.eval_every": 0}
    config = job(Path(folder), **changes, workers=1)
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stderr(told):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        monkeypatch.setattr(loop, "choose", partial(auto.choose, quick=True))
        output = Path(folder) / "run"
        output.mkdir()
        summary = loop.train(config, output)
    return told.getvalue(), summary.to_dict()


def test_the_trainer_compares_after_some_steps(one, tmp_path):
    ((told, summary),) = one.run(trained_by_auto, str(tmp_path), limit_s=120)
    lines = [line for line in told.splitlines() if line.startswith("auto: ")]
    assert lines[0].startswith("auto: P=")
    assert re.search(r"measured \(median of 5\), .* predicted", lines[-1])  # two micro-batches each
    assert summary["predicted_step_s"] > 0
    plan = load_plan(summary["plan_file"])  # what ran can be run again
    assert lines[0].startswith(f"auto: P={plan.params.spread} G={plan.grads.spread} ")


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        (
            {"seq": 0},
            "seq=0 in shardwise.Auto cannot be used; give the tokens of a sequence as a whole number of at least 1.",
        ),
        ({"seq": 2048.0}, "seq=2048.0"),
        (
            {"micro_batch": -1},
            "micro_batch=-1 in shardwise.Auto cannot be used; give the sequences that a rank",
        ),
        ({"accumulate": True}, "accumulate=True"),
        ({"lossless": "no"}, "give True or False"),
        ({"path": None}, "leave it out to use no disk"),
        ({"run": "model"}, "give a function of"),
    ],
)
def test_what_cannot_be_asked_for_is_said_at_once(bad, remedy):
    with pytest.raises(PlanError) as error:
        sw.Auto(**bad)
    assert remedy in str(error.value)


@pytest.mark.parametrize("given", [{"seq": 8}, {"lossless": True}, {"micro_batch": 1}])
def test_what_only_auto_can_use_is_no_argument_of_shard(given):
    with pytest.raises(TypeError, match="unexpected keyword"):
        sw.shard(torch.nn.Linear(2, 2), plan="zeropp", **given)


def test_a_choice_is_told_with_its_tiers_and_wires():
    from shardwise.model.named import facts_of
    from shardwise.planner.request import Request, evaluate

    cluster = load_cluster("dgx2-v100")
    request = Request(
        facts=facts_of("gpt-mini"), cluster=cluster, global_batch=cluster.world, seq=128,
        precision=sw.Precision(compute="float16", reduce="float16", master="float32"),
    )  # fmt: skip
    plan = sw.presets.zeropp(precision=request.precision)
    plan = replace(plan, optim=replace(plan.optim, tier="cpu"))
    told = auto.describe(evaluate(request, plan, Batch(1, 1)), 12)
    assert "OS on cpu" in told
    assert "wires P int8" in told
    assert "best of 12 plans" in told


def test_lossless_is_for_auto_only(tmp_path):
    from shardwise.train import loop
    from shardwise.train.config import ConfigError
    from tests.train.test_train_loop import job

    config = job(tmp_path, plan="zero3", lossless=True)
    with pytest.raises(ConfigError, match="lossless works with plan = 'auto' only"):
        loop._choose_plan(config, torch.nn.Linear(2, 2))
