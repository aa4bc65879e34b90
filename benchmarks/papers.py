"""The simulator against what three papers published of their own clusters.

    python benchmarks/papers.py                         # half a minute: groups A, B and C
    python benchmarks/papers.py --groups D              # what the joint space buys: some minutes
    python benchmarks/papers.py --markdown --main       # the tables of docs/papers.md

Speeds are the catalogue's, which cites them; models, batches and placements are the papers' setups,
and where these could not be read a row or a group says what was assumed. Nothing is fitted to a
result. Where DeepSpeed ran, two bounds are shown: transfers hidden as well as here, and gathers not
hidden at all (``prefetch=0``), because how far it hides them is not published.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import exp, log

from rich.console import Console
from rich.table import Table

from shardwise.core.cluster import Cluster, Curve
from shardwise.cost.file import load_cluster
from shardwise.cost.simulate import Estimate
from shardwise.plan import presets
from shardwise.plan.builtin import builtin
from shardwise.plan.facts import Facts
from shardwise.plan.memory import Memory
from shardwise.plan.plan import Plan, StatePlan
from shardwise.plan.validate import legal_plans
from shardwise.planner.alike import Alike
from shardwise.planner.search import Request, overflows, search
from shardwise.planner.space import Loss, Placement, mixed, placed, placements

TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of a paper, and what the simulator says of it."""

    what: str
    predicted: float
    published: float | None = None
    unit: str = ""
    exposed: dict[str, float] | None = None
    """What the predicted step went for, in shares of it."""
    main: bool = False
    """Whether docs/papers.md shows it."""

    @property
    def ratio(self) -> float | None:
        return self.predicted / self.published if self.published else None


@dataclass(frozen=True)
class Group:
    """Rows of one kind."""

    key: str
    title: str
    setup: str
    why: str
    """Why predictions differ from what was published."""
    rows: Callable[[], Iterator[Row]]


# --- running a plan -------------------------------------------------------------------------------


def estimate(
    facts: Facts,
    plan: Plan,
    cluster: Cluster,
    *,
    micro: int,
    seq: int,
    accumulate: int = 1,
    flat: bool = False,
) -> Estimate:
    """A step of a plan."""
    topology = cluster.topology
    work = facts.work(micro, seq, plan, topology)
    return Alike(facts.spec(plan, topology)).estimate(
        plan, work, cluster, accumulate=accumulate, flat=flat
    )


def states(name: str, params: str, grads: str, optim: str, dtype: str) -> Plan:
    """A plan of three spreads."""
    return Plan(
        name=name,
        params=StatePlan(spread=params),
        grads=StatePlan(spread=grads),
        optim=StatePlan(spread=optim),
        precision=mixed(dtype),
    )


def shares(found: Estimate) -> dict[str, float]:
    """What a step went for, in shares of at least one percent."""
    parts = {use: seconds / found.step_s for use, seconds in found.exposed.items()}
    return {use: round(share, 3) for use, share in parts.items() if share >= 0.01}


def needs(facts: Facts, plan: Plan, cluster: Cluster, *, micro: int, seq: int) -> Memory:
    """What each rank needs with one micro-batch a step."""
    topology = cluster.topology
    work = facts.work(micro, seq, plan, topology)
    return Alike(facts.spec(plan, topology)).memory(
        plan, topology, accumulates=False, activations=work.saved.held(plan.activations)
    )


def fits(facts: Facts, plan: Plan, cluster: Cluster, *, micro: int, seq: int) -> bool:
    """Whether that is there on every tier."""
    request = Request(facts=facts, cluster=cluster, global_batch=cluster.world, seq=seq)
    return not any(overflows(needs(facts, plan, cluster, micro=micro, seq=seq), request))


# --- A: ZeRO++ ------------------------------------------------------------------------------------

ZEROPP_MODELS = {
    # 40 layers of 6144 are in DeepSpeed's tutorial. The others' shapes could not be read; layers of
    # 12288, as GPT-3's, give 49, 91 and 138 billion with a whole number of layers.
    "18B": "gpt:layers=40,width=6144,heads=48",
    "49B": "gpt:layers=27,width=12288,heads=96",
    "91B": "gpt:layers=50,width=12288,heads=96",
    "138B": "gpt:layers=76,width=12288,heads=96",
}
LINKS = {1: "dgx2-v100-100g", 2: "dgx2-v100-200g", 4: "dgx2-v100-400g", 8: "dgx2-v100"}

ZEROPP = {  # (links, tokens a GPU): by model, TFLOP/s a GPU of ZeRO-3 and of ZeRO++
    (1, 1024): {"18B": (14, 31), "49B": (11, 22), "91B": (11, 22), "138B": (11, 22)},
    (1, 2048): {"18B": (26, 46), "49B": (20, 38), "91B": (20, 38), "138B": (20, 38)},
    (2, 2048): {"18B": (37, 50), "138B": (32, 48)},
    (4, 1024): {"18B": (25, 35), "49B": (23, 36), "91B": (23, 36), "138B": (23, 36)},
    (4, 2048): {"18B": (40, 53), "49B": (36, 51), "91B": (36, 51), "138B": (36, 50)},
    (8, 2048): {"18B": (47, 54), "138B": (48, 55)},
}
"""The bars of the official blog, as printed on them."""

