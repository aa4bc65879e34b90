"""The simulated device itself: it behaves as CUDA where tests of training rely on it.

Cases run in one process that has two simulated devices; those that end a process have their own.
"""

import ctypes
import multiprocessing as mp
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.accelerators import chosen
from tests.accelerator.device import plugin
from tests.harness import Workers

pytestmark = pytest.mark.usefixtures("simulation")


def two_devices(rank: int, world: int) -> dict[str, Any]:
    chosen().prepare(0, 2)
    return {"backend": "gloo"}


@pytest.fixture(scope="module")
def device(simulation):
    pool = Workers(1, two_devices)
    yield pool
    pool.stop()


def sim() -> Any:
    from tests.accelerator.device import sim

    torch.accelerator.synchronize()
    sim.clear()
    sim.delay("none")
    return sim


def held() -> threading.Event:
    """What the current stream runs from now on waits until this is set, however long that takes."""
    from tests.accelerator.device import sim

    go_on = threading.Event()
    sim.launch("held", [], [], lambda *_: go_on.wait(60))
    return go_on


def races() -> list[str]:
    from tests.accelerator.device import sim

    return list(sim.statistics()["races"])


# --- devices and streams ---------------------------------------------------------------------------


def several_devices() -> None:
    sim()
    assert torch.accelerator.device_count() == 2
    a, b = torch.arange(6.0, device="sim:0"), torch.empty(6, device="sim:1")
    b.copy_(a.mul_(2))  # across devices, ordered on both
    assert b.add_(1).tolist() == [1, 3, 5, 7, 9, 11]
    assert torch.ones(1, device="sim").device.index == 0
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="sim").device.index == 1
    assert not races()
    with pytest.raises(RuntimeError, match=r"on the same device.*sim:0 and sim:1"):
        a + b
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.accelerator.set_device_index(2)


def streams_run_beside_the_host_and_each_other() -> None:
    device = sim()
    side, urgent = torch.Stream("sim"), torch.Stream("sim", priority=-1)
    assert device.priority_of(side) == 0
    assert device.priority_of(urgent) == -1
    ran = []
    go_on = held()
    device.launch("main", [], [], lambda *_: ran.append("main"))
    with torch.sim.stream(side):
        device.launch("side", [], [], lambda *_: (ran.append("side"), go_on.set()))
    torch.accelerator.synchronize()
    assert ran == ["side", "main"]
    event = torch.Event("sim")
    event.record()
    event.synchronize()
    assert device.statistics()["host_waits"] == {"device": 1, "event": 1}


def streams_may_be_nested() -> None:
    sim()
    side, before = torch.sim.Stream(), torch.accelerator.current_stream()
    with torch.sim.stream(side), torch.sim.stream(before), torch.sim.stream(side):
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() == before


def events_measure_time() -> None:
    device = sim()
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    device.delay("all", 20_000)
    first.record()
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 19


# --- memory ----------------------------------------------------------------------------------------


