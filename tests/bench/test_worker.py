"""What a rank of a benchmark does in its turn."""

import pytest
import torch
import torch.distributed as dist

from shardwise.bench import worker
from shardwise.bench.contenders import Contender
from shardwise.bench.messages import Counted, Setting, Turn


@pytest.mark.parametrize(
    ("drained", "done", "seconds"),
    [
        (True, "drain barrier clock step clock step clock drain barrier clock drain", 7),
        (False, "barrier clock step clock step clock barrier clock drain", 6),
    ],
)
def test_the_clock_of_a_turn(
    drained: bool, done: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert seen == ["step", "clock", *done.split()]  # the warm-up's clock is for nobody
    assert measured.seconds == seconds
    assert measured.steps_s == (2, 2)