RECOMPUTED = 4 / 3
"""These papers count a recomputed forward: 18B of tutorial, 512 tokens, 9.96 s at 7.65 TFLOP/s are
76e12 operations, 8 for a parameter and token."""


def _links(count: int) -> str:
    return "1 link" if count == 1 else f"{count} links"


def deepspeed_zero3(prefetch: int) -> Plan:
    """ZeRO-3 as DeepSpeed runs it, to be priced flat."""
    plan = presets.zero3(precision=mixed("float16"))
    return replace(plan, activations="recompute", prefetch=prefetch)


def released_zeropp(prefetch: int) -> Plan:
    """ZeRO++ as released: int8 on every gather, a copy in the node, int4 on both hops."""
    plan = our_zeropp(prefetch)
    return replace(plan, grads=replace(plan.grads, wire="int4"))


def our_zeropp(prefetch: int) -> Plan:
    plan = presets.zeropp(precision=mixed("float16"))
    return replace(plan, activations="recompute", prefetch=prefetch)


@cache
def zeropp_pair(
    model: str, links: int, tokens: int, prefetch: int, world: int = 384
) -> tuple[Estimate, Estimate]:
    """ZeRO-3 and the released ZeRO++."""
    cluster = load_cluster(LINKS[links]).with_world(world)
    facts = builtin(ZEROPP_MODELS[model])
    before, after = (
        estimate(facts, plan, cluster, micro=1, seq=tokens, flat=True)
        for plan in (deepspeed_zero3(prefetch), released_zeropp(prefetch))
    )
    return before, after


def tflops(found: Estimate) -> float:
    """A GPU's, the recomputed forward counted."""
    return found.flops_per_s * RECOMPUTED / TERA


def zeropp_rows(
    prefetch: int, cases: Iterable[tuple[int, int]] = tuple(ZEROPP), models: Iterable[str] = ()
) -> Iterator[Row]:
    """Speed-ups, and TFLOP/s of both sides."""
    for links, tokens in cases:
        for model, (before, after) in ZEROPP[links, tokens].items():
            if models and model not in models:
                continue
            pair = zeropp_pair(model, links, tokens, prefetch)
            where = f"{model}, {tokens // 1024}K tokens, {_links(links)}"
            main = model in ("18B", "138B")
            yield Row(
                what=f"{where}: speed-up",
                predicted=pair[0].step_s / pair[1].step_s,
                published=after / before,
                unit="x",
                main=main,
            )
            for name, found, published in zip(
                ("ZeRO-3", "ZeRO++"), pair, (before, after), strict=True
            ):
                yield Row(
                    what=f"{where}: {name}",
                    predicted=tflops(found),
                    published=published,
                    unit="TFLOP/s",
                    exposed=shares(found),
                    main=main and prefetch == 0,
                )


def tutorial_rows() -> Iterator[Row]:
    """The log of DeepSpeed's tutorial, whose network is not named."""
    for links in (1, 8):
        before, after = zeropp_pair("18B", links, 512, 0, world=64)
        where = f"18B, 512 tokens, 64 GPUs, {_links(links)} assumed"
        yield Row(
            what=f"{where}: speed-up",
            predicted=before.step_s / after.step_s,
            published=9955.9 / 3680.6,
            unit="x",
            main=True,
        )
        for name, found, published in (
            ("ZeRO-3", before, 9.9559),
            ("ZeRO++", after, 3.6806),
        ):
            yield Row(
                what=f"{where}: step of {name}",
                predicted=found.step_s,
                published=published,
                unit="s",
                exposed=shares(found),
                main=links == 1,
            )


def our_zeropp_rows() -> Iterator[Row]:
    """What shardwise's own preset would make of it: hops by level, int8 in the node, overlap."""
    for (links, tokens), models in ZEROPP.items():
        for model in models:
            cluster = load_cluster(LINKS[links])
            found = estimate(
                builtin(ZEROPP_MODELS[model]), our_zeropp(1), cluster, micro=1, seq=tokens
            )
            before, _ = zeropp_pair(model, links, tokens, 0)
            yield Row(
                what=f"{model}, {tokens // 1024}K tokens, {_links(links)}: speed-up",
                predicted=before.step_s / found.step_s,
                unit="x",
                exposed=shares(found),
                main=model in ("18B", "138B"),
            )


# --- B: AMSP --------------------------------------------------------------------------------------

PEAK = 312 * TERA
AMSP_BATCH, AMSP_SEQ = 1024, 4096
"""Sequences in a step (4M tokens), and tokens of each; one at a time on a GPU."""

AMSP_PLANS = {  # P, G, OS as AMSP chose them, and the group of MiCS
    "llama-7b": (("none", "none", "node"), "node"),
    "llama-13b": (("node:4", "node:4", "node"), "node"),
    "llama-30b": (("node", "node", "world:4"), "world:2"),
}
ACTIVATIONS = {"llama-7b": "keep", "llama-13b": "keep", "llama-30b": "recompute"}
"""An assumption: kept where that fits on 80 GB with two bytes for a gradient, as they have."""

