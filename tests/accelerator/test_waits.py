"""When the program waits, and for what: forward and backward only for what is really late.

Two kinds of waits are watched. For the device: the simulated one reports each. For a disk: each
wait of the program for a read or a write is noted, with whether it was asked for in an earlier moment
of the pass (at an earlier trigger of the schedule), so that the disk had time.
"""

import threading
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import shardwise as sw
from shardwise.plans.order import Issuer
from shardwise.runtime.optimizer import windows
from shardwise.tier.aio import Move
from shardwise.tier.staging import Staging
from tests.accelerator import parity
from tests.accelerator.accelerators import Seen, chosen
from tests.accelerator.parity import Way

GATHERS = "runtime/params.py"
FIRST_READS = 3
"""Units that nothing comes before: the root's and the first of forward, and the first of backward."""


@dataclass
class Waits:
    """What the program waited for in the last of some steps."""

    passes: Seen
    """In forward and backward."""
    update: Seen
    """In clipping and the optimizer's step."""
    disk: Counter[tuple[str, str, bool]]
    """In forward and backward: what (read or write), the file that asked, and whether it was asked
    for earlier."""


class Disk:
    """Notes waits for moves from and to a disk."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, bool]] = Counter()
        self._moment = 0
        self._begun: dict[Move, int] = {}

    def __enter__(self) -> "Disk":
        begin, block = Move.__init__, Move.block_host

        def begun(move: Move, *args: object, **options: object) -> None:
            begin(move, *args, **options)
            self._begun[move] = self._moment

        def blocked(move: Move) -> None:
            if not threading.current_thread().name.startswith("shardwise-"):
                kind = "write" if move.writes else "read"
                self.found[kind, self._asker(), self._begun.get(move, -1) < self._moment] += 1
            block(move)

        self._patches = [
            mock.patch.object(Move, "__init__", begun),
            mock.patch.object(Move, "block_host", blocked),
            mock.patch.object(Move, "order_stream", blocked),
            *(self._counted(name) for name in ("on", "begin", "ready")),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _counted(self, name: str):
        original = getattr(Issuer, name)

        def counted(*args, **options):
            self._moment += 1
            return original(*args, **options)

        return mock.patch.object(Issuer, name, counted)

    @staticmethod
    def _asker() -> str:
        """The innermost file of the runtime."""
        files = [frame.filename.rpartition("/shardwise/")[2] for frame in traceback.extract_stack()]
        return next(file for file in reversed(files) if file.startswith("runtime/"))


def waits(way: Way, folder: str) -> Waits:
    """Trains on this rank and watches the last step."""
    model, made = parity.sharded(way, folder)
    training = parity.Training(model, made, way)
    training.step(0)
    training.step(1)
    with Disk() as disk, chosen().watch() as passes:
        training.backwards(2)
    with chosen().watch() as update:
        training.update()
    sw.unshard(model)
    return Waits(passes, update, disk.found)


@pytest.mark.parametrize(
    ("plan", "rounds", "activations", "clip"),
    [
        ("zero3", "one", "keep", False),
        ("zero3", "one", "recompute", True),
        ("ddp", "no_sync", "keep", True),
        ("ddp", "no_sync", "recompute", False),
        ("zero1", "reduced", "keep", True),
    ],
)
def test_without_tiers_it_waits_once_if_it_clips_and_else_never(
    sim_two, tmp_path: Path, plan: str, rounds: str, activations: str, clip: bool
) -> None:
    way = Way(plan, activations=activations, rounds=rounds, clip=clip)
    for rank, found in enumerate(sim_two.run(waits, way, str(tmp_path))):
        assert found.passes.require("host_waits") == {}
        counts = clip and (rank == 0 or plan != "ddp")  # of replicas the first computes the norm
        assert found.update.host_wait_count == counts, found.update.host_waits
        assert all(" at runtime/surface/norms.py" in place for place in found.update.host_waits)


@pytest.mark.parametrize(
    "way",
    [
        Way(tiers="P cpu"),
        Way(tiers="G cpu", rounds="no_sync"),
        Way(tiers="OS cpu", rounds="reduced"),
        Way("ddp", tiers="all cpu", rounds="no_sync"),
        Way(tiers="all cpu", dtype="mixed", activations="cpu", tiled=True),
        Way(activations="cpu", rounds="reduced"),
        Way(activations="nvme"),
    ],
    ids=str,
)
def test_memory_of_the_host_is_never_waited_for_in_passes(
    sim_two, tmp_path: Path, way: Way
) -> None:
    for found in sim_two.run(waits, way, str(tmp_path)):
        assert found.passes.require("host_waits") == {}
        # The host's update waits for gradients, and for the copies that still use its buffers.
        places = {place.partition(" at ")[2].partition(":")[0] for place in found.update.host_waits}
        assert places <= {"tier/rest.py", "tier/staging.py", "tier/pool.py"}


@pytest.mark.parametrize(
    "way",
    [
        Way(tiers="P nvme"),
        Way(tiers="P nvme", rounds="reduced", activations="recompute"),
        Way("zero1", tiers="P nvme"),
        Way(tiers="G nvme"),
        Way(tiers="G nvme", rounds="no_sync"),
        Way(tiers="G nvme", rounds="reduced"),
        Way("zero2", tiers="G nvme", rounds="reduced"),
        Way(tiers="OS nvme", rounds="no_sync"),
        Way(tiers="all nvme", rounds="no_sync"),
    ],
    ids=str,
)
def test_a_disk_is_asked_before_it_is_waited_for(sim_two, tmp_path: Path, way: Way) -> None:
    for found in sim_two.run(waits, way, str(tmp_path)):
        assert found.passes.require("host_waits") == {}
        at_once = Counter({what: n for what, n in found.disk.items() if not what[2]})
        assert all(what[0] == "read" for what in found.disk)
        assert {asker for _, asker, _ in at_once} <= {GATHERS}
        assert at_once.total() <= FIRST_READS * way.micro_batches


def updates(folder: str) -> list[str]:
    """The order in which a host update asks for gradients and updates windows."""
    seen: list[str] = []
    fetch, step_on = Staging.fetch, windows.step_on

    def fetched(*args: Any) -> Any:
        seen.append("fetch")
        return fetch(*args)

    def updated(*args: Any) -> None:
        seen.append("update")
        step_on(*args)

    way = Way(tiers="OS cpu")
    model, made = parity.sharded(way, folder)
    training = parity.Training(model, made, way)
    with (
        mock.patch.object(Staging, "fetch", fetched),
        mock.patch.object(windows, "step_on", updated),
    ):
        training.step(0)
    sw.unshard(model)
    return seen


def test_gradients_come_to_the_host_while_the_window_before_is_updated(
    sim_two, tmp_path: Path
) -> None:
    for seen in sim_two.run(updates, str(tmp_path)):
        count = seen.count("update")
        assert count == seen.count("fetch") >= 4
        middle = ["update", "fetch"] * (count - 2)
        assert seen == ["fetch", "fetch", *middle, "update", "update"]
