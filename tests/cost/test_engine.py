"""The engine: lanes beside the program, resources that they share, and where the time goes."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost.engine import (
    SLOWED,
    Compute,
    Instruction,
    Job,
    Mark,
    Run,
    Stage,
    Submit,
    Wait,
    run,
)

LINK = (("link", 1.0),)


def job(lane: str, seconds: float, use: str = "", after: Job | None = None, needs=()) -> Job:
    return Job(
        lane, f"job on {lane}", [Stage(use or lane, seconds, needs)], (after,) if after else ()
    )


def play(*instructions: Instruction) -> Run:
    return run(iter(instructions), spans=True)


def uses(result: Run) -> dict[str, float]:
    """Of all marks together, without what took no time."""
    total: dict[str, float] = {}
    for some in result.uses.values():
        for use, seconds in some.items():
            total[use] = total.get(use, 0.0) + seconds
    return {use: seconds for use, seconds in total.items() if seconds}


def work(seconds: float, *, needs=()) -> Compute:
    return Compute("work", Stage("compute", seconds, needs))


# --- time -----------------------------------------------------------------------------------------


def test_lanes_run_beside_the_program_and_each_other() -> None:
    a, b = job("a", 3), job("b", 2)
    result = play(Submit(a), Submit(b), work(1), Wait(a), Wait(b))
    assert result.marks["end"] == 3


def test_a_lane_runs_its_jobs_in_order() -> None:
    first, second = job("a", 3), job("a", 2)
    result = play(Submit(first), Submit(second), Wait(second))
    assert result.marks["end"] == 5
    assert [(span.begin_s, span.end_s) for span in result.spans] == [(0, 3), (3, 5)]


def test_stages_of_a_job_follow_each_other() -> None:
    two = Job("a", "two", [Stage("encode", 1), Stage("send", 2), Stage("nothing", 0)])
    result = play(Submit(two), Wait(two))
    assert result.marks["end"] == 3
    assert uses(result) == {"encode": 1, "send": 2}


def test_two_lanes_that_share_a_resource_take_twice_as_long() -> None:
    a, b = job("a", 2, needs=LINK), job("b", 2, needs=LINK)
    assert play(Submit(a), Submit(b), Wait(a), Wait(b)).marks["end"] == 4
    a, b = job("a", 2, needs=LINK), job("b", 2, needs=(("other", 1.0),))
    assert play(Submit(a), Submit(b), Wait(a), Wait(b)).marks["end"] == 2


def test_what_is_left_of_the_longer_one_runs_at_full_speed() -> None:
    short, long = job("a", 1, needs=LINK), job("b", 3, needs=LINK)
    result = play(Submit(short), Submit(long), Wait(short), Mark("short"), Wait(long))
    assert (result.marks["short"], result.marks["end"]) == (2, 4)


def test_a_resource_is_only_slow_when_more_is_asked_than_there_is() -> None:
    half, rest = (("cpu", 0.5),), (("cpu", 0.75),)
    a = job("a", 2, needs=half)
    assert play(Submit(a), work(2, needs=half), Wait(a)).marks["end"] == 2
    # Who asks for no more than an equal part has it; the other one has the rest.
    a = job("a", 2, needs=half)
    result = play(Submit(a), work(2, needs=rest), Mark("worked"), Wait(a))
    assert result.marks["worked"] == pytest.approx(2 + 2 / 3)
    assert {span.track: span.end_s for span in result.spans}["a"] == 2


def test_those_who_ask_for_much_get_equal_parts_of_what_is_left() -> None:
    cpu = (("cpu", 1.0),)
    a, b, c = job("a", 1, needs=(("cpu", 0.2),)), job("b", 1, needs=cpu), job("c", 1, needs=cpu)
    result = play(Submit(a), Submit(b), Submit(c), Wait(a), Mark("a"), Wait(b), Wait(c))
    assert result.marks["a"] == 1
    assert result.marks["end"] == pytest.approx(1 + 2 * 0.6)
    # Nobody's part is less than an equal one.
    a, b = job("a", 1, needs=(("cpu", 0.8),)), job("b", 1, needs=cpu)
    result = play(Submit(a), Submit(b), Wait(a), Mark("a"), Wait(b))
    assert result.marks["a"] == pytest.approx(1.6)
    assert result.marks["end"] == pytest.approx(1.8)


def test_what_waits_for_a_link_asks_for_less_of_a_processor() -> None:
    hop = (("link", 1.0), ("cpu", 0.5))
    a, b = job("a", 1, needs=hop), job("b", 1, needs=hop)
    result = play(Submit(a), Submit(b), work(2, needs=(("cpu", 1.0),)))
    # Each has half of the link and so a quarter of the processor, which leaves half of it.
    assert {span.track: span.end_s for span in result.spans} == {"a": 2, "b": 2, "compute": 3}


def test_the_tightest_resource_decides() -> None:
    both = (("cpu", 1.0), ("link", 1.0))
    a, b, c = job("a", 1, needs=both), job("b", 1, needs=LINK), job("c", 1, needs=LINK)
    result = play(Submit(a), Submit(b), Submit(c), Wait(a), Wait(b), Wait(c))
    assert result.marks["end"] == 3


def test_a_job_waits_for_one_on_another_lane() -> None:
    first = job("a", 2)
    second = job("b", 1, after=first)
    third = job("b", 1)  # behind it in its lane, though it waits for nothing itself
    result = play(Submit(first), Submit(second), Submit(third), Wait(third))
    assert result.marks["end"] == 4
    begun = {span.track + str(span.begin_s) for span in result.spans}
    assert begun == {"a0.0", "b2.0", "b3.0"}


def test_a_job_waits_for_all_that_it_comes_after() -> None:
    first, second = job("a", 2), job("b", 3)
    last = Job("c", "last", [Stage("c", 1)], (first, second))
    result = play(Submit(first), Submit(second), Submit(last), Wait(last))
    assert result.marks["end"] == 4
    assert uses(result) == {"a": 2, "b": 1, "c": 1}


def test_jobs_that_take_no_time_free_what_waits_for_them() -> None:
    first = job("a", 1)
    empty = Job("b", "empty", [], (first,))
    last = job("c", 1, after=empty)
    assert play(Submit(first), Submit(empty), Submit(last), Wait(last)).marks["end"] == 2


def test_everything_infinitely_fast_takes_no_time() -> None:
    a = job("a", 0)
    result = play(Mark("begin"), Submit(a), work(0), Wait(a), Mark("done"))
    assert result.marks["done"] == result.marks["end"] == 0
    assert uses(result) == {}


def test_lanes_go_on_after_the_program() -> None:
    """As refreshes do: they cost the next step, not this one."""
    late = job("a", 5)
    result = play(Submit(late), work(1), Mark("over"))
    assert (result.marks["over"], result.marks["end"]) == (1, 5)
    assert uses(result) == {"compute": 1}


def test_waiting_for_what_never_comes_is_an_error() -> None:
    never = job("a", 1)
    blocked = job("b", 1, after=never)
    with pytest.raises(AssertionError, match="never comes"):
        play(Submit(blocked), Wait(blocked))


# --- where the time goes --------------------------------------------------------------------------


def test_a_wait_is_for_what_is_left_of_the_job() -> None:
    a = job("a", 3, "gather")
    assert uses(play(Submit(a), work(2), Wait(a))) == {"compute": 2, "gather": 1}


def test_a_wait_behind_another_job_is_for_that_one_first() -> None:
    reduce, gather = job("a", 2, "reduce"), job("a", 1, "gather")
    result = play(Submit(reduce), Submit(gather), Wait(gather))
    assert uses(result) == {"reduce": 2, "gather": 1}


def test_a_wait_behind_another_lane_is_for_that_lanes_job() -> None:
    fetch = job("disk", 2, "tier")
    gather = job("net", 1, "gather", after=fetch)
    assert uses(play(Submit(fetch), Submit(gather), Wait(gather))) == {"tier": 2, "gather": 1}


def test_hidden_jobs_cost_nothing() -> None:
    a = job("a", 2, "gather")
    assert uses(play(Submit(a), work(2), Wait(a))) == {"compute": 2}


def test_crowded_processors_are_named() -> None:
    cpu = (("cpu", 1.0),)
    a = job("a", 1, "reduce", needs=cpu)
    result = play(Submit(a), work(2, needs=cpu), Wait(a))
    assert uses(result) == pytest.approx({"compute": 2, SLOWED: 1})
    assert result.marks["end"] == 3


def test_time_counts_for_the_mark_before_it() -> None:
    result = play(Mark("one"), work(1), Mark("two"), work(2))
    assert result.uses == {"one": {"compute": 1, SLOWED: 0}, "two": {"compute": 2, SLOWED: 0}}
    assert result.marks == {"one": 0, "two": 1, "end": 3}


times = st.floats(0, 10)
shares = st.sampled_from([(), LINK, (("cpu", 0.6),), (("cpu", 1.0), ("link", 1.0))])


@st.composite
def programs(draw) -> list[tuple]:
    """Instructions as data: a job's number stands for it."""
    found: list[tuple] = []
    for number in range(draw(st.integers(1, 8))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else []
        lane, seconds = draw(st.sampled_from("abc")), draw(st.lists(times, max_size=3))
        found.append(("submit", lane, seconds, draw(shares), after))
        found.append(("work", draw(times), draw(shares)))
        if draw(st.booleans()):
            found.append(("wait", draw(st.integers(0, number))))
    return found


def written(program: list[tuple], scale: float = 1.0) -> Iterator[Instruction]:
    jobs: list[Job] = []
    for kind, *rest in program:
        if kind == "submit":
            lane, seconds, needs, after = rest
            stages = [Stage(lane, scale * each, needs) for each in seconds]
            jobs.append(Job(lane, lane, stages, [jobs[index] for index in after]))
            yield Submit(jobs[-1])
        elif kind == "work":
            yield work(scale * rest[0], needs=rest[1])
        else:
            yield Wait(jobs[rest[0]])
    yield Mark("over")


@settings(max_examples=150)
@given(programs())
def test_uses_sum_up_to_the_time_that_passed(program: list[tuple]) -> None:
    result = run(written(program), spans=True)
    over = result.marks["over"]
    assert sum(uses(result).values()) == pytest.approx(over, abs=1e-9)
    alone = sum(rest[0] for kind, *rest in program if kind == "work")
    assert over >= alone - 1e-9
    everything = alone + sum(sum(rest[1]) for kind, *rest in program if kind == "submit")
    assert result.marks["end"] <= everything + 1e-9  # something always runs at full use


@settings(max_examples=50)
@given(programs())
def test_twice_as_slow_takes_twice_as_long(program: list[tuple]) -> None:
    once, twice = run(written(program)), run(written(program, 2.0))
    assert twice.marks["end"] == pytest.approx(2 * once.marks["end"], abs=1e-9)
