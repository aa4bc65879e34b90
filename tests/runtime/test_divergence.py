"""Ranks that disagree get the right result, or an error with names in bounded time; never a hang.

Everything runs over both links: by default ranks of one host read each other's memory; with
``peer_links`` they send messages, as between hosts.
"""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm.link import Labels, PeerLink
from tests.harness import Workers
from tests.models import Block, largest_difference, on_rank_0
from tests.runtime.support import (
    LEVELS,
    PLANS,
    Case,
    assert_at_rest,
    assert_close,
    build,
    check_case,
    collector,
    peer_links,
    reference,
    sgd,
    small,
)

CASES: dict[str, Case] = {}
case = collector(CASES)
PLANS_HERE = ("zero3", "fsdp keep=full", "zero1")
ALL = list(range(8))
LINKS = {"local": nullcontext, "peer": peer_links}
TIMEOUT_S = 2.5
BOUND_S = 40.0
"""TIMEOUT_S, the grace for others to say where they are, and a slow machine."""


class Routed(nn.Module):
    """Blocks that each call names in its own order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Block(24) for _ in range(8))
        self.last = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        x = self.first(x)
        for index in route:
            x = self.blocks[index](x)
            if index == 3:
                self.middle = x
        return self.last(x)


def features(rank: int, step: int, length: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, length, 24, generator=generator, dtype=torch.float64)


def use(model: nn.Module, rank: int, step: int, route: list[int], length: int = 4) -> float:
    loss = model(features(rank, step, length), route).square().mean()
    loss.backward()
    return loss.item()


# --- correct results ------------------------------------------------------------------------------


@case(Routed, plans=PLANS_HERE)
def another_order_from_the_start(model, rank, step):
    return use(model, rank, step, [1, 0, 3, 2, 4, 7, 6, 5] if rank else ALL)


@case(Routed, plans=PLANS_HERE, steps=4)
def another_order_later(model, rank, step):
    return use(model, rank, step, [1, 0, 3, 2, 7, 6, 5, 4] if rank and step else ALL)


@case(Routed, plans=PLANS_HERE, steps=4)
def the_opposite_order_later(model, rank, step):
    return use(model, rank, step, ALL[4::-1] if rank and step else ALL[:5])


@case(Routed, plans=PLANS_HERE, steps=6)
def layers_dropped_at_random(model, rank, step):
    return use(model, rank, step, _random_route(7 * step + rank))


def _random_route(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [i for i in ALL if torch.rand((), generator=generator) > 0.4]


@case(Routed, plans=PLANS_HERE, steps=4)
def one_rank_skips_most_units(model, rank, step):
    return use(model, rank, step, [0, 7] if rank == step % 2 else ALL)


@case(Routed, plans=PLANS_HERE, steps=4)
def one_rank_skips_most_units_later(model, rank, step):
    return use(model, rank, step, ALL[:2] + ALL[6:] if rank and step else ALL)


@case(Routed, plans=PLANS_HERE, steps=4)
def one_rank_uses_no_unit(model, rank, step):
    return use(model, rank, step, [] if rank == step % 2 else ALL)


@case(Routed, plans=PLANS_HERE, steps=4)
def one_rank_uses_units_twice_from_the_start(model, rank, step):
    return use(model, rank, step, [0, 0, 1, 1, 0] if rank else [0, 1, 2])


@case(Routed, plans=PLANS_HERE, steps=3)
def other_lengths_and_modes(model, rank, step):
    model.train(rank == 0)
    return use(model, rank, step, ALL, length=3 + 2 * rank)


@case(Routed, plans=PLANS_HERE, steps=4)
def backward_through_a_part_on_one_rank(model, rank, step):
    out = model(features(rank, step), ALL)
    loss = (model.middle if rank and step else out).square().mean()
    loss.backward()
    return loss.item()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _backward_that_fails(model, rank, step, where):
    """On rank 1, the backward of one step ends early: what had arrived counts, as without us."""
    out = model(features(rank, step), ALL)
    if rank == 1 and step == 1:
        where(out).register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            out.square().mean().backward()
    else:
        out.square().mean().backward()
    return out.detach()


@case(Routed, plans=PLANS_HERE)
def backward_raises_at_once_on_one_rank(model, rank, step):
    return _backward_that_fails(model, rank, step, lambda out: out)


@case(Routed, plans=PLANS_HERE)
def backward_raises_halfway_on_one_rank(model, rank, step):
    return _backward_that_fails(model, rank, step, lambda out: model.middle)


@case(Routed, plans=("zero1", "ddp"), steps=5)
def anything_goes_where_parameters_rest_in_full(model, rank, step):
    routes = [[0], [3, 1], [1, 1, 2], [2, 3], []]
    return use(model, rank, step, routes[(step + 2 * rank) % 5])


def check(name: str, link: str) -> None:
    """Over messages the plan that sends most, and in every other case those that send less."""
    case = CASES[name]
    if link == "peer" and "zero3" in case.plans:
        sends_less = case.plans[1:] if list(CASES).index(name) % 2 else ()
        case = replace(case, plans=("zero3", *sends_less))
    with LINKS[link]():
        check_case(case)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("link", LINKS)
def test_disagreement_with_the_right_result(name, link, two):
    two.run(check, name, link)


def layers_dropped_on_two_levels() -> None:
    """What is kept must not depend on what a rank used: else ranks would take other hops."""
    for seed in range(2):
        dropped = replace(
            CASES["layers_dropped_at_random"],
            plans=("zero3 keep=node", "hsdp"),
            run=lambda model, rank, step, seed=seed: use(
                model, rank, step, _random_route(50 * seed + 7 * step + rank)
            ),
        )
        check_case(dropped)


def test_layers_dropped_on_two_levels(four):
    four.run(layers_dropped_on_two_levels)


# --- the right result or an error, as the plan allows --------------------------------------------

EITHER: dict[str, Case] = {}
either = collector(EITHER)


class Peeking(Routed):
    """May read a bias of one block on its way through the others."""

    def forward(self, x: torch.Tensor, route: list[int], bias_of: int | None = None) -> Any:
        x = self.first(x)
        for index in route:
            x = self.blocks[index](x)
        if bias_of is not None:
            x = x + self.blocks[bias_of].out.bias
        return self.last(x)


def peek(model: nn.Module, rank: int, step: int, bias_of: int | None) -> float:
    loss = model(features(rank, step), [0, 1, 2], bias_of).square().mean()
    loss.backward()
    return loss.item()


@either(Peeking, plans=PLANS_HERE, steps=4)
def one_rank_reads_another_units_parameter_from_the_start(model, rank, step):
    return peek(model, rank, step, 0 if rank else None)


@either(Peeking, plans=PLANS_HERE, steps=4)
def one_rank_reads_another_units_parameter_once(model, rank, step):
    return peek(model, rank, step, 0 if rank and step == 2 else None)


@either(Peeking, plans=PLANS_HERE, steps=4)
def ranks_read_parameters_of_different_units(model, rank, step):
    return peek(model, rank, step, rank if step > 1 else None)


class Tied(Routed):
    """One module in two places, and units that borrow a parameter from another one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]
        self.blocks[1].down.weight = self.blocks[0].down.weight