AMSP_MFU: dict[tuple[str, str, int], float] = {
    ("llama-7b", "AMSP", 8): 0.64, ("llama-7b", "AMSP", 1024): 0.51,
    ("llama-7b", "ZeRO-1", 8): 0.63, ("llama-7b", "ZeRO-1", 1024): 0.36,
    ("llama-7b", "MiCS", 8): 0.50, ("llama-7b", "MiCS", 1024): 0.35,
    ("llama-7b", "ZeRO-3", 1024): 0.04, ("llama-13b", "AMSP", 1024): 0.52,
    ("llama-13b", "MiCS", 1024): 0.33, ("llama-13b", "ZeRO-3", 8): 0.47,
    ("llama-13b", "ZeRO-3", 1024): 0.04, ("llama-30b", "AMSP", 1024): 0.42,
    ("llama-30b", "MiCS", 1024): 0.29,
}  # fmt: skip
PLANNER_GAIN = {"llama-7b": 1.3, "llama-13b": 1.1, "llama-30b": 1.13}
"""AMSP's plan over MiCS's plan in AMSP's own engine, 1024 GPUs."""
MODULES = ("*_proj", "model.embed_tokens", "lm_head")
"""Units of one matrix each, as DeepSpeed gathers parameters."""


def amsp_plan(strategy: str, model: str) -> Plan:
    amsp, group = AMSP_PLANS[model]
    spreads = {
        "AMSP": amsp,
        "ZeRO-1": ("none", "none", "world"),
        "ZeRO-3": ("world", "world", "world"),
        "MiCS": (group, group, group),
    }[strategy]
    return replace(states(strategy, *spreads, "bfloat16"), activations=ACTIVATIONS[model])


@cache
def amsp_estimate(model: str, plan: Plan, world: int, flat: bool) -> Estimate:
    return estimate(
        builtin(model),
        plan,
        load_cluster("a800-amsp").with_world(world),
        micro=1,
        seq=AMSP_SEQ,
        accumulate=AMSP_BATCH // world,
        flat=flat,
    )


def mfu_rows() -> Iterator[Row]:
    """Every strategy with units of a layer and transfers hidden; one flat collective each."""
    for (model, strategy, world), published in AMSP_MFU.items():
        found = amsp_estimate(model, amsp_plan(strategy, model), world, flat=True)
        yield Row(
            what=f"{model}, {world} GPUs: {strategy}",
            predicted=found.flops_per_s / PEAK,
            published=published,
            unit="MFU",
            exposed=shares(found),
            main=True,
        )


def variant_rows() -> Iterator[Row]:
    """DeepSpeed's strategies in the three ways that B1 does not have."""
    variants = {
        "layer by layer, not hidden": ((), 0),
        "matrix by matrix, hidden": (MODULES, 1),
        "matrix by matrix, not hidden": (MODULES, 0),
    }
    for (model, strategy, world), published in AMSP_MFU.items():
        if strategy not in ("ZeRO-3", "MiCS"):
            continue
        for name, (units, prefetch) in variants.items():
            plan = replace(amsp_plan(strategy, model), units=units, prefetch=prefetch)
            found = amsp_estimate(model, plan, world, flat=True)
            yield Row(
                what=f"{model}, {world} GPUs: {strategy}, {name}",
                predicted=found.flops_per_s / PEAK,
                published=published,
                unit="MFU",
                exposed=shares(found),
                main=True,
            )


def strategy_rows() -> Iterator[Row]:
    """Ratios of step times at 1024 GPUs."""
    for model, published in PLANNER_GAIN.items():
        amsp, mics = (
            amsp_estimate(model, amsp_plan(name, model), 1024, flat=True)
            for name in ("AMSP", "MiCS")
        )
        yield Row(
            what=f"{model}: AMSP's plan over MiCS's in one engine",
            predicted=mics.step_s / amsp.step_s,
            published=published,
            unit="x",
            main=True,
        )
    for model, strategy in (
        ("llama-7b", "MiCS"),
        ("llama-7b", "ZeRO-3"),
        ("llama-13b", "MiCS"),
        ("llama-13b", "ZeRO-3"),
        ("llama-30b", "MiCS"),
    ):
        plan = replace(amsp_plan(strategy, model), units=MODULES, prefetch=0)
        amsp = amsp_estimate(model, amsp_plan("AMSP", model), 1024, flat=True)
        other = amsp_estimate(model, plan, 1024, flat=True)
        key = (model, strategy, 1024)
        yield Row(
            what=f"{model}: AMSP over DeepSpeed's {strategy}, matrix by matrix",
            predicted=other.step_s / amsp.step_s,
            published=AMSP_MFU[model, "AMSP", 1024] / AMSP_MFU[key],
            unit="x",
            main=True,
        )


def written(plan: Plan) -> str:
    """P/G/OS and what else a plan has."""
    spreads = "/".join(state.spread for state in (plan.params, plan.grads, plan.optim))
    tiers = "/".join(state.tier for state in (plan.params, plan.grads, plan.optim))
    wires = "|".join(state.wire or "raw" for state in (plan.params, plan.grads, plan.optim))
    more = [
        f"keep={plan.keep}" if plan.keep != "none" else "",
        wires if wires != "raw|raw|raw" else "",
        tiers if plan.rests_on("cpu") or plan.rests_on("nvme") else "",
        plan.activations if plan.activations != "keep" else "",
    ]
    return " ".join([spreads, *(word for word in more if word)])