def memory_is_cut_from_segments_and_joined_again() -> None:
    sim()
    torch.accelerator.empty_cache()
    small = [torch.empty(300, dtype=torch.uint8, device="sim") for _ in range(3)]
    starts = [t.untyped_storage().data_ptr() for t in small]
    assert [s - starts[0] for s in starts] == [0, 512, 1024]  # rounded, from one segment
    large = torch.empty(3 << 20, dtype=torch.uint8, device="sim")
    reserved = torch.accelerator.memory_reserved()
    assert reserved == (2 << 20) + (20 << 20)
    assert torch.accelerator.memory_allocated() == 3 * 512 + (3 << 20)
    rest = torch.empty(17 << 20, dtype=torch.uint8, device="sim")  # what is left of the large one
    assert torch.accelerator.memory_reserved() == reserved
    del large, rest
    whole = torch.empty(20 << 20, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_reserved() == reserved
    del whole, small, starts
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 0


def freed_memory_is_reused_by_its_own_stream_at_once() -> None:
    sim()
    side = torch.Stream("sim")
    a = torch.empty(1000, device="sim")
    address = a.data_ptr()
    del a
    with torch.sim.stream(side):
        b = torch.empty(1000, device="sim")
    c = torch.empty(1000, device="sim")
    assert b.data_ptr() != address
    assert c.data_ptr() == address
    with torch.sim.stream(side):
        go_on = held()
        c.record_stream(side)
    del c
    d = torch.empty(1000, device="sim")
    assert d.data_ptr() != address  # the other stream may still use it
    go_on.set()
    side.synchronize()
    e = torch.empty(1000, device="sim")
    assert e.data_ptr() == address


def memory_ends_with_an_error() -> None:
    device = sim()
    torch.accelerator.empty_cache()
    device.set_memory_limit(32 << 20)
    try:
        kept = torch.empty(20 << 20, dtype=torch.uint8, device="sim")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.empty(20 << 20, dtype=torch.uint8, device="sim")
        del kept
        torch.empty(30 << 20, dtype=torch.uint8, device="sim")  # free segments are given up for it
    finally:
        device.set_memory_limit(16 << 30)


def unwritten_memory_reads_nan() -> None:
    sim()
    torch.ones(1000, device="sim").mul_(3)  # leaves other values behind
    fresh = torch.empty(1000, device="sim")
    fresh[:10] = 1
    assert fresh[:10].sum().item() == 10
    assert torch.isnan(fresh[10:]).all().item()
    assert torch.isnan(torch.empty(5, pin_memory=True)).all()


def freed_storage_is_no_longer_used() -> None:
    sim()
    a = torch.ones(1000, device="sim")
    a.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        a.add_(1)


# --- pinned memory ---------------------------------------------------------------------------------


def pinned_memory_is_closed_while_a_copy_is_in_flight() -> None:
    device = sim()
    host, there = torch.zeros(4096, pin_memory=True), torch.ones(4096, device="sim")
    assert host.is_pinned()
    assert not torch.zeros(4).is_pinned()
    go_on = held()
    host.copy_(there, non_blocking=True)
    assert not races()
    assert host[17].item() == 0  # the host is too early: it is opened, and said
    (race,) = races()
    assert "the host reads pinned memory" in race
    assert "copy D2H" in race
    go_on.set()
    torch.accelerator.synchronize()
    assert host.sum().item() == 4096
    device.clear()
    there.copy_(host, non_blocking=True)
    assert host[17].item() == 1  # reading what is read is no race
    assert not races()
    host[17] = 2
    assert "the host writes pinned memory" in races()[0]


def pinned_memory_takes_powers_of_two() -> None:
    device = sim()
    before = device.statistics()["pinned"]
    kept = torch.empty((1 << 20) + 1, dtype=torch.uint8, pin_memory=True)
    assert device.statistics()["pinned"] - before == 2 << 20
    del kept
    assert device.statistics()["pinned"] == before


def unpinned_memory_is_copied_before_the_call_returns() -> None:
    device = sim()
    go_on = held()
    host = torch.ones(1000)
    there = host.to("sim", non_blocking=True)
    host.zero_()
    go_on.set()
    back = torch.empty(1000)  # .to("cpu", non_blocking=True) would make it pinned
    back.copy_(there, non_blocking=True)
    assert back.sum().item() == 1000
    assert device.statistics()["host_waits"] == {"copy D2H": 1}


# --- operations ------------------------------------------------------------------------------------


def random_numbers_are_its_own() -> None:
    sim()
    torch.manual_seed(3)
    host, first = torch.rand(5), torch.rand(5, device="sim")
    torch.manual_seed(3)
    torch.rand(100, device="sim")
    assert torch.equal(torch.rand(5), host)  # what the device draws does not move the host's
    torch.sim.manual_seed(3)
    assert torch.equal(torch.rand(5, device="sim").cpu(), first.cpu())
    state = torch.sim.get_rng_state()
    drawn = torch.rand(5, device="sim").cpu()
    with torch.random.fork_rng([0], device_type="sim"):
        torch.rand(7, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="sim").cpu(), drawn)
    own = torch.Generator("sim").manual_seed(3)
    assert torch.equal(torch.rand(5, device="sim", generator=own).cpu(), first.cpu())
    dropped = torch.nn.functional.dropout(torch.ones(10_000, device="sim"), 0.25)
    assert 0.7 < dropped.ne(0).float().mean().item() < 0.8


