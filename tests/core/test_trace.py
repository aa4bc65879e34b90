"""Traces: spans of several threads, in the form that viewers open."""

import json
import threading

from shardwise.core.trace import Trace, active, recording, span


def gather():
    with span("net", "gather b"):
        pass


def test_spans_are_saved_in_chromes_form(tmp_path):
    trace = Trace()
    with recording(trace):
        with span("disk", "read a"):
            pass
        thread = threading.Thread(target=gather)
        thread.start()
        thread.join()
        trace.switch("compute", "forward a")
        trace.switch("compute", "forward b")
    trace.save(tmp_path / "trace.json", rank=3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {"disk", "net", "compute"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans} == {"read a", "gather b", "forward a", "forward b"}
    assert all(e["pid"] == 3 and e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    first, second = (next(e for e in spans if e["name"] == f"forward {x}") for x in "ab")
    assert first["ts"] + first["dur"] <= second["ts"] + 0.2  # microseconds, rounded to tenths


def test_nothing_is_recorded_outside():
    trace = Trace()
    with span("disk", "unseen"):
        pass
    with recording(trace):
        assert active() is trace
    assert active() is None
    with span("disk", "unseen"):
        pass
    assert not trace.spans
