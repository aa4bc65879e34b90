"""What is simulated is what the issuer issues: another schedule is another step."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.core.cluster import Cluster
from shardwise.core.trace import Span
from shardwise.core.work import IN_FLIGHT
from shardwise.cost.simulate import Estimate, simulate
from shardwise.plans import expected, order, presets
from shardwise.plans.inputs import InputCall, Inputs
from shardwise.plans.ops import Kind, Op, Phase
from shardwise.plans.order import Issuer
from shardwise.plans.plan import Plan, Tiers
from shardwise.plans.schedule import Ops, UnitOps
from shardwise.plans.walk import Walk
from tests.cost.test_simulate import cluster, model, plan_of, work

BLOCKS = 6


def step(plan: Plan, on: Cluster, *, flops: float = 1e9) -> Estimate:
    return simulate(plan, model(on.world, BLOCKS), work(BLOCKS, flops), on, spans=True)


def of(found: Estimate, name: str) -> list[Span]:
    return sorted(
        (span for span in found.spans if span.name == name), key=lambda span: span.begin_s
    )


def seconds(found: Estimate, name: str) -> float:
    return sum(span.end_s - span.begin_s for span in of(found, name))


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Op], Op | None]], None]:
    """Changes operations as units make them; None drops one."""

    def install(method: str, change: Callable[[Op], Op | None]) -> None:
        made = getattr(UnitOps, method)

        def changed(self: UnitOps, *args, **kwargs) -> Ops:
            ops = (change(op) for op in made(self, *args, **kwargs))
            return tuple(op for op in ops if op is not None)

        monkeypatch.setattr(UnitOps, method, changed)

    return install


def test_an_operation_that_is_not_issued_costs_nothing(change) -> None:
    on = cluster("node=2,world=2")
    before = step(presets.zero3(), on)
    assert len(of(before, "gather blocks.2")) == 2
    change("gather", lambda op: None if op.unit == "blocks.2" else op)
    after = step(presets.zero3(), on)
    assert not of(after, "gather blocks.2")
    assert len(of(after, "gather blocks.3")) == 2
    assert after.step_s < before.step_s


def test_twice_the_bytes_take_twice_as_long(change) -> None:
    on = cluster("world=4", latency_s=0.0)
    before = step(presets.zero2(), on)

    def double(op: Op) -> Op:
        hops = tuple(replace(hop, sent_bytes=2 * hop.sent_bytes) for hop in op.hops)
        return replace(op, hops=hops)

    change("ready", double)
    after = step(presets.zero2(), on)
    for index in range(BLOCKS):
        name = f"reduce blocks.{index}"
        assert seconds(after, name) == pytest.approx(2 * seconds(before, name))
    assert seconds(after, "refresh blocks.1") == pytest.approx(seconds(before, "refresh blocks.1"))
    assert after.exposed["reduce"] > before.exposed["reduce"]


@pytest.mark.parametrize(
    ("method", "kind", "field", "span"),
    [
        ("gather", Kind.FETCH, "reads", "fetch blocks.1"),
        ("gather", Kind.GATHER, "copies", "gather blocks.1"),
        ("ready", Kind.COLLECT, "copies", "collect blocks.1"),
        ("ready", Kind.STORE, "writes", "store blocks.1"),
        ("update", Kind.UPDATE, "reads", "read states of blocks.1"),
        ("update", Kind.UPDATE, "writes", "write states of blocks.1"),
    ],
)
def test_every_byte_of_an_operation_has_a_price(change, method, kind, field, span) -> None:
    on, plan = cluster("node=2,world=2"), plan_of("infinity")
    before = step(plan, on)

    def grow(op: Op) -> Op:
        grows = op.kind is kind and op.unit == "blocks.1"
        if not grows:
            return op
        if field == "copies":
            return replace(op, copies=500 * op.copies)
        grown = tuple(replace(m, **{field: 500 * getattr(m, field)}) for m in op.moves)
        return replace(op, moves=grown)

    change(method, grow)
    after = step(plan, on)
    assert seconds(after, span) > 1.5 * seconds(before, span) > 0
    assert after.step_s > before.step_s


def test_a_gather_comes_after_what_its_operation_names(change) -> None:
    """The first gathers of a step wait for refreshes; those that name none do not."""
    on = cluster("node=2,world=2")
    before = step(presets.amsp(), on)
    change("gather", lambda op: replace(op, after=()))
    after = step(presets.amsp(), on)
    waited, eager = (
        min(span.begin_s for span in of(f, "gather blocks.0")) for f in (before, after)
    )
    begins = min(span.begin_s for span in before.spans), min(span.begin_s for span in after.spans)
    assert eager - begins[1] < waited - begins[0]


def test_gathers_that_are_not_issued_ahead_are_seen(monkeypatch) -> None:
    on = cluster("world=4")
    before = step(presets.zero3(), on, flops=2e10)
    monkeypatch.setattr(Walk, "ahead", lambda self: [])
    after = step(presets.zero3(), on, flops=2e10)
    assert after.exposed["gather"] > 3 * before.exposed["gather"]


def test_reductions_in_flight_are_the_issuers(monkeypatch) -> None:
    """With one at most the next unit's gradients wait for it; without a limit only backward's end
    does."""
    on = cluster("world=4", bandwidth=3e8)

    def begins(found: Estimate) -> float:
        """How long after the last block's reduction the first block's backward begins."""
        first, last = of(found, "backward blocks.0"), of(found, "reduce blocks.5")
        return first[0].begin_s - last[0].begin_s

    found = []
    for most in (1, order.REDUCTIONS_IN_FLIGHT, 100):
        monkeypatch.setattr(order, "REDUCTIONS_IN_FLIGHT", most)
        found.append(begins(step(presets.zero1(), on)))
    one, ours, all_at_once = found
    assert one > ours > all_at_once


def test_the_order_of_refreshes_is_the_issuers(monkeypatch) -> None:
    """The next step's first units wait for theirs: with the last unit first, they wait for all."""
    on = cluster("world=4", bandwidth=3e8)
    before = step(presets.zero1(), on)
    made = Issuer.step
    monkeypatch.setattr(
        Issuer, "step", lambda self, **options: list(reversed(made(self, **options)))
    )
    after = step(presets.zero1(), on)
    names = ["refresh root", *(f"refresh blocks.{index}" for index in range(BLOCKS))]
    for found, wanted in ((before, names), (after, names[::-1])):
        spans = sorted(found.spans, key=lambda span: span.begin_s)
        assert [span.name for span in spans if span.track == "refresh"] == wanted
    assert of(before, "forward blocks.0")[0].begin_s == of(before, "refresh blocks.0")[0].end_s
    assert after.exposed["refresh"] > before.exposed["refresh"]


