"""plan="auto": probed, planned, and then trained as one plain process would."""

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import auto
from shardwise.api import runtime_of
from shardwise.core.errors import UsageError
from shardwise.planner.space import Loss
from tests.models import TinyGPT, adamw, batch, lm_loss, make, mine, train_plain


def run_on_loss(model, micro_batch, seq):
    tokens = torch.zeros(micro_batch, seq, dtype=torch.int64)
    return lm_loss(model, tokens, tokens)


def check_choice(cache: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    model = make(TinyGPT, torch.float32)
    chosen = auto.choose(model, levels="world=2", seq=8, run=run_on_loss, quick=True)
    assert chosen.step_s > 0
    again = auto.choose(model, levels="world=2", seq=8, run=run_on_loss, quick=True)
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


def check_training(cache: str) -> None:
    losses = train_plain(make(TinyGPT, torch.float32))
    model = make(TinyGPT, torch.float32)
    optimizer = adamw(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        choose = auto.choose

        def quickly(model, **options):
            return choose(model, **options, loss=Loss.NONE, run=run_on_loss, quick=True)

        monkeypatch.setattr(auto, "choose", quickly)
        sw.shard(model, optimizer, plan="auto", levels="world=2", seq=8)
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
    with pytest.raises(UsageError, match="pass seq="):
        auto.choose(torch.nn.Linear(2, 2))


def test_a_dtype_that_no_probe_measures_is_named():
    with pytest.raises(UsageError, match="float64"):
        auto.choose(torch.nn.Linear(2, 2).double(), seq=8)