@either(Tied, plans=PLANS_HERE, steps=4)
def one_rank_calls_a_shared_layer_twice_from_the_start(model, rank, step):
    return use(model, rank, step, [0, 1, 2] if rank else [0, 1])


@either(Tied, plans=PLANS_HERE, steps=4)
def one_rank_calls_a_shared_layer_once_later(model, rank, step):
    return use(model, rank, step, [0, 1] if rank and step else [0, 1, 2])


def right_or_refused(name: str, link: str, plan: str) -> tuple[str, str, float]:
    """Wrong numbers fail here; a refusal is returned with its text, and after how long it came."""
    case, rank, world = EITHER[name], dist.get_rank(), dist.get_world_size()
    results, expected = on_rank_0(lambda: reference(case, world))
    with LINKS[link]():
        model = build(case.kind)
        optimizer = sgd(model)
        sw.shard(model, optimizer, small(PLANS[plan]), levels=LEVELS[world], timeout_s=TIMEOUT_S)
    begin = time.monotonic()
    try:
        for step in range(case.steps):
            assert_close(case.run(model, rank, step), results[step][rank], f"{plan}, step {step}")
            optimizer.step()
            optimizer.zero_grad()
        got = sw.state_dict(model, rank0_only=False)
        assert largest_difference({n: got[n] for n in expected}, expected) <= 1e-9, plan
        assert_at_rest(model)
        sw.unshard(model)
        ended, text = "ok", ""
    except sw.SyncError as raised:
        ended, text = "SyncError", str(raised)
    return ended, text, time.monotonic() - begin


@pytest.mark.parametrize(("name", "link"), list(zip(EITHER, cycle(LINKS), strict=False)))
def test_disagreement_with_the_right_result_or_an_error_that_names_the_unit(name, link, two):
    for plan in EITHER[name].plans:
        outcomes = two.run(right_or_refused, name, link, plan)
        assert max(seconds for *_, seconds in outcomes) < BOUND_S, outcomes
        ends = {ended for ended, *_ in outcomes}
        # Nothing travels in zero1's forward; elsewhere no rank goes on as if nothing had happened.
        assert ends in ([{"ok"}] if plan == "zero1" else [{"ok"}, {"SyncError"}]), (plan, outcomes)
        for ended, text, _ in outcomes:
            assert ended == "ok" or "'blocks." in text, (plan, text)


# --- bounded errors -------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, int], None]] = {}


def error(run: Callable[[nn.Module, torch.optim.Optimizer, int], None]) -> Any:
    ERRORS[run.__name__] = run
    return run


def steps(model, optimizer, rank, numbers, route=(0, 1, 2)):
    for step in numbers:
        use(model, rank, step, list(route))
        optimizer.step()
        optimizer.zero_grad()


