"""Who has failed, from what was heard: no time passes, and no process is asked."""

import errno
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from shardwise.core.failure import Fault, Kind, Report, Statement, order_faults
from shardwise.core.liveness import Liveness, Peer
from shardwise.core.processes import Life, ProcessId, process_id

TIMEOUT_S = 60.0


class World:
    """Rank 0's view: 1 is on its host, 2 and 3 are on another."""

    def __init__(self) -> None:
        self.life = Life.RUNS
        peers = [Peer(1, "here", lambda: self.life), Peer(2, "there", None), Peer(3, "there", None)]
        self.liveness = Liveness(peers, TIMEOUT_S)
        self.hear(0.0, 1, 2, 3)

    def hear(self, now: float, *ranks: int) -> None:
        for rank in ranks:
            self.liveness.hear(rank, now)

    def failed(self, now: float) -> dict[int, Kind]:
        return {fault.rank: fault.kind for fault in self.liveness.faults(now)}


def test_a_rank_of_this_host_that_ended_is_noticed_at_once():
    world = World()
    assert world.failed(1.0) == {}
    world.life = Life.ENDED
    assert world.failed(1.0) == {1: Kind.ENDED}


def test_a_stopped_rank_has_failed_after_half_the_limit():
    world = World()
    world.life = Life.STOPPED
    world.hear(29.0, 2, 3)
    assert world.failed(5.0) == world.failed(34.9) == {}
    assert world.failed(35.0) == {1: Kind.STOPPED}
    world.life = Life.RUNS  # it goes on
    assert world.failed(36.0) == {}


def test_a_silent_rank_that_runs_is_no_failure():
    world = World()
    world.hear(500.0, 2, 3)
    assert world.failed(500.0) == {}


def test_a_host_is_cut_off_when_all_its_ranks_are_silent():
    world = World()
    world.hear(20.0, 2)
    assert world.failed(49.9) == {}  # 3 is silent, but its host is not
    assert world.failed(50.0) == {2: Kind.CUT_OFF, 3: Kind.CUT_OFF}


def test_a_rank_that_was_never_heard_of_is_not_judged():
    liveness = Liveness([Peer(1, "there", None)], TIMEOUT_S)
    assert liveness.faults(1000.0) == []


def test_a_host_that_sends_no_beats_is_not_judged_by_its_silence():
    """Its ranks may have asked for something, once."""
    peers = [Peer(1, "there", None), Peer(2, "beyond", None)]
    liveness = Liveness(peers, TIMEOUT_S, watched=[1])
    liveness.hear(1, 0.0)
    liveness.hear(2, 0.0)
    liveness.hear(1, 100.0)
    assert liveness.faults(100.0) == []
    assert not liveness.uncertain(100.0, 1.0)
    liveness.leave(1)
    assert liveness.faults(500.0) == []


def test_whoever_did_not_run_itself_judges_nobody_for_silence():
    world = World()
    assert set(world.failed(3600.0)) == {2, 3}
    world.liveness.pardon(3600.0)
    assert world.failed(3629.9) == {}
    assert set(world.failed(3630.0)) == {2, 3}


def test_a_process_is_not_gone_because_this_one_has_no_file_descriptors_left():
    own = process_id(os.getpid())
    with mock.patch.object(Path, "read_text", side_effect=OSError(errno.EMFILE, "Too many")):
        assert own.life() is Life.UNKNOWN
    assert ProcessId(own.pid, own.started + 1).life() is Life.ENDED
    child = subprocess.Popen(["true"])
    gone = process_id(child.pid)
    child.wait()
    assert gone.life() is Life.ENDED


def test_a_refused_datagram_says_that_the_process_has_ended():
    world = World()
    world.liveness.refuse(2, 10.0)
    assert world.failed(10.0) == {}  # of an earlier process, perhaps: it may still be heard
    assert world.failed(11.0) == {2: Kind.ENDED}
    world.hear(11.5, 2)
    assert world.failed(14.0) == {}


def test_nothing_is_expected_of_a_rank_that_left():
    world = World()
    for rank in (1, 2, 3):
        world.liveness.leave(rank)
    world.life = Life.ENDED
    assert world.failed(1000.0) == {}
    assert not world.liveness.uncertain(1000.0, 1.0)


@pytest.mark.parametrize("turned", [False, True])
def test_the_cause_comes_before_its_consequences(turned):
    faults = [
        Fault(2, Kind.STUCK, 9.0, "SyncError: Rank 2 waited for rank 1"),
        Fault(1, Kind.ENDED, 10.0),
        Fault(1, Kind.RAISED, 10.5, "ValueError: no"),
        Fault(0, Kind.RAISED, 11.0, "KeyError: x"),
    ]
    ordered = order_faults(faults[::-1] if turned else faults)
    assert [(fault.rank, fault.kind) for fault in ordered] == [
        (1, Kind.RAISED),
        (0, Kind.RAISED),
        (2, Kind.STUCK),
    ]


def test_a_mistake_that_all_ranks_raise_is_no_failure_of_one():
    said = {rank: Statement(rank, "here", rank) for rank in range(2)}
    alike = tuple(Fault(rank, Kind.RAISED, 1.0, "UsageError: seq") for rank in range(2))
    assert Report(alike, said, 2, 2.0, "now", 0.0).is_shared
    assert not Report(alike[:1], said, 2, 2.0, "now", 0.0).is_shared
    other = (alike[0], Fault(1, Kind.RAISED, 1.0, "UsageError: else"))
    assert not Report(other, said, 2, 2.0, "now", 0.0).is_shared
