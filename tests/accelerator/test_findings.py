"""What the first run on a simulated device found, and what no other test would notice again.

``docs/gpus.md`` has the table of all findings with the test of each.
"""

import gc
import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.api import runtime_of
from shardwise.comm.lane import HOST as HOST_LANE
from shardwise.comm.lane import make_lane
from shardwise.core.errors import SyncError
from shardwise.device import memory
from shardwise.device.abilities import HOST
from shardwise.device.choice import collective_backend, local_device, process_group_options
from shardwise.device.host import host_update_threads
from shardwise.device.streams import Copies, mark, on_stream, side_stream
from shardwise.plans.plan import Tiers
from shardwise.runtime.activations import offload
from shardwise.runtime.optimizer import windows
from shardwise.tier.budget import Budget, BudgetError
from shardwise.tier.memory import tensor_on
from shardwise.tier.pool import Pool
from tests.accelerator import parity
from tests.accelerator.accelerators import chosen, prepare
from tests.accelerator.parity import Way
from tests.harness import Workers
from tests.models import TinyGPT, adamw, batch, lm_loss, make, mine

PAGE = memory.PAGE_BYTES
LIMIT_S = 10.0


def _deferred() -> dict[str, str]:
    with sw.deferred_init():
        model = make(TinyGPT, torch.float32)
    optimizer = adamw(model)
    sw.shard(model, optimizer, "zero3")
    assert {p.device for p in model.parameters()} == {chosen().device}
    parity.loss_of(model, *parity.on_device(batch(0))).backward()
    optimizer.step()
    links = sw.stats(model)["links"]
    sw.unshard(model)
    return links


def test_1_a_deferred_model_goes_to_the_accelerator(sim_two) -> None:
    for links in sim_two.run(_deferred):
        assert links
        assert set(links.values()).isdisjoint({"messages", "memory"})


def _bytes_at_rest(name: str) -> tuple[int, int]:
    gc.collect()  # models of other tests, which are cycles
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    model = make(TinyGPT, torch.float32, dim=64)
    sw.shard(model, None, name, levels="node=2,world=2")
    torch.accelerator.synchronize()
    found = torch.accelerator.memory_allocated() - before
    whole = 4 * sum(p.numel() for p in model.parameters())
    sw.unshard(model)
    return found, whole


def test_2_parameters_at_rest_take_their_shard_and_no_more(sim_four) -> None:
    for found, whole in sim_four.run(_bytes_at_rest, "zero3"):
        assert whole / 4 <= found <= whole / 4 + 20_000  # allocators round sizes up
    for found, whole in sim_four.run(_bytes_at_rest, "hsdp"):
        assert whole / 2 <= found <= whole / 2 + 20_000