def out_variants_resize_and_write_in_place() -> None:
    sim()
    a = torch.arange(6.0, device="sim").view(2, 3)
    out = torch.empty(0, device="sim")
    assert torch.mm(a, a.t(), out=out) is out
    assert out.tolist() == [[5, 14], [14, 50]]
    whole = torch.zeros(8, device="sim")
    torch.add(a.view(-1), 1, out=whole[1:7])
    assert whole.tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    values, indices = torch.empty(0, device="sim"), torch.empty(0, dtype=torch.long, device="sim")
    torch.max(a, dim=1, out=(values, indices))
    assert values.tolist() == [2, 5]
    assert indices.tolist() == [2, 2]


def layers_are_one_launch_and_have_the_hosts_bits() -> None:
    device = sim()
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    layer = torch.nn.LayerNorm(8)
    layer(x).square().sum().backward()
    there = torch.nn.LayerNorm(8).to("sim")
    y = x.detach().to("sim").requires_grad_()
    device.clear()
    loss = there(y).square().sum()
    assert device.statistics()["launches_by_name"]["aten::native_layer_norm"] == 1
    loss.backward()
    assert torch.equal(y.grad.cpu(), x.grad)
    assert torch.equal(there.weight.grad.cpu(), layer.weight.grad)
    assert not device.statistics()["without_shape"]
    assert not races()


