"""The flight recorder's ring, and ranks lined up by it."""

import os
import threading
from pathlib import Path

import pytest

from shardwise.core import flight
from shardwise.core.flight import Mark, Recorder, attach, read
from shardwise.core.lineup import conclusion, line_up


def test_the_ring_keeps_the_last_records_in_order():
    recorder = Recorder()
    for index in range(3000):
        recorder.point(f"p{index % 7}")
    events = read(recorder.snapshot()).events
    assert len(events) == 2048
    assert [event.what for event in events] == [f"p{index % 7}" for index in range(952, 3000)]
    assert list(events) == sorted(events, key=lambda event: event.at_s)


def test_what_was_begun_and_not_ended_by_thread():
    recorder = Recorder()
    recorder.begin("update", "a")
    recorder.begin("fetch", "b")
    recorder.end("fetch", "b")
    lane = threading.Thread(target=recorder.begin, args=("gather", "c"), name="shardwise-gather")
    lane.start()
    lane.join()
    opened = read(recorder.snapshot()).open()
    assert {thread: [event.title for event in stack] for thread, stack in opened.items()} == {
        "MainThread": ["update of unit 'a'"],
        "gather": ["gather of unit 'c'"],
    }
    assert recorder.position() == "gather of unit 'c'"
    recorder.reset()  # an exception left what the main thread had begun
    assert list(read(recorder.snapshot()).open()) == ["gather"]


def test_names_beyond_the_table_lose_their_name_only():
    recorder = Recorder()
    for index in range(2000):
        recorder.point("x" * 90 + str(index))
    events = read(recorder.snapshot()).events
    assert len(events) == 2000
    assert {event.what for event in events[-100:]} == {""}


def test_others_see_it_while_it_goes_on(tmp_path):
    recorder = Recorder()
    recorder.stepped()
    path = recorder.share(3)
    seen = attach(path)
    os.unlink(path)
    recorder.begin("reduce", "z")
    recorder.stepped(41)
    found = read(seen)
    assert (found.rank, found.pid, found.step) == (3, os.getpid(), 41)
    assert found.events[-1].mark is Mark.BEGIN
    assert found.events[-1].title == "reduce of unit 'z'"


def test_what_is_no_recorders_file_is_refused():
    good = Recorder().snapshot()
    for bad in (b"", b"x" * flight.SIZE, good[:-1]):
        with pytest.raises(ValueError, match="not a flight recorder's file"):
            read(bad)


def test_a_full_disk_is_an_error_and_leaves_nothing(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(Path("/dev/shm").glob("shardwise-*"))
    with pytest.raises(OSError, match="No space"):
        Recorder().share(0)
    assert set(Path("/dev/shm").glob("shardwise-*")) <= before


def lane_of(recorder: Recorder, units: list[str], *, stays: bool) -> None:
    """A gather lane that does these, and stays in the last one."""

    def run() -> None:
        for unit in units:
            recorder.begin("gather", unit)
            if unit != units[-1] or not stays:
                recorder.end("gather", unit)

    lane = threading.Thread(target=run, name="shardwise-gather")
    lane.start()
    lane.join()


def test_who_waited_for_whom():
    flights = []
    for rank, (done, stays) in enumerate([(300, True), (297, False), (300, True)]):
        recorder = Recorder()
        recorder.share(rank)
        lane_of(recorder, [f"u{index}" for index in range(done)], stays=stays)
        flights.append(read(recorder.snapshot()))
    for path in Path("/dev/shm").glob("shardwise-*.flight"):
        if int.from_bytes(path.read_bytes()[16:20], "little") == os.getpid():
            path.unlink()
    rows = line_up(flights)
    assert [row.waits_for for row in rows] == [(1,), (), (1,)]
    assert [row.behind for row in rows] == [0, 3, 0]
    assert conclusion(rows).startswith("Ranks 0, 2 waited for rank 1, which waited for nobody")
