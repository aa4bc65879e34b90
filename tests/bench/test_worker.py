"""What a rank of a benchmark does in its turn."""

import pytest
import torch
import torch.distributed as dist

from shardwise.bench import worker
from shardwise.bench.contenders import Contender
from shardwise.bench.messages import Counted, Setting, Turn


@pytest.mark.parametrize(
    ("drained", "done"),
    [
        (True, "step drain barrier clock step step drain barrier clock drain"),
        (False, "step barrier clock step step barrier clock drain"),
    ],
)
def test_the_clock_of_a_turn(drained: bool, done: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def tick() -> float:
        seen.append("clock")
        return float(len(seen))

    def barrier() -> None:
        if seen[-1] != "barrier":
            seen.append("barrier")

    def step(_: torch.Tensor) -> float:
        seen.append("step")
        return 1.0

    monkeypatch.setattr(worker.time, "perf_counter", tick)
    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(worker, "_count", lambda _: Counted(0, 0))
    contender = Contender("fake", step, lambda: seen.append("drain"))
    entry = worker._Entry(contender, Setting())
    measured = worker._train(entry, Turn("fake", 1, 2, drained))
    assert seen == done.split()
    assert measured.seconds == len(done.split()) - 2 - done.split().index("clock")