def what_a_stream_raises_is_raised_at_the_next_wait() -> None:
    device = sim()
    device.launch("bad", [], [], lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match=r"asynchronous error.*division by zero"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


# --- what threads of the host know -----------------------------------------------------------------


def _wait_and_use(pass_on: Callable[[Callable[[], None], Callable[[], None]], None]) -> list[str]:
    """One thread waits for the device, another uses what it waited for on its own stream."""
    device = sim()
    filled, side = torch.empty(1000, device="sim"), torch.Stream("sim")
    device.delay("main", 1000)
    filled.fill_(1)
    event = torch.Event("sim")
    event.record()

    def use() -> None:
        with torch.sim.stream(side):
            filled.add_(1)

    pass_on(event.synchronize, use)
    torch.accelerator.synchronize()
    return races()


def _run(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _by_join(wait: Callable[[], None], use: Callable[[], None]) -> None:
    _run(wait).join()
    use()


def _by_start(wait: Callable[[], None], use: Callable[[], None]) -> None:
    wait()
    _run(use).join()


def _by_queue(kind: type) -> Callable[..., None]:
    def passed(wait: Callable[[], None], use: Callable[[], None]) -> None:
        told = kind()
        thread = _run(lambda: (told.get(), use()))
        wait()
        told.put(None)
        thread.join()

    return passed


def _by_event(wait: Callable[[], None], use: Callable[[], None]) -> None:
    told = threading.Event()
    thread = _run(lambda: (told.wait(), use()))
    wait()
    told.set()
    thread.join()


def _by_future(wait: Callable[[], None], use: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait).result()
        use()


def _by_backward(wait: Callable[[], None], use: Callable[[], None]) -> None:
    def run() -> None:
        wait()  # a thread of autograd uses what this one has waited for
        weight = torch.ones(3, device="sim", requires_grad=True)
        weight.register_hook(lambda _: use())
        weight.sum().backward()

    _run(run).join()


def _by_nothing(wait: Callable[[], None], use: Callable[[], None]) -> None:
    waited = []
    thread = _run(lambda: (wait(), waited.append(True)))
    while not waited:  # ordered, but by no tool that says so
        time.sleep(0.001)
    use()
    thread.join()


def threads_pass_on_what_they_know() -> None:
    ways = [_by_join, _by_start, _by_event, _by_future, _by_backward]
    for way in [*ways, *map(_by_queue, (queue.Queue, queue.SimpleQueue))]:
        assert _wait_and_use(way) == [], way.__name__


def threads_know_nothing_that_nobody_told_them() -> None:
    assert "nothing orders them" in _wait_and_use(_by_nothing)[0]


CASES = [
    several_devices,
    streams_run_beside_the_host_and_each_other,
    streams_may_be_nested,
    events_measure_time,
    memory_is_cut_from_segments_and_joined_again,
    freed_memory_is_reused_by_its_own_stream_at_once,
    memory_ends_with_an_error,
    unwritten_memory_reads_nan,
    freed_storage_is_no_longer_used,
    pinned_memory_is_closed_while_a_copy_is_in_flight,
    pinned_memory_takes_powers_of_two,
    unpinned_memory_is_copied_before_the_call_returns,
    random_numbers_are_its_own,
    out_variants_resize_and_write_in_place,
    layers_are_one_launch_and_have_the_hosts_bits,
    what_a_stream_raises_is_raised_at_the_next_wait,
    threads_pass_on_what_they_know,
    threads_know_nothing_that_nobody_told_them,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_device(device, case: Callable[[], None]) -> None:
    device.run(case)


# --- the ends of processes -------------------------------------------------------------------------


def _touch_device_memory() -> None:
    sim()
    ctypes.memset(torch.ones(4, device="sim").untyped_storage().data_ptr(), 0, 4)


def _use_in_a_forked_child() -> None:
    sim()
    side = torch.Stream("sim")
    kept = torch.ones(4, device="sim")
    kept.record_stream(side)
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    del kept  # frees nothing here, and does not wait for streams that are not here
    try:
        torch.ones(4, device="sim")
    except RuntimeError as error:
        os._exit(3 if "forked subprocess" in str(error) else 4)
    os._exit(5)


def _exit_code(work: Callable[[], None]) -> int | None:
    process = mp.get_context("forkserver").Process(target=work)
    process.start()
    process.join(60)
    return process.exitcode


def test_the_host_faults_on_device_memory(device) -> None:
    assert _exit_code(_touch_device_memory) == -signal.SIGSEGV


def test_a_forked_child_is_refused(device) -> None:
    assert _exit_code(_use_in_a_forked_child) == 3


EXIT = """
import sys, threading, time
import torch, torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group(rank=rank, world_size=2, store=dist.FileStore(sys.argv[2], 2),
                        backend="cpu:gloo,sim:simccl")
torch.accelerator.set_device_index(rank)
from tests.accelerator.device import sim
total = torch.ones(4, device="sim")
dist.all_reduce(total)
assert total.tolist() == [2] * 4
side = torch.Stream("sim")
with torch.sim.stream(side):
    kept = torch.empty(1 << 20, pin_memory=True).to("sim", non_blocking=True)
sim.delay("all", 1000)
for _ in range(10_000):
    kept.add_(1)

def go_on():
    while True:
        (kept + 1).sum().item()

threading.Thread(target=go_on, daemon=True).start()
if rank == 0:
    pending = dist.all_reduce(kept, async_op=True)
else:  # never takes part, but is there
    sys.stdin.read()
print("leaving", time.time(), flush=True)
"""


def test_processes_end_at_once_whatever_is_still_going_on(tmp_path: Path) -> None:
    environment = plugin.environment(tmp_path / "plugin", 2)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store")],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            told = rank.communicate(timeout=140)[0]  # the second is told to go on
            took = time.time() - float(told.split()[1])
            assert (rank.returncode, took < 30) == (0, True), (told, took)
    finally:
        for rank in ranks:
            rank.kill()