@error
def one_rank_uses_a_unit_that_nobody_had_used(model, optimizer, rank):
    steps(model, optimizer, rank, range(2))
    steps(model, optimizer, rank, range(2, 5), (0, 1, 3) if rank else (0, 1, 2))


@error
def one_rank_uses_a_unit_once_more(model, optimizer, rank):
    steps(model, optimizer, rank, range(2))
    steps(model, optimizer, rank, range(2, 5), (0, 1, 2, 0, 1) if rank else (0, 1, 2))


@error
def one_rank_calls_backward_twice(model, optimizer, rank):
    for step in range(4):
        loss = model(features(rank, step), [0, 1, 2]).square().mean()
        loss.backward(retain_graph=True)
        if rank == 1 and step > 0:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@error
def one_rank_evaluates_while_the_other_trains(model, optimizer, rank):
    steps(model, optimizer, rank, range(2))
    with torch.no_grad():
        model(features(rank, 5), [0, 1, 2])
    if rank == 1:
        with torch.no_grad():
            model(features(rank, 6), [0, 1, 2])
    steps(model, optimizer, rank, range(2, 4))


@error
def one_rank_has_one_step_more(model, optimizer, rank):
    steps(model, optimizer, rank, range(2 + rank))


@error
def one_rank_raises_in_forward_and_goes_on(model, optimizer, rank):
    steps(model, optimizer, rank, range(2))
    if rank == 1:
        broken = model.blocks[1].register_forward_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(features(rank, 2), [0, 1, 2])
        broken.remove()
    else:
        steps(model, optimizer, rank, [2])
    steps(model, optimizer, rank, range(3, 5))


@error
def one_rank_raises_and_ends(model, optimizer, rank):
    steps(model, optimizer, rank, range(2))
    if rank == 1:
        raise ZeroDivisionError
    steps(model, optimizer, rank, range(2, 5))


@error
def one_rank_does_not_read_full_params(model, optimizer, rank):
    steps(model, optimizer, rank, range(2))
    if rank == 0:
        with sw.full_params(model):
            pass
    steps(model, optimizer, rank, range(2, 5))


def outcome(name: str, link: str, plan: str) -> tuple[str, str, float]:
    """How a disagreement ends on this rank: what was raised, its text, and after how long."""
    rank = dist.get_rank()
    with LINKS[link]():
        model = build(Routed)
        optimizer = sgd(model)
        sw.shard(model, optimizer, small(PLANS[plan]), levels=LEVELS[2], timeout_s=TIMEOUT_S)
    begin = time.monotonic()
    try:
        ERRORS[name](model, optimizer, rank)
        ended, text = "ok", ""
    except Exception as raised:
        ended, text = type(raised).__name__, str(raised)
    return ended, text, time.monotonic() - begin


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ERRORS)
def test_disagreement_that_ends_in_an_error_with_names(name, link, two):
    outcomes = two.run(outcome, name, link, "zero3")
    assert max(seconds for *_, seconds in outcomes) < BOUND_S, outcomes
    assert "SyncError" in {ended for ended, *_ in outcomes}, outcomes
    for ended, text, _ in outcomes:
        assert ended in ("SyncError", "ok", "ZeroDivisionError"), outcomes
        if ended == "SyncError":
            assert "rank" in text.lower(), text


def leave(link: str) -> tuple[str, str, float]:
    rank = dist.get_rank()
    with LINKS[link]():
        model = build(Routed)
        optimizer = sgd(model)
        sw.shard(model, optimizer, small(PLANS["zero3"]), levels=LEVELS[2], timeout_s=TIMEOUT_S)
    steps(model, optimizer, rank, range(2))
    if rank == 1:
        os._exit(3)
    begin = time.monotonic()
    try:
        steps(model, optimizer, rank, range(2, 5))
    except sw.SyncError as raised:
        return "SyncError", str(raised), time.monotonic() - begin
    return "ok", "", 0.0


@pytest.mark.parametrize("link", LINKS)
def test_a_rank_that_ends_is_named(link):
    pool = Workers(2)
    try:
        pool.start()
        for pipe in pool._pipes:
            pipe.send((leave, (link,), {}))
        _, (ended, text, seconds) = pool._receive(0, time.monotonic() + BOUND_S)
        assert ended == "SyncError"
        assert "ank 1" in text
        assert seconds < BOUND_S
    finally:
        pool.stop()


@pytest.mark.parametrize("verb", ["irecv", "isend"])
def test_a_rank_whose_end_is_noticed_before_anything_waits_is_named(monkeypatch, verb):
    def closed(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "irecv", lambda *_, **__: None)
    monkeypatch.setattr(dist, verb, closed)
    labels = Labels()
    link = PeerLink(None, (0, 4), 0, labels, 1.0)
    with pytest.raises(sw.SyncError, match=r"rank 4 in the gather of 'x'.*Connection closed"):
        link.gather(torch.zeros(4), labels.key(1, "gather of 'x'"))
