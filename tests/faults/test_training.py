"""Ranks that fail while a model trains: all others end in time, and the report names the unit."""

import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.cli.main import run as shardwise
from shardwise.core.flight import RECORDER, read
from tests.harness import Workers
from tests.models import Block
from tests.runtime.support import PLANS, peer_links, small

TIMEOUT_S = 2.0
SLACK_S = 8.0
WIDTH = 24
WORLD = 3


def model_of(blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(blocks))).double()


def fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        try:
            raise ZeroDivisionError("divided by nothing")
        except ZeroDivisionError:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # as the interpreter would
    elif how == "wander":
        time.sleep(60)


def train(folder: str, how: str, failing: int, where: str, link: str) -> None:
    """Trains; one rank fails in the forward of a block, in its backward, or at any time."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with peer_links() if link == "messages" else nullcontext():
        sw.shard(
            model, optimizer, small(PLANS["zero3"]), levels=f"world={WORLD}", timeout_s=TIMEOUT_S, run=folder,
            patience_s=4.0 if how == "wander" else 60.0,
        )  # fmt: skip
    rank = dist.get_rank()

    def strike(*_: Any) -> None:
        if step == 3:
            Path(folder, "failed").write_text(str(time.time()))
            fail(how)

    step = 0
    if rank == failing:
        if where == "forward":
            model[2].register_forward_pre_hook(strike)
        elif where == "backward":
            model[1].register_full_backward_hook(strike)
        else:
            step = 3
            threading.Timer(0.3, strike).start()
    for step in range(step, 100_000):  # noqa: B020
        if where == "any":
            step = 3
        model(torch.randn(2, 3, WIDTH, dtype=torch.float64)).square().mean().backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


CASES = [
    ("kill", 1, "forward", "memory", "ended", "rank 1 ended without a word"),
    ("kill", 0, "backward", "memory", "ended", "rank 0 ended without a word"),
    ("kill", 2, "any", "memory", "ended", "rank 2 ended without a word"),
    ("kill", 1, "forward", "messages", "ended", "rank 1 ended without a word"),
    ("stop", 1, "backward", "memory", "stopped", "rank 1 is stopped"),
    ("stop", 0, "any", "messages", "stopped", "rank 0 is stopped"),
    ("raise", 1, "forward", "messages", "raised", "rank 1 raised ZeroDivisionError: divided"),
    ("wander", 1, "forward", "memory", "stuck", "gave up: SyncError: Rank"),
]


@pytest.mark.parametrize(("how", "failing", "where", "link", "kind", "words"), CASES)
def test_all_ranks_end_with_one_report(how, failing, where, link, kind, words, tmp_path, capsys):
    pool = Workers(WORLD)
    try:
        pool.start()
        for pipe in pool._pipes:
            pipe.send((ending, (str(tmp_path), how, failing, where, link), {}))
        living = [r for r in range(WORLD) if r != failing or kind in ("raised", "stuck")]
        for rank in living:
            pool._processes[rank].join(30)
        ended = time.time()
        codes = [pool._processes[rank].exitcode for rank in living]
        pool._processes[failing].kill()  # it may be stopped
    finally:
        pool.stop()
    said = "".join((tmp_path / f"said-{rank}").read_text() for rank in range(WORLD))
    assert codes == [1] * len(living), said
    limit = 4.0 if how == "wander" else TIMEOUT_S
    assert ended - float((tmp_path / "failed").read_text()) < limit + SLACK_S
    assert len(re.findall(r"^shardwise: ", said, re.MULTILINE)) == 1, said
    assert words in said
    (file,) = tmp_path.glob("failure-*/report.json")
    report = json.loads(file.read_text())
    assert [cause["kind"] for cause in report["cause"]] == [kind]
    if kind != "stuck":
        assert [cause["rank"] for cause in report["cause"]] == [failing]
    units = {rank: re.findall(r"unit '(\S+)'", json.dumps(told)) for rank, told in report["ranks"].items()}  # fmt: skip
    assert all(units.values()) or where == "any", report
    assert shardwise(["doctor", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in answer["ranks"]] == list(range(WORLD))
    if where != "any":  # they hang: who waits for whom is clear
        assert f"waited for rank {failing}, which waited for nobody" in answer["conclusion"]


def ending(*arguments: Any) -> None:
    """What ends a rank's program is not caught here, unlike by the pool."""
    with open(Path(arguments[0], f"said-{dist.get_rank()}"), "wb") as said:
        os.dup2(said.fileno(), 2)
    try:
        train(*arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def quiet_steps(folder: str) -> tuple[float, int]:
    """A slow rank: nobody is alarmed by one that only takes long, and holds Python's lock."""
    import ctypes

    model = model_of()
    sw.shard(model, None, small(PLANS["zero3"]), levels=f"world={WORLD}", timeout_s=1.0, patience_s=30, run=folder)  # fmt: skip
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            ctypes.PyDLL(None).usleep(2_500_000)
        model(torch.randn(2, 3, WIDTH, dtype=torch.float64)).square().mean().backward()
    flight = read(RECORDER.snapshot())
    return len(flight.events), len(list(Path(folder).iterdir()))


def test_a_slow_rank_is_no_failure(tmp_path):
    pool = Workers(WORLD)
    try:
        for events, files in pool.run(quiet_steps, str(tmp_path)):
            assert events > 50
            assert files == 0
    finally:
        pool.stop()