def choice_rows() -> Iterator[Row]:
    """AMSP's plan over the best of its own space, and over the search's (also ``keep``)."""
    cluster = load_cluster("a800-amsp")
    space = own_spaces(cluster, "bfloat16")["AMSP"]
    for model, (theirs, _) in AMSP_PLANS.items():
        request = Request(
            facts=builtin(model),
            cluster=cluster,
            global_batch=AMSP_BATCH,
            seq=AMSP_SEQ,
            precision=mixed("bfloat16"),
            loss=Loss.NONE,
        )
        chosen = best_of([states("AMSP", *theirs, "bfloat16")], request)
        ours = best_of(space, request)
        found = search(request, count=3).best
        assert chosen is not None
        assert ours is not None
        assert found is not None
        for name, best in (("best of its space", ours), ("search, lossless", found.estimate)):
            yield Row(
                what=f"{model}: AMSP's {written(chosen.plan)} over {name}, {written(best.plan)}",
                predicted=chosen.step_s / best.step_s,
                unit="x",
                exposed=shares(best),
                main=True,
            )


INTERNEVO = {
    "zero1 over all": (4062, 3842, 3752, 3690, 3571, 3209, 2861, 2271),
    "zero1=8": (4078, 3939, 3919, 3944, 3928, 3920, 3835, 3625),
}
INTERNLM = "llama:layers=32,width=4096,heads=32,ffn=11008,vocab=103168"
"""Its page has 4103 tokens/s at 183 TFLOP/s: 44.6e9 operations a token, which are this model's."""
INTERNEVO_WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)


def internevo_rows() -> Iterator[Row]:
    """7B, 4 micro-batches of 2 sequences of 2048, nothing recomputed (InternEvo's own page)."""
    first: dict[str, tuple[float, float]] = {}
    for name, published in INTERNEVO.items():
        optim = "world" if name == "zero1 over all" else "node"
        plan = states(name, "none", "none", optim, "bfloat16")
        for world, tokens in zip(INTERNEVO_WORLDS, published, strict=True):
            cluster = load_cluster("a100-roce").with_world(world)
            found = estimate(
                builtin(INTERNLM), plan, cluster, micro=2, seq=2048, accumulate=4, flat=True
            )
            speed = found.tokens_per_s / world
            first.setdefault(name, (speed, tokens))
            yield Row(
                what=f"{name}, {world} GPUs",
                predicted=speed,
                published=tokens,
                unit="tokens/GPU/s",
                exposed=shares(found),
                main=world in (8, 1024),
            )
            if world == 1024:
                yield Row(
                    what=f"{name}: kept of the speed from 8 to 1024 GPUs",
                    predicted=speed / first[name][0],
                    published=tokens / first[name][1],
                    main=True,
                )


# --- C: ZeRO-Infinity -----------------------------------------------------------------------------

INFINITY_SEQ = 1024
INFINITY = {
    # layers, width, batch a GPU, GPUs of a model-parallel group: table 1 of the paper, recalled and
    # not verified; layers and widths give the named sizes, and the talk has two of them.
    "0.5T": (124, 18432, 7.0, 4, 46.3),
    "1T": (128, 25600, 5.0, 4, 48.9),
    "5T": (174, 49152, 3.0, 4, 44.0),
    "10T": (200, 65536, 2.0, 4, 42.8),
    "20T": (205, 90112, 1.25, 8, 37.2),
}
SCALING = {64: 2.8, 128: 6.2, 256: 11.8, 512: 25.1}
"""PFLOP/s of 1T by GPUs."""
PREFETCH = {2: 1.29, 4: 1.19, 8: 1.09, 10: 1.06, 14: 1.01, 16: 1.02}
"""Speed-up by batch."""