def test_inputs_are_loaded_one_call_ahead(monkeypatch) -> None:
    on = cluster("node=2,world=2")
    plan = replace(presets.zero3(), activations="nvme", tiers=Tiers(path="/nvme"))
    before = step(plan, on, flops=2e10)
    blocks = [f"blocks.{index}" for index in reversed(range(BLOCKS))]
    loads = sorted(
        (span for span in before.spans if span.name.startswith("load")), key=lambda s: s.begin_s
    )
    # The last ones stay in the buffers from which they are written.
    assert [span.name for span in loads] == [f"load {name}" for name in blocks[IN_FLIGHT:]]
    for earlier, name in itertools.pairwise(blocks[IN_FLIGHT - 1 :]):
        (recomputed,), (load,) = of(before, f"recompute {earlier}"), of(before, f"load {name}")
        assert load.begin_s <= recomputed.begin_s
    assert len(of(before, "save blocks.3")) == 1

    late = Inputs.load

    def only_own(self: Inputs, call: InputCall) -> list[Op]:
        others = {index: each for index, each in self._resting.items() if each is not call}
        self._resting = {}
        ops = late(self, call)
        self._resting = others
        return ops

    monkeypatch.setattr(Inputs, "load", only_own)
    after = step(plan, on, flops=2e10)
    assert after.exposed["tier"] > before.exposed["tier"]
    stays = step(replace(plan, activations="recompute"), on, flops=2e10)
    assert not any(span.name.startswith(("load", "save")) for span in stays.spans)


def test_a_pass_that_is_cut_short_is_simulated_as_it_is(monkeypatch) -> None:
    """The program has no walk of its own: without backward's events there is none."""
    made = expected.Training.run

    def forward_only(self: expected.Training, phase: Phase):
        events = made(self, phase)
        return tuple(event for event in events if event.trigger.in_forward)

    monkeypatch.setattr(expected.Training, "run", forward_only)
    found = step(presets.zero3(), cluster("world=4"))
    assert not any("backward" in span.name or "reduce" in span.name for span in found.spans)
    assert sum("forward" in span.name for span in found.spans) == BLOCKS + 1
