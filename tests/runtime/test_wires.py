"""Hops in wire formats: the same training where nothing is lost, close to it where something is."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.core.topology import Topology
from shardwise.core.trace import Trace, recording
from shardwise.cost.file import load_cluster
from shardwise.cost.simulate import simulate
from shardwise.model.facts import ModuleFacts
from shardwise.model.units import describe
from shardwise.plans import hops
from shardwise.plans.memory import memory
from shardwise.plans.plan import Plan
from shardwise.plans.validate import legal_plans, violations
from shardwise.runtime.surface import access
from tests.models import SharedLayers, TinyGPT, adamw, batch, lm_loss, make, mine

WIRES = {
    "int8": ("int8", "int8", "int8"),
    "zeropp": ("int8", "int4,node=int8", ""),
    "delta": ("", "int4,node=int8", "int4/delta"),
    "odd blocks": ("world=int8/32/symmetric", "int8/64,node=bf16", "bf16"),
}
"""Formats of P, G and OS."""


def wired(plan: Plan, params: str, grads: str, optim: str) -> Plan:
    return replace(
        plan,
        min_unit_numel=1000,
        params=replace(plan.params, wire=params),
        grads=replace(plan.grads, wire=grads),
        optim=replace(plan.optim, wire=optim),
    )


def train(plan: Plan, levels: str, kind=TinyGPT, steps: int = 3, **kwargs):
    """A few steps in float32; returns the sharded model and the losses of the global batches."""
    model = make(kind, torch.float32, **kwargs)
    optimizer = adamw(model)
    sw.shard(model, optimizer, plan=plan, levels=levels)
    losses = []
    for step in range(steps):
        for micro in range(2):
            if micro == 0:
                with sw.no_sync(model):
                    lm_loss(model, *mine(*batch(2 * step))).backward()
            else:
                loss = lm_loss(model, *mine(*batch(2 * step + 1)))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return model, losses


def assert_replicas_agree(model, label: object) -> None:
    """All holders of an interval hold equal bits, at rest and gathered."""
    runtime = runtime_of(model)
    for unit in runtime.units:
        unit.settle()
    runtime.grid.block_host_until_idle()
    for unit in runtime.units:
        for flat in unit.flats:
            mine_here = (flat.part_at, flat.params.shard.tensor.clone())
            seen: list = [None] * dist.get_world_size()
            dist.all_gather_object(seen, mine_here)
            held: dict = {}
            for place, part in seen:
                first = held.setdefault(place, part)
                assert torch.equal(first, part), (label, unit.name, place)
    model.eval()
    with torch.no_grad():
        logits = model(batch(0)[0])
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, logits)
    for other in seen:
        assert torch.equal(other, seen[0]), label
    model.train()


# --- nothing lost ---------------------------------------------------------------------------------


def check_lossless(levels: str) -> None:
    """A format that loses nothing gives the bits of raw hops, under every third legal plan."""
    for plan in legal_plans(Topology.parse(levels))[::3]:  # the others add nothing but time
        raw, raw_losses = train(wired(plan, "", "", ""), levels, steps=2)
        coded, losses = train(wired(plan, "fp32", "fp32", "fp32"), levels, steps=2)
        assert losses == raw_losses, plan
        expected = sw.state_dict(raw, rank0_only=False)
        for name, value in sw.state_dict(coded, rank0_only=False).items():
            assert torch.equal(value, expected[name]), (plan, name)
        sw.unshard(raw)
        sw.unshard(coded)


@pytest.mark.parametrize("levels", ["world=2", "node=2,world=2"])
def test_a_format_that_loses_nothing_gives_the_bits_of_raw_hops(levels, request):
    pool = request.getfixturevalue({2: "two", 4: "four"}[Topology.parse(levels).world])
    pool.run(check_lossless, levels, limit_s=240)


def check_chunks() -> None:
    """Reductions in several chunks are those in one, with and without the outer lane."""
    kept = hops.CHUNK_NUMEL, hops.LEAST_COLUMNS
    for wires in (
        ("", "int4,node=int8", ""),
        ("", "world=int8", ""),
        ("", "int4/feedback,node=int8", ""),
    ):
        plan = wired(sw.presets.zero3(), *wires)
        results = []
        for sizes in ((1, 1), kept):
            hops.CHUNK_NUMEL, hops.LEAST_COLUMNS = sizes
            model, losses = train(plan, "node=2,world=2", dim=64, layers=2)
            results.append((losses, sw.state_dict(model, rank0_only=False)))
            sw.unshard(model)
        hops.CHUNK_NUMEL, hops.LEAST_COLUMNS = kept
        (losses, values), (whole_losses, whole_values) = results
        assert losses == whole_losses
        for name in values:
            assert torch.equal(values[name], whole_values[name]), (wires, name)


def test_chunks_of_a_reduction_give_the_bits_of_the_whole(four):
    four.run(check_chunks, limit_s=120)


# --- something lost -------------------------------------------------------------------------------


def lossy_plans(levels: str, wires: str, begin: int) -> list[Plan]:
    """Some of the legal plans; the cases begin at different ones, so that few are in none."""
    topology = Topology.parse(levels)
    every = 6 if topology.world == 4 else 1
    plans = [wired(plan, *WIRES[wires]) for plan in legal_plans(topology)[begin::every]]
    return [plan for plan in plans if not violations(plan, topology)]


def check_lossy(levels: str, wires: str, kind, begin: int) -> None:
    """Losses near those of one process, and equal bits on all replicas, under legal plans."""
    reference = make(kind, torch.float32)
    optimizer = adamw(reference)
    expected = []
    for step in range(3):
        for index in (2 * step, 2 * step + 1):
            loss = lm_loss(reference, *batch(index))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    plans = lossy_plans(levels, wires, begin)
    assert len(plans) > 2
    for lossy in plans:
        model, losses = train(lossy, levels, kind)
        assert losses == pytest.approx(expected, rel=5e-2), lossy
        assert_replicas_agree(model, lossy)
        sw.unshard(model)


@pytest.mark.parametrize(
    ("levels", "wires", "begin"),
    [
        ("node=2,world=2", "odd blocks", 0),
        ("node=2,world=2", "int8", 1),
        ("node=2,world=2", "delta", 2),
        ("node=2,world=2", "zeropp", 4),
        ("world=2", "zeropp", 0),
        ("node=1,world=4", "delta", 3),
        ("node=4,world=1", "int8", 5),
    ],
)
def test_lossy_hops_train_alike_and_replicas_hold_equal_bits(levels, wires, begin, request):
    pool = request.getfixturevalue({2: "two", 4: "four"}[Topology.parse(levels).world])
    kind = SharedLayers if wires == "zeropp" else TinyGPT
    pool.run(check_lossy, levels, wires, kind, begin, limit_s=240)


# --- what else must hold --------------------------------------------------------------------------


def check_exact_reading() -> None:
    """Looking at parameters shows their exact values, and writing them back changes nothing."""
    plan = wired(sw.presets.zeropp(), "int8", "int4", "")
    model = make(TinyGPT, torch.float32)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sw.shard(model, adamw(model), plan=plan, levels="node=2,world=2")
    with torch.no_grad():
        lm_loss(model, *batch(0))  # gathers in int8
    for name, value in sw.state_dict(model, rank0_only=False).items():
        assert torch.equal(value, expected[name]), name
    with sw.full_params(model, write=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    for name, value in sw.state_dict(model, rank0_only=False, master=True).items():
        assert torch.equal(value, expected[name]), name
    sw.unshard(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def check_nan() -> None:
    """A NaN in one rank's gradient is one in everybody's, in every format, with feedback or not."""
    for wire in ("int8", "int4,node=int8", "int4/feedback,node=int8", "fp16"):
        model = make(TinyGPT, torch.float32)
        optimizer = adamw(model)
        sw.shard(
            model, optimizer, plan=wired(sw.presets.zero3(), "", wire, ""), levels="node=2,world=2"
        )
        loss = lm_loss(model, *mine(*batch(0)))
        (loss * (float("nan") if dist.get_rank() == 3 else 1.0)).backward()
        grads = sw.full_grads(model)
        assert all(grad.isnan().all() for grad in grads.values()), wire
        assert sw.clip_grad_norm_(model, 1.0).isnan()
        optimizer.zero_grad()
        # What is skipped (as GradScaler does) leaves nothing behind.
        lm_loss(model, *mine(*batch(0))).backward()
        assert all(grad.isfinite().all() for grad in sw.full_grads(model).values()), wire
        sw.unshard(model)


def check_feedback() -> None:
    """With error feedback what one reduction loses is in the next: sums of gradients stay near."""
    sums = {}
    for wire in ("", "int4,node=fp32", "int4/feedback,node=fp32"):
        model = make(TinyGPT, torch.float32)
        sw.shard(
            model,
            adamw(model),
            plan=wired(sw.presets.zero3(), "", wire, ""),
            levels="node=2,world=2",
        )
        total: dict = {}
        for _ in range(20):
            lm_loss(model, *mine(*batch(0))).backward()
            for name, grad in sw.full_grads(model).items():
                total[name] = total.get(name, 0) + grad.double()
            model.zero_grad()
        sums[wire] = total
        sw.unshard(model)
    exact, without, with_feedback = sums.values()

    def error(other: dict) -> float:
        gap = sum(float((other[n] - exact[n]).square().sum()) for n in exact)
        return (gap / sum(float(exact[n].square().sum()) for n in exact)) ** 0.5

    assert error(with_feedback) < error(without) / 5, (error(with_feedback), error(without))


def check_feedback_state() -> None:
    """Feedback can be taken out and put back: a run that goes on elsewhere has the same bits."""
    plan = wired(sw.presets.zero3(), "", "int4/feedback,node=int8", "")

    def run(stop: int | None):
        model = make(TinyGPT, torch.float32)
        sw.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.0), plan=plan, levels="node=2,world=2"
        )
        for step in range(4):
            if step == stop:
                state = access.feedback_state(runtime_of(model))
                sw.unshard(model)
                sw.shard(model, plan=plan, levels="node=2,world=2")
                access.load_feedback_state(runtime_of(model), state)
            model.zero_grad()
            lm_loss(model, *mine(*batch(step))).backward()
        grads = sw.full_grads(model)
        return model, grads

    straight, expected = run(None)
    broken, got = run(2)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
    with pytest.raises(sw.UsageError, match="fits no flat of this model"):
        access.load_feedback_state(runtime_of(broken), {"elsewhere/0": torch.zeros(1, 16)})
    needed = sum(lost.nbytes for lost in access.feedback_state(runtime_of(straight)).values())
    topology = Topology.parse("node=2,world=2")
    spec = describe(make(TinyGPT, torch.float32), plan, topology)
    without = wired(sw.presets.zero3(), "", "int4,node=int8", "")
    planned = memory(plan, spec, topology).wires - memory(without, spec, topology).wires
    assert needed == planned
    sw.unshard(straight)
    sw.unshard(broken)


def check_differences() -> None:
    """Differences let replicas follow the exact master closely, however long; direct int4 does not."""
    gaps = {}
    for wire in ("int4/delta", "int4"):
        model, _ = train(wired(sw.presets.amsp(), "", "", wire), "node=2,world=2", steps=10)
        held = sw.state_dict(model, rank0_only=False)
        master = sw.state_dict(model, rank0_only=False, master=True)
        gaps[wire] = max(float((held[n] - master[n]).abs().max()) for n in held)
        sw.unshard(model)
    # One AdamW step moves a weight by about the learning rate, 0.01.
    assert gaps["int4/delta"] < 0.01, gaps
    assert gaps["int4"] > 5 * gaps["int4/delta"], gaps


def check_mixed_precision() -> None:
    """bf16 compute and reduction, frozen parameters, clipping and an uneven divisor, in few bits."""
    for preset in (sw.presets.zeropp, sw.presets.lean):
        results = {}
        for wires in (None, ("", "", "")):
            precision = sw.Precision(compute="bfloat16", reduce="bfloat16", master="float32")
            plan = replace(preset(precision=precision), min_unit_numel=1000)
            plan = plan if wires is None else wired(plan, *wires)
            model = make(TinyGPT, torch.float32)
            for parameter in model.blocks[0].parameters():
                parameter.requires_grad_(False)
            optimizer = adamw(model)
            sw.shard(model, optimizer, plan=plan, levels="node=2,world=2")
            sw.set_grad_divisor(model, 3.0)
            losses = []
            for step in range(4):
                loss = lm_loss(model, *mine(*batch(step)))
                loss.backward()
                norm = sw.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert_replicas_agree(model, plan)
            results[wires is None] = [*losses, norm.item()]
            sw.unshard(model)
        assert results[True] == pytest.approx(results[False], rel=5e-2), preset


class Complex(torch.nn.Module):
    """Float and complex parameters in one unit: two flats, of which one has no wire format."""

    def __init__(self) -> None:
        super().__init__()
        self.real = torch.nn.Linear(40, 40)
        self.turn = torch.nn.Parameter(torch.randn(40, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.real(x) * self.turn).abs().square().mean()


def check_complex() -> None:
    """What has no wire format travels raw beside what has one."""
    plain = make(Complex, None)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        plain(inputs[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = make(Complex, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = wired(sw.presets.zero3(), "int8", "int4,node=int8", "")
    sw.shard(model, optimizer, plan=plan, levels="node=2,world=2")
    for step in range(3):
        model(mine(inputs[step])[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    got = sw.state_dict(model, rank0_only=False)
    for name, value in plain.state_dict().items():
        assert (got[name] - value).abs().max() < 0.02, name
    sw.unshard(model)


def check_tracks() -> None:
    """Hops are traced on the tracks and by the names that a predicted step has."""
    levels = "node=2,world=2"
    lanes = ("gather", "reduce", "outer", "refresh")
    facts = ModuleFacts(TinyGPT, _forward)
    cluster = load_cluster("two-cores-200m")
    for preset in (sw.presets.zero3, sw.presets.zeropp, sw.presets.lean):
        plan = replace(preset(), min_unit_numel=1000)
        model = make(TinyGPT, torch.float32)
        optimizer = adamw(model)
        sw.shard(model, optimizer, plan=plan, levels=levels)
        trace = Trace()
        for step in range(3):
            with recording(trace if step else Trace()):
                lm_loss(model, *mine(*batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
                runtime_of(model).grid.block_host_until_idle()
        sw.unshard(model)
        topology = cluster.topology
        work = facts.work(2, 8, plan, topology)
        predicted = simulate(plan, facts.spec(plan, topology), work, cluster, spans=True)
        traced, expected = (
            {(span.track, span.name) for span in spans if span.track in lanes}
            for spans in (trace.spans, predicted.spans)
        )
        assert traced == expected, plan.name
        assert any(track == "outer" for track, _ in traced) == (plan.name != "zero3")


def _forward(model: torch.nn.Module, micro_batch: int, seq: int) -> torch.Tensor:
    tokens = torch.zeros(micro_batch, seq, dtype=torch.int64)
    return lm_loss(model, tokens, tokens)


@pytest.mark.parametrize(
    "check",
    [
        check_exact_reading,
        check_nan,
        check_feedback,
        check_feedback_state,
        check_differences,
        check_mixed_precision,
        check_complex,
        check_tracks,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_wires(check, four):
    four.run(check, limit_s=120)