def _resumed(way: Way, folder: str) -> float:
    """Trains two steps, saves, and goes on in the same model and in a new one."""
    model, (optimizer,) = parity.sharded(way, folder)
    first = parity.Training(model, [optimizer], way)
    first.step(0)
    first.step(1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    states = torch.load(file, map_location="cpu")
    again, (other,) = parity.sharded(way, folder)
    second = parity.Training(again, [other], way)
    second.step(5)  # what is loaded replaces this
    again.load_state_dict(sw.state_dict(model, rank0_only=False, master=True))
    other.load_state_dict(states)
    for training in (first, second):
        training.step(2)
        training.step(3)
    values = [sw.state_dict(m, rank0_only=False, master=True) for m in (model, again)]
    sw.unshard(model)
    sw.unshard(again)
    return parity.largest_difference(*values)


@pytest.mark.parametrize(
    "way",
    [
        Way(),
        Way(optimizer="fused"),
        Way(tiers="OS cpu", optimizer="groups"),
        Way(tiers="P cpu", dtype="mixed"),
        Way(tiers="all nvme", dtype="mixed"),
        Way("zero1", tiers="mixed"),
    ],
    ids=str,
)
def test_5_a_run_goes_on_from_states_that_were_loaded_to_the_host(
    sim_two, tmp_path: Path, way: Way
) -> None:
    assert sim_two.run(_resumed, way, str(tmp_path)) == [0.0, 0.0]


def _device_of_rank() -> tuple[int, int, int]:
    """Of a model, the current one, and that of the process group; each by its index."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(0)  # as in a process that nobody has told its device
    try:
        model = sw.shard(make(TinyGPT, torch.float32), None, "ddp")
        (device,) = {p.device for p in model.parameters()}
        sw.unshard(model)
        current = torch.accelerator.current_device_index()
        with mock.patch.object(dist.Backend, "backend_type_map", {}):  # as torch's own backends
            options = process_group_options(local_device())
        return device.index, current, options["device_id"].index
    finally:
        torch.accelerator.set_device_index(before)


def test_6_each_rank_uses_its_own_device(sim_two) -> None:
    for rank, found in enumerate(sim_two.run(_device_of_rank)):
        assert found == (rank, rank, rank)


def _on_the_cpu() -> tuple[set[str], float]:
    """A model that is told to stay on the CPU, in processes whose default group has devices."""
    model = make(TinyGPT)
    optimizer = adamw(model)
    sw.shard(model, optimizer, "zero3", device="cpu")
    loss = parity.loss_of(model, *mine(*batch(0)))
    loss.backward()
    optimizer.step()
    devices = {p.device.type for p in model.parameters()}
    sw.unshard(model)
    dist.all_reduce(loss.detach_())
    return devices, loss.item() / dist.get_world_size()


def test_6_the_cpu_can_be_chosen_beside_accelerators(sim_two) -> None:
    plain = parity.loss_of(make(TinyGPT), *batch(0)).item()
    for devices, loss in sim_two.run(_on_the_cpu):
        assert devices == {"cpu"}
        assert loss == pytest.approx(plain, rel=1e-12)


def _loaded_after_a_forward(tiers: str, folder: str) -> tuple[float, list[str] | None]:
    way = Way(tiers=tiers)
    model, made = parity.sharded(way, folder)
    parity.Training(model, made, way).step(0)
    other = {n: v + 1 for n, v in sw.state_dict(model, rank0_only=False).items()}
    rows = parity.on_device(batch(1))
    with parity.late("side"), chosen().watch() as seen:
        with torch.no_grad():
            parity.loss_of(model, *rows)
        model.load_state_dict(other)
    got = sw.state_dict(model, rank0_only=False)
    sw.unshard(model)
    return parity.largest_difference(got, other), seen.races


@pytest.mark.parametrize("tiers", ["P cpu", "all cpu", "P nvme"])
def test_9_values_are_loaded_after_copies_that_still_read_the_old_ones(
    sim_two, tmp_path: Path, tiers: str
) -> None:
    for difference, races in sim_two.run(_loaded_after_a_forward, tiers, str(tmp_path)):
        assert difference == 0
        assert not races


def _trimmed() -> list[str] | None:
    """A buffer is given back while another stream reads it, and trimmed; compute gets its memory."""
    device, numel = chosen().device, 1 << 16
    pool = Pool(device)
    with parity.late("side"), chosen().watch() as seen:
        storage = pool.take(numel * 4)
        data = tensor_on(storage, numel, torch.float32).fill_(1)
        ready, side = mark(device), side_stream(device)
        with on_stream(side):
            torch.accelerator.current_stream().wait_event(ready)
            total = data.sum()
            pool.give(storage)
        address = data.data_ptr()
        del data, storage
        pool.trim()
        assert pool.held_bytes == 0
        reused = torch.full((numel,), 2.0, device=device)
        assert chosen().type != "sim" or reused.data_ptr() == address
    assert total.item() == numel
    return seen.races


def test_10_memory_that_a_pool_returns_is_not_in_use(sim_one) -> None:
    (races,) = sim_one.run(_trimmed)
    assert not races


def _pinned() -> None:
    from tests.accelerator.device import sim

    device, nbytes = chosen().device, 3 * PAGE
    before = sim.statistics()["pinned"]
    pages = memory.pinned_memory(nbytes, device)
    assert sim.statistics()["pinned"] - before == nbytes == memory.pinned_bytes(nbytes, device)
    assert pages.data_ptr() % PAGE == 0  # as direct I/O wants it
    del pages
    assert sim.statistics()["pinned"] == before
    # Where pages cannot be pinned, torch rounds, and the budget knows.
    with mock.patch.object(memory, "_runtime", return_value=None):
        pool = Pool(HOST, Budget("cpu", nbytes), beside=device)
        with pytest.raises(BudgetError):
            pool.take(nbytes)


def test_14_pinned_memory_is_as_large_as_asked_or_counted_as_it_is(simulation, sim_one) -> None:
    sim_one.run(_pinned)


def _activations_over_budget() -> None:
    plan = replace(Way(activations="cpu").full_plan(""), tiers=Tiers(cpu_bytes=PAGE))
    model = sw.shard(parity.build(Way()), None, plan)
    with mock.patch.object(offload, "SMALL_BYTES", 1), pytest.raises(BudgetError):
        parity.loss_of(model, *parity.on_device(batch(0)))
    sw.unshard(model)


def test_14_activations_in_host_memory_count_against_its_budget(sim_one) -> None:
    sim_one.run(_activations_over_budget)


def _start_values() -> tuple[int, int, float]:
    """Ranks begin with other values; how they become rank 0's."""
    model = make(TinyGPT, torch.float32, seed=dist.get_rank())
    plan = Way().full_plan("")
    wanted = {n: p.detach().clone() for n, p in make(TinyGPT, torch.float32).named_parameters()}
    with (
        chosen().watch() as seen,
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent,
    ):
        sw.shard(model, None, plan)
    devices = {call.args[0].device for call in sent.call_args_list}
    assert devices == {chosen().device}  # nothing went by way of the host
    got = sw.state_dict(model, rank0_only=False)
    flats = sum(len(unit.flats) for unit in runtime_of(model).units)
    sw.unshard(model)
    difference = parity.largest_difference({n: got[n] for n in wanted}, wanted)
    return seen.launches.get("simccl broadcast", sent.call_count), flats, difference


def test_15_rank_0s_values_travel_flat_by_flat_between_devices(sim_two) -> None:
    for broadcasts, flats, difference in sim_two.run(_start_values):
        assert broadcasts == flats > 1
        assert difference == 0


def _priorities() -> list[int]:
    from tests.accelerator.device import sim

    device = chosen().device
    HOST_LANE.submit(lambda: None, device).block_host()
    streams = [
        make_lane("test", device, 2)._stream,
        Copies(device)._stream,
        HOST_LANE._streams[device],
    ]
    return [sim.priority_of(stream) for stream in streams]


def test_16_streams_for_transfers_go_before_compute(simulation, sim_one) -> None:
    assert sim_one.run(_priorities) == [[-1, -1, -1]]


def _left_alone() -> str:
    """Rank 1 stays away from a backward. What rank 0 gets, and when."""
    model = make(TinyGPT, torch.float32)
    optimizer = adamw(model)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        sw.shard(model, optimizer, "zero3", timeout_s=LIMIT_S)
    backend = collective_backend(chosen().device)
    limits = [
        call.kwargs["timeout"].total_seconds()
        for call in made.call_args_list
        if call.kwargs["backend"] == backend
    ]
    assert (
        min(limits) > LIMIT_S
    )  # a backend that ends the process must not be faster than the error
    for step in range(2):
        parity.loss_of(model, *parity.on_device(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = parity.loss_of(model, *parity.on_device(batch(2)))
    if dist.get_rank() == 1:
        time.sleep(LIMIT_S * 1.5)
        return ""
    with pytest.raises(SyncError) as raised:
        loss.backward()
    return str(raised.value)


def test_17_a_rank_that_is_left_alone_raises_an_error_that_names_the_others() -> None:
    if reason := chosen().unavailable(2):
        pytest.skip(reason)
    pool = Workers(2, prepare)  # of its own: what is enqueued on its streams never ends
    try:
        said, _ = pool.run(_left_alone, limit_s=90)
        assert re.search(r"\brank(\(s\))? 1\b", said), said
    finally:
        pool.stop()


def _threads(folder: str) -> tuple[set[int], int]:
    """A host update in a process that torchrun told to use one thread."""
    device, all_of_them = chosen().device, len(os.sched_getaffinity(0))
    assert torch.get_num_threads() == 1
    for ranks in (1, 2, 1000):
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks)):
            assert host_update_threads(device) == max(1, all_of_them // ranks)
            assert host_update_threads(HOST) == 1  # compute uses the same processors
    seen: set[int] = set()
    step_on = windows.step_on

    def noted(*args: Any) -> None:
        seen.add(torch.get_num_threads())
        step_on(*args)

    way = Way("alone", tiers="OS cpu")
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        model, made = parity.sharded(way, folder)
        with mock.patch.object(windows, "step_on", noted):
            parity.Training(model, made, way).step(0)
        sw.unshard(model)
    assert torch.get_num_threads() == 1
    return seen, all_of_them


def test_18_an_update_on_the_host_uses_its_processors(sim_one, tmp_path: Path) -> None:
    ((seen, all_of_them),) = sim_one.run(_threads, str(tmp_path))
    assert seen == {all_of_them}


def _differences_in_full() -> list[float]:
    """P rests in full, and differences of it travel in blocks that end in its padding."""
    model = make(TinyGPT, torch.float32, seed=0)
    optimizer = adamw(model)
    sw.shard(model, optimizer, sw.presets.lean(), levels="node=1,world=2")
    losses = []
    for number in range(3):
        loss = lm_loss(model, *(t.to(chosen().device) for t in mine(*batch(number))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sw.unshard(model)
    return losses


def test_padding_of_full_parameters_is_no_garbage(sim_two) -> None:
    for losses in sim_two.run(_differences_in_full):
        assert losses[0] > losses[1] > losses[2], losses
