"""Cases that run the same user code in one plain process and on ranks under several plans.

A case is a function ``run(model, rank, step)`` that does what a user's loop would do for one rank
and one step (forward, backward, whatever it is about) and returns numbers to compare. The
reference is one plain process that does the work of all ranks, one after the other, and averages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.plans.plan import Plan, StatePlan
from shardwise.runtime.unit import State
from tests.models import largest_difference, on_rank_0

LEVELS = {1: "world=1", 2: "node=1,world=2", 4: "node=2,world=2"}
PLANS: dict[str, Plan] = {
    "zero3": sw.presets.zero3(),
    "zero3 keep=node": sw.presets.zero3(keep="node"),
    "fsdp keep=full": sw.presets.fsdp(reshard_after_forward=False),
    "ddp": sw.presets.ddp(),
    "zero1": sw.presets.zero1(),
    "amsp": sw.presets.amsp(),
    "hsdp": sw.presets.hsdp(),
    "zero2": sw.presets.zero2(),
    "mics world:2": sw.presets.mics("world:2"),
}
"""Every preset, and what can be kept."""
ONE_LEVEL = ("zero3", "fsdp keep=full", "zero1", "ddp")
"""Plans that differ on one level; the others need two."""
TWO_LEVELS = ("zero3 keep=node", "amsp", "hsdp")
LIMIT_S = 20.0
"""A rank that waits longer for another has found a bug."""

Run = Callable[[nn.Module, int, int], Any]


def levels_of(plan: Plan) -> str:
    """The grid on which a plan differs most from others: MiCS groups straddle the nodes' border."""
    world = dist.get_world_size()
    return "node=1,world=4" if plan.name == "mics" and world == 4 else LEVELS[world]


def small(plan: Plan, **changes: Any) -> Plan:
    """The plan for test models: even small blocks are units."""
    return replace(plan, **{"min_unit_numel": 500, **changes})


def spreads(params: str, grads: str, optim: str) -> dict[str, StatePlan]:
    return {
        name: StatePlan(spread=spread)
        for name, spread in (("params", params), ("grads", grads), ("optim", optim))
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def build(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


@dataclass(frozen=True)
class Case:
    """One way to use a model."""

    kind: Callable[[], nn.Module]
    run: Run
    plans: tuple[str, ...] = ONE_LEVEL
    changes: dict[str, Any] = field(default_factory=dict)
    """Other fields of the plan."""
    steps: int = 3
    extra_gathers: bool = False
    """Whether uses beyond the recorded order are expected."""
    sharded: Callable[[nn.Module], None] | None = None
    """Called after shard, for hooks and the like; on the plain model it is called as well."""


def collector(cases: dict[str, Case]) -> Callable[..., Callable[[Run], Run]]:
    """A decorator that adds a case under its function's name."""

    def case(kind: Callable[[], nn.Module], **options: Any) -> Callable[[Run], Run]:
        def add(run: Run) -> Run:
            cases[run.__name__] = Case(kind, run, **options)
            return run

        return add

    return case


MOST = 100.0
"""How large parameters may grow: the tolerance of 1e-9 is absolute."""


def reference(case: Case, world: int) -> tuple[list[list[Any]], dict[str, torch.Tensor]]:
    """What one plain process gets: results by step and rank, and the final parameters."""
    model = build(case.kind)
    if case.sharded:
        case.sharded(model)
    optimizer = sgd(model) if any(True for _ in model.parameters()) else None
    results = []
    for step in range(case.steps):
        results.append([case.run(model, rank, step) for rank in range(world)])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    final = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    largest = max((float(p.abs().max()) for p in final.values() if p.numel()), default=0.0)
    assert largest < MOST, f"it diverges to {largest:.3g}: rounding would exceed the tolerance"
    return results, final


def check_case(case: Case) -> None:
    """Runs on every rank: all plans of a case against the reference."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results, expected = on_rank_0(lambda: reference(case, world))
    for name in case.plans:
        model = build(case.kind)
        optimizer = sgd(model) if expected else None
        plan = small(PLANS[name], **case.changes)
        sw.shard(model, optimizer, plan, levels=levels_of(plan), timeout_s=LIMIT_S)
        if case.sharded:
            case.sharded(model)
        for step in range(case.steps):
            result = case.run(model, rank, step)
            assert_close(result, results[step][rank], f"{name}, step {step}")
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
        got = sw.state_dict(model, rank0_only=False)
        difference = largest_difference({n: got[n] for n in expected}, expected)
        assert difference <= 1e-9, (name, difference)
        assert_at_rest(model)
        extra = sw.stats(model)["extra_gathers"]
        assert case.extra_gathers or extra == 0, (name, "extra gathers", extra)
        sw.unshard(model)


def assert_close(got: Any, expected: Any, what: str, tolerance: float = 1e-9) -> None:
    pairs = zip(
        torch.utils._pytree.tree_leaves(got),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    )
    for left, right in pairs:
        if left is None or right is None:
            assert left is right, what
            continue
        left, right = torch.as_tensor(left).double(), torch.as_tensor(right).double()
        torch.testing.assert_close(
            left, right, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
        )


def assert_at_rest(model: nn.Module) -> None:
    """Between steps no full buffer is held, no claim is open, and parameters are guarded."""
    for unit in runtime_of(model).units:
        if unit.travels:
            assert unit.state is State.RESTING, unit
            assert not any(flat.params.full.filled for flat in unit.flats), unit
    for held in runtime_of(model).issuer.units:
        assert not held.leases, held
        assert not held.busy, held


@contextmanager
def peer_links() -> Iterator[None]:
    """Inside, models are sharded over point-to-point messages, as between hosts."""
    from shardwise.comm import grid

    readable, grid.readable = grid.readable, lambda *_: False
    try:
        yield
    finally:
        grid.readable = readable