def together(cluster: Cluster, count: int) -> Cluster:
    """A model-parallel group as one device of so many times everything; its own traffic is free."""

    def faster(curve: Curve) -> Curve:
        return Curve(tuple((amount * count, seconds) for amount, seconds in curve.points))

    node, world = cluster.levels
    device, host = cluster.device, cluster.host
    assert node.bandwidth is not None
    assert host is not None
    assert host.update is not None
    kinds = ("forward", "backward", "encode", "decode")
    curves = {kind: {k: faster(c) for k, c in getattr(device, kind).items()} for kind in kinds}
    return replace(
        cluster,
        levels=(
            replace(node, size=node.size // count, bandwidth=node.bandwidth * count),
            world,
        ),
        device=replace(
            device,
            **curves,
            memory_bytes=device.memory_bytes * count,
            update=faster(device.update),
            copy=faster(device.copy),
        ),
        host=replace(host, bandwidth=host.bandwidth * count, update=faster(host.update)),
    )


def infinity_plan(placement: Placement, activations: str = "recompute", prefetch: int = 1) -> Plan:
    """ZeRO-3 with states on tiers; whole layers, as tiles change memory and hardly time."""
    plan = presets.zero3(precision=mixed("float16"))
    return replace(placed(plan, placement, "/nvme"), activations=activations, prefetch=prefetch)


def gpt(layers: int, width: int) -> Facts:
    return builtin(f"gpt:layers={layers},width={width},heads={width // 128},seq={INFINITY_SEQ}")


def first_fitting(layers: int, width: int, cluster: Cluster, batch: int) -> Plan:
    """The placement that moves least of those that fit, and the same of activations."""
    facts = gpt(layers, width)
    for placement in placements(cluster, "/nvme"):
        for activations in ("recompute", "cpu"):
            plan = infinity_plan(placement, activations)
            if fits(facts, plan, cluster, micro=batch, seq=INFINITY_SEQ):
                return plan
    return infinity_plan(("nvme", "nvme", "nvme"), "cpu")


def infinity_rows(sizes: Iterable[str] = tuple(INFINITY)) -> Iterator[Row]:
    """TFLOP/s a GPU on 512 V100."""
    for size in sizes:
        layers, width, batch, group, published = INFINITY[size]
        cluster = together(load_cluster("dgx2-v100").with_world(512), group)
        plan = first_fitting(layers, width, cluster, int(batch * group))
        found = estimate(
            gpt(layers, width),
            plan,
            cluster,
            micro=int(batch * group),
            seq=INFINITY_SEQ,
            flat=True,
        )
        yield Row(
            what=f"{size} on 512 GPUs, {where(plan)}",
            predicted=tflops(found) / group,
            published=published,
            unit="TFLOP/s",
            exposed=shares(found),
            main=True,
        )


def where(plan: Plan) -> str:
    tiers = [state.tier for state in (plan.params, plan.grads, plan.optim)]
    return f"P, G, OS on {', '.join(tiers)}; activations {plan.activations}"


def scaling_rows() -> Iterator[Row]:
    """1T from 64 to 512 GPUs, placed everywhere as at 64."""
    layers, width, batch, group, _ = INFINITY["1T"]
    base = load_cluster("dgx2-v100")
    plan = first_fitting(layers, width, together(base.with_world(64), group), int(batch * group))
    first: tuple[float, float] | None = None
    for world, published in SCALING.items():
        cluster = together(base.with_world(world), group)
        found = estimate(
            gpt(layers, width),
            plan,
            cluster,
            micro=int(batch * group),
            seq=INFINITY_SEQ,
            flat=True,
        )
        total = tflops(found) * cluster.world / 1000
        first = first or (total, published)
        yield Row(
            what=f"1T on {world} GPUs, {where(plan)}",
            predicted=total,
            published=published,
            unit="PFLOP/s",
            exposed=shares(found),
            main=True,
        )
        if world == 512:
            yield Row(
                what="1T: speed-up from 64 to 512 GPUs over linear",
                predicted=total / first[0] / 8,
                published=published / first[1] / 8,
                unit="x",
                main=True,
            )


PLACED = {
    # strategy: spreads, placement, width (an assumption), billions
    "data parallel": ("none", "none", ("device", "device", "device"), 1536, 1.4),
    "ZeRO-Offload": ("none", "world", ("device", "cpu", "cpu"), 4096, 13.0),
    "ZeRO-3": ("world", "world", ("device", "device", "device"), 4096, 20.0),
    "Infinity on CPU": ("world", "world", ("cpu", "cpu", "cpu"), 8192, 70.0),
    "Infinity on NVMe": ("world", "world", ("nvme", "nvme", "nvme"), 25600, 1000.0),
}


def size_rows() -> Iterator[Row]:
    """The largest GPT of one DGX-2: one sequence of 1024 tokens, recomputed from inputs."""
    cluster = load_cluster("dgx2-v100").with_world(16)
    for name, (params, others, placement, width, published) in PLACED.items():
        plan = states(name, params, others, others, "float16")
        plan = replace(placed(plan, placement, "/nvme"), activations="recompute")
        if name.startswith("Infinity"):
            plan = replace(plan, activations="cpu", tiling=presets.infinity("/nvme").tiling)
        layers = most_layers(plan, width, cluster)
        yield Row(
            what=f"{name}: {layers} layers of {width}",
            predicted=gpt(layers, width).numel / 1e9,
            published=published,
            unit="B parameters",
            main=True,
        )


def most_layers(plan: Plan, width: int, cluster: Cluster) -> int:
    """How many layers fit; every tier's need is a straight line from a few of them on."""
    host, disk, share = cluster.host, cluster.disk, cluster.ranks_per_node
    assert host is not None
    assert disk is not None
    short, longer = 6, 8
    first, second = (
        needs(gpt(layers, width), plan, cluster, micro=1, seq=INFINITY_SEQ)
        for layers in (short, longer)
    )
    limits = {
        "total": cluster.device.memory_bytes,
        "cpu": host.memory_bytes // share,
        "nvme": disk.size_bytes // share,
    }
    most = []
    for term, limit in limits.items():
        low, high = getattr(first, term), getattr(second, term)
        if high > low:
            most.append(short + (limit - low) * (longer - short) // (high - low))
    return int(min(most))


def prefetch_rows() -> Iterator[Row]:
    """8B on 64 GPUs: 10 layers of 8192, P on the device, G and OS on the host (recalled)."""
    cluster = load_cluster("dgx2-v100").with_world(64)
    for batch, published in PREFETCH.items():
        without, ahead = (
            estimate(
                gpt(10, 8192),
                infinity_plan(("device", "cpu", "cpu"), prefetch=prefetch),
                cluster,
                micro=batch,
                seq=INFINITY_SEQ,
                flat=True,
            )
            for prefetch in (0, 1)
        )
        yield Row(
            what=f"8B on 64 GPUs, batch {batch}: speed-up by prefetching",
            predicted=without.step_s / ahead.step_s,
            published=published,
            unit="x",
            exposed=shares(without),
            main=True,
        )


# --- D: the joint space ---------------------------------------------------------------------------

JOINT_CLUSTERS = {
    "a800-amsp": ("bfloat16", 4096),
    "dgx2-v100": ("float16", 2048),
    "4090-10g": ("bfloat16", 2048),
}
JOINT_MODELS = ("llama-7b", "llama-30b", "llama2-70b")


def own_spaces(cluster: Cluster, dtype: str) -> dict[str, list[Plan]]:
    """The plans that each paper chooses from, on its own: one wiring, everything on the device."""
    legal = [
        replace(plan, precision=mixed(dtype))
        for plan in legal_plans(cluster.topology)
        if plan.keep == "none"
    ]
    topology = cluster.topology

    def factors(plan: Plan) -> tuple[int, int, int]:
        params, grads, optim = (
            topology.factor(state.spread) for state in (plan.params, plan.grads, plan.optim)
        )
        return params, grads, optim

    zero3 = [presets.zero3(keep=keep, precision=mixed(dtype)) for keep in ("none", "node")]
    return {
        # A step has one micro-batch here, so that G never rests and follows OS.
        "AMSP": [p for p in legal if (f := factors(p))[0] <= f[1] == f[2]],
        "MiCS": [p for p in legal if len(set(factors(p))) == 1],
        "ZeRO++": [
            replace(
                plan,
                params=replace(plan.params, wire=params),
                grads=replace(plan.grads, wire=grads),
            )
            for plan in zero3
            for params in ("", "int8")
            for grads in ("", "int4")
        ],
    }


def best_of(plans: Iterable[Plan], request: Request) -> Estimate | None:
    """The fastest of some plans that fits, one sequence at a time."""
    topology = request.cluster.topology
    best: Estimate | None = None
    for plan in plans:
        for activations in ("keep", "recompute"):
            chosen = replace(plan, activations=activations)
            work = request.facts.work(1, request.seq, chosen, topology)
            model = Alike(request.facts.spec(chosen, topology))
            needed = model.memory(
                chosen,
                topology,
                accumulates=False,
                activations=work.saved.held(activations),
            )
            if any(overflows(needed, request)):
                continue
            found = model.estimate(chosen, work, request.cluster, accumulate=1)
            if best is None or found.step_s < best.step_s:
                best = found
            break
    return best


def joint_rows(
    clusters: Iterable[str] = tuple(JOINT_CLUSTERS), models: Iterable[str] = JOINT_MODELS
) -> Iterator[Row]:
    """Step times of the best plan of the joint space, and of each paper's own over it."""
    for name in clusters:
        dtype, seq = JOINT_CLUSTERS[name]
        cluster = load_cluster(name).with_world(1024)
        spaces = own_spaces(cluster, dtype)
        for model in models:
            request = Request(
                facts=builtin(model),
                cluster=cluster,
                global_batch=1024,
                seq=seq,
                precision=mixed(dtype),
            )
            best = search(request, count=1).best
            if best is None:
                continue
            yield Row(
                what=f"{name}, {model}: joint, {written(best.plan)}",
                predicted=best.step_s,
                unit="s",
                exposed=shares(best.estimate),
                main=True,
            )
            for space, plans in spaces.items():
                found = best_of(plans, request)
                if found is None:
                    continue
                yield Row(
                    what=f"{name}, {model}: {space}'s best, {written(found.plan)}, over it",
                    predicted=found.step_s / best.step_s,
                    unit="x",
                    exposed=shares(found),
                    main=True,
                )
            if name == "4090-10g" and model in BY_HAND:
                yield _by_hand(request, BY_HAND[model], best.step_s)


BY_HAND = {"llama-7b": ("device", "keep"), "llama2-70b": ("cpu", "recompute")}
"""Legal plans that the search does not find: where P rests, and activations."""


def _by_hand(request: Request, setting: tuple[str, str], best_s: float) -> Row:
    """P in a node and the rest over all ranks, with few bits on every hop."""
    tier, activations = setting
    plan = states("by hand", "node", "world", "world", "bfloat16")
    plan = replace(
        plan,
        params=replace(plan.params, tier=tier, wire="int8"),
        grads=replace(plan.grads, wire="int4,node=int8"),
        optim=replace(plan.optim, wire="int4/delta"),
        activations=activations,
    )
    found = estimate(request.facts, plan, request.cluster, micro=1, seq=request.seq)
    assert not any(overflows(found.memory, request))
    name = f"{request.cluster.name}, {request.facts.name}"
    return Row(
        what=f"{name}: by hand, {written(plan)}, over it",
        predicted=found.step_s / best_s,
        unit="x",
        exposed=shares(found),
        main=True,
    )


# --- what there is --------------------------------------------------------------------------------

_DEEPSPEED = (
    "ZeRO-3 is one flat ring over all ranks for each layer; ZeRO++ gathers int8 flat, keeps a copy "
    "in the node and reduces int4 all to all on both hops. Shapes of 49B, 91B and 138B are "
    "assumed (12288 wide). TFLOP/s count the recomputed forward, as DeepSpeed does."
)

GROUPS = (
    Group(
        "A1",
        "ZeRO++ on 384 V100, gathers not hidden",
        _DEEPSPEED,
        "This way was tried second, when A2 did not agree, so its agreement is weaker evidence "
        "than it looks. Speed-ups are within 30 %; TFLOP/s are up to 1.6 times too high, most at "
        "1K tokens. Part of that may be compute, priced at 70 TFLOP/s, a peak of matrix products. "
        "That does not explain 49B to 138B on one link, which are published slower than 18B "
        "although they send as many bytes for an operation; we do not know why.",
        lambda: zeropp_rows(0),
    ),
    Group(
        "A2",
        "ZeRO++ on 384 V100, hidden as well as here",
        _DEEPSPEED,
        "With all gathers one layer ahead, four links would leave ZeRO-3 next to nothing to wait "
        "for, and the work of encoding would make ZeRO++ slower. The published figures themselves "
        "say that DeepSpeed waited: from 1K to 2K tokens ZeRO-3's steps grew by 38 to 85 % of the "
        "compute of 1K (of rounded bars), and hidden compute on one link would add nothing. So "
        "DeepSpeed lies between A1 and A2.",
        lambda: zeropp_rows(1),
    ),
    Group(
        "A3",
        "ZeRO++ in DeepSpeed's tutorial",
        "18B, 64 V100, gathers not hidden. The log does not name the network: both ends are shown.",
        "One link gives the speed-up and four fifths of both steps, eight links give neither; but "
        "as we chose the link, that confirms little. What is missing (1.9 s and 0.8 s) is about "
        "as long as all compute (1.1 s), so that compute alone is not it; we do not know what is.",
        tutorial_rows,
    ),
    Group(
        "A4",
        "shardwise's zeropp over DeepSpeed's ZeRO-3",
        "The preset as it is (int8 in the node, int4 between nodes, one hop a level, gathers one "
        "layer ahead) against ZeRO-3 of A1. Nobody has published such a figure.",
        "",
        our_zeropp_rows,
    ),
    Group(
        "B1",
        "AMSP on A800: layer by layer, hidden",
        "MFU: 312 TFLOP/s, operations of all matrix products and of the whole square of "
        "attention, nothing recomputed counted. One sequence of 4096 tokens at once, 1024 in a "
        "step. Activations are kept for 7B and 13B and recomputed for 30B (assumed).",
        "The simulator hides nearly all traffic and so sees no difference between strategies at "
        "1024 GPUs, which is wrong: they were measured from 4 to 51 %. Its compute of 225 TFLOP/s "
        "is the best of the FlashAttention-2 paper; AMSP has 200 on 8 GPUs. That is the first 11 "
        "%. The rest is traffic: their systems gather module by module, all-reduce instead of "
        "reducing to owners and did not overlap the refresh. We did not simulate the last two.",
        mfu_rows,
    ),
    Group(
        "B2",
        "AMSP's baselines in DeepSpeed, three more ways",
        "One collective for every layer or for every matrix; gathers hidden or not. How DeepSpeed "
        "was set up is not published, so all are shown.",
        "A ring of 1024 ranks takes 4.8 ms however short the message is, and a layer of 7 "
        "matrices takes 21 of them: matrix by matrix that costs ZeRO-3 a factor of four to five. "
        "Even the slowest way is three to four times too fast for ZeRO-3; we do not know what the "
        "rest is. No way is right for all of MiCS.",
        variant_rows,
    ),
    Group(
        "B3",
        "AMSP: ratios at 1024 GPUs",
        "",
        "In one engine that hides, the plans of AMSP and MiCS are equally fast for us; AMSP "
        "measured 1.1 to 1.3. So the simulator does not see the gain of AMSP's planner. Against "
        "DeepSpeed (the slowest way of B2) the order is right, and the factors are not.",
        strategy_rows,
    ),
    Group(
        "B4",
        "AMSP: the plan that the search chooses",
        "Nothing lossy, everything on the device, whatever fits with our memory model.",
        "AMSP minimises the sum of transfers; we minimise a step in which most of them are "
        "hidden, so that many plans are equal and the choice says little: it is not AMSP's, and "
        "with B1 in mind that is no argument against AMSP's. For 13B its plan misses 80 GiB by 2 "
        "here and has to recompute; with two bytes for a gradient, as AMSP has, it would fit.",
        choice_rows,
    ),
    Group(
        "B5",
        "InternEvo 7B on A100, 4x100 Gb",
        "4 micro-batches of 2 sequences of 2048 a GPU, nothing recomputed.",
        "On 8 GPUs the difference is compute: InternEvo reaches 183 TFLOP/s, the catalogue says "
        "225. zero1=8 keeps as much of its speed as predicted, zero1 over all ranks far less. A "
        "likely reason, not simulated: InternEvo broadcasts whole tensors one by one over all "
        "ranks, and waits unless told otherwise; we gather a layer at once, behind the next "
        "forward. The model is InternLM's (103168 words), as its page's tokens and TFLOP/s imply.",
        internevo_rows,
    ),
    Group(
        "C1",
        "ZeRO-Infinity on 512 V100",
        "Layers, widths, batches and model-parallel groups are those of the paper's table 1, "
        "recalled and not verified. A group is one device of four (20T: eight) times everything, "
        "its own all-reduces free. States rest where they first fit.",
        "All are too fast by the same factor of 1.4 to 1.5, and compute is 81 to 97 % of a step: "
        "so it is the rate of compute. 70 TFLOP/s is what the authors call achievable; 3D "
        "parallelism has 47 on this cluster. Relative to 0.5T, every size is within 7 %.",
        infinity_rows,
    ),
    Group(
        "C2",
        "ZeRO-Infinity, 1T from 64 to 512 GPUs",
        "As C1, placed everywhere as it first fits at 64 GPUs.",
        "More than linear, as published, and for the published reason: more nodes, more disks and "
        "processors for the update. We see too much of it, probably because compute is too fast "
        "(C1) beside an update whose rate on the host is an assumption of the catalogue.",
        scaling_rows,
    ),
    Group(
        "C3",
        "ZeRO-Infinity, the largest model of one DGX-2",
        "One sequence of 1024 tokens; widths are assumed. Layers are added until a tier is full.",
        "About 20 % more than published; the authors' batches are not known, and probably larger. "
        "On NVMe 1T may be what they tried rather than a limit: our limit is the disk's 30 TB.",
        size_rows,
    ),
    Group(
        "C4",
        "ZeRO-Infinity, prefetching",
        "10 layers of 8192, P on the device, G and OS on the host (recalled, not verified); one "
        "layer ahead against none.",
        "The effect fades with the batch as published. At batch 2 it is a third: our other side "
        "still hides reductions, gathers at the full rate of eight links are a tenth of a step, "
        "and the update on the host, at an assumed rate, is more than a third of it.",
        prefetch_rows,
    ),
    Group(
        "D",
        "What the joint space buys on 1024 GPUs",
        "One sequence a GPU. Each paper's own space on the device, in our engine (hops by level, "
        "overlap), against what the search finds in all of ours.",
        "On fast networks it buys nothing by this simulator, which however hides more than was "
        "measured there (B1). On 10 Gb it buys 1.4 to 1.5 over ZeRO++'s space, and 2.7 to 5.5 "
        "over AMSP's and MiCS's; the latter is mostly few bits (7B has the same spreads as "
        "AMSP's), which these two do not allow themselves. The search is not perfect: a ratio "
        "below 1 is a plan that it missed.",
        joint_rows,
    ),
)


def mean_ratio(rows: Iterable[Row]) -> float | None:
    """The geometric mean of predicted over published."""
    logs = [log(row.ratio) for row in rows if row.ratio]
    return exp(sum(logs) / len(logs)) if logs else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", default="A,B,C", help="beginnings of their keys")
    parser.add_argument("--main", action="store_true", help="only the main rows")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    wanted = tuple(args.groups.split(","))
    found = {group: list(group.rows()) for group in GROUPS if group.key.startswith(wanted)}
    if args.json:
        rows = [
            {"group": group.key, **asdict(row), "ratio": row.ratio}
            for group, some in found.items()
            for row in some
        ]
        print(json.dumps(rows, indent=1))
        return
    for group, rows in found.items():
        # A summary is of all rows, whichever are shown.
        shown = [row for row in rows if row.main or not args.main]
        (_print_markdown if args.markdown else _print)(group, shown, _summary(rows))


def _cells(row: Row) -> tuple[str, str, str, str]:
    published = f"{row.published:.3g} {row.unit}" if row.published is not None else ""
    ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
    return row.what, f"{row.predicted:.3g} {row.unit}".strip(), published.strip(), ratio


def _print(group: Group, rows: list[Row], summary: str) -> None:
    console = Console(highlight=False)
    table = Table("what", "predicted", "published", "ratio", title=f"{group.key}. {group.title}")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for text in (group.setup, summary, group.why):
        if text:
            console.print(text)
    console.print()


def _print_markdown(group: Group, rows: list[Row], summary: str) -> None:
    print(f"### {group.key}. {group.title}\n")
    if group.setup:
        print(f"{group.setup}\n")
    print("| what | predicted | published | ratio |\n|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(cell.replace("|", ", ") for cell in _cells(row)), "|")
    print()
    for text in (summary, group.why):
        if text:
            print(f"{text}\n")


def _summary(rows: list[Row]) -> str:
    """Of each unit for itself."""
    found = []
    for unit in dict.fromkeys(row.unit for row in rows):
        ratios = [row.ratio for row in rows if row.ratio and row.unit == unit]
        mean = mean_ratio(row for row in rows if row.unit == unit)
        if mean is not None and len(ratios) > 1:
            name = {"x": "speed-up", "": "share"}.get(unit, unit)
            found.append(
                f"{name} {mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} figures)"
            )
    return f"Predicted over published, geometric mean: {'; '.join(found)}." if found else ""


if __name__ == "__main__":
    main()
