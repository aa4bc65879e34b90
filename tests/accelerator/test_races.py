"""The race detector finds every kind of race that is planted, and says nothing about correct code.

Each case is a race, and with ``right`` the same code with the wait that was missing. A race is found
when the work is enqueued, whatever the timing: so all cases run with and without late streams.
"""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.usefixtures("simulation")
NUMEL = 8192


def device_tensor(value: float = 1.0) -> torch.Tensor:
    return torch.full((NUMEL,), value, device="sim")


def side_stream() -> torch.Stream:
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    return side


def read_before_it_is_written(right: bool) -> None:
    """A stream reads what another writes."""
    side = side_stream()
    data = device_tensor()
    event = torch.Event("sim")
    event.record()
    if right:
        side.wait_event(event)
    with torch.sim.stream(side):
        data.sum()
    torch.accelerator.current_stream().wait_stream(side)


def written_before_it_is_read(right: bool) -> None:
    """A stream writes what another still reads."""
    data = device_tensor()
    side = side_stream()
    with torch.sim.stream(side):
        data.sum()
    if right:
        torch.accelerator.current_stream().wait_stream(side)
    data.zero_()
    side.synchronize()


def written_by_two(right: bool) -> None:
    data = device_tensor()
    side = side_stream()
    with torch.sim.stream(side):
        data.add_(1)
    if right:
        side.synchronize()  # the host waits: what it enqueues afterwards is ordered too
    data.mul_(2)
    side.synchronize()


def waits_for_an_event_recorded_too_early(right: bool) -> None:
    side = side_stream()
    event = torch.Event("sim")
    event.record()
    data = device_tensor()
    if right:
        event.record()
    side.wait_event(event)
    with torch.sim.stream(side):
        data.sum()
    torch.accelerator.current_stream().wait_stream(side)


def only_parts_overlap(right: bool) -> None:
    """Halves of one buffer are used by two streams; one element is in both."""
    data = device_tensor()
    side = side_stream()
    with torch.sim.stream(side):
        data[: NUMEL // 2].add_(1)
    data[NUMEL // 2 - (0 if right else 1) :].add_(1)
    side.synchronize()


def memory_reused_too_early(right: bool) -> None:
    """Memory is freed while another stream still reads it, and its own stream gets it again."""
    data = device_tensor()
    side = side_stream()
    with torch.sim.stream(side):
        data.sum()
    if right:
        data.record_stream(side)
    del data
    device_tensor(2.0)
    side.synchronize()


def host_writes_what_is_copied(right: bool) -> None:
    host, data = torch.ones(NUMEL, pin_memory=True), device_tensor()
    data.copy_(host, non_blocking=True)
    if right:
        torch.accelerator.current_stream().synchronize()
    host.fill_(2)


def host_reads_before_it_waits(right: bool) -> None:
    host, data = torch.empty(NUMEL, pin_memory=True), device_tensor()
    host.copy_(data, non_blocking=True)
    event = torch.Event("sim")
    event.record()
    if right:
        event.synchronize()
    host.sum()


def pinned_memory_of_two_copies(right: bool) -> None:
    """One buffer receives two results on two streams."""
    host, data = torch.empty(NUMEL, pin_memory=True), device_tensor()
    side = side_stream()
    host.copy_(data, non_blocking=True)
    if right:
        side.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(side):
        host.copy_(data, non_blocking=True)
    side.synchronize()


def collective_is_used_before_it_is_waited_for(right: bool) -> None:
    data = device_tensor()
    work = dist.all_reduce(data, async_op=True)
    if right:
        work.wait()
    data.mul_(2)
    work.wait()


def collective_waited_for_on_another_stream(right: bool) -> None:
    data = device_tensor()
    side = side_stream()
    work = dist.all_reduce(data, async_op=True)
    with torch.sim.stream(side):
        work.wait()
    if right:
        torch.accelerator.current_stream().wait_stream(side)
    data.mul_(2)


def input_overwritten_before_the_collective_has_read_it(right: bool) -> None:
    data, gathered = device_tensor(), torch.empty(NUMEL * dist.get_world_size(), device="sim")
    work = dist.all_gather_into_tensor(gathered, data, async_op=True)
    if right:
        work.wait()
    data.zero_()
    work.wait()


def nothing_comes_out_wrong(right: bool) -> None:
    """The value that is written is there already, so no timing can change a result."""
    data = device_tensor()
    side = side_stream()
    with torch.sim.stream(side):
        total = data.sum()
    if right:
        torch.accelerator.current_stream().wait_stream(side)
    data.fill_(1)
    side.synchronize()
    assert total.item() == NUMEL
    assert data.sum().item() == NUMEL


CASES: dict[Callable[[bool], None], str] = {
    read_before_it_is_written: "'aten::sum' on SIDE reads what 'aten::fill_' on MAIN writes",
    written_before_it_is_read: "'aten::zero_' on MAIN writes what 'aten::sum' on SIDE reads",
    written_by_two: "'aten::mul' on MAIN writes what 'aten::add' on SIDE writes",
    waits_for_an_event_recorded_too_early: "'aten::sum' on SIDE reads what 'aten::fill_' on MAIN writes",
    only_parts_overlap: "'aten::add' on MAIN writes what 'aten::add' on SIDE writes",
    memory_reused_too_early: "'aten::fill_' on MAIN writes what 'aten::sum' on SIDE reads",
    host_writes_what_is_copied: "the host writes pinned memory that 'copy H2D' on MAIN may still read",
    host_reads_before_it_waits: "the host reads pinned memory that 'copy D2H' on MAIN may still write",
    pinned_memory_of_two_copies: "'copy D2H' on SIDE writes what 'copy D2H' on MAIN writes (pinned memory)",
    collective_is_used_before_it_is_waited_for: "'aten::mul' on MAIN writes what 'simccl all_reduce' on SIDE writes",
    collective_waited_for_on_another_stream: "'aten::mul' on MAIN writes what 'simccl all_reduce' on SIDE writes",
    input_overwritten_before_the_collective_has_read_it: "'aten::zero_' on MAIN writes what 'simccl all_gather' on SIDE reads",
    nothing_comes_out_wrong: "'aten::fill_' on MAIN writes what 'aten::sum' on SIDE reads",
}  # fmt: skip


def _races(case: Callable[[bool], None], right: bool, slow: str) -> list[str]:
    from tests.accelerator.device import sim

    torch.accelerator.synchronize()
    sim.clear()
    sim.delay(slow, 2000)
    try:
        case(right)
        torch.accelerator.synchronize()
    finally:
        sim.delay("none")
    found = sim.statistics()["races"]
    sim.clear()
    return [_with_roles(race) for race in found]


def _with_roles(race: str) -> str:
    """Streams by what they are here, as every case takes others."""
    race = re.sub(r" of device \d+", "", race).removesuffix(": nothing orders them")
    return re.sub(r"stream \d+", "SIDE", race.replace("the default stream", "MAIN"))


@pytest.mark.parametrize("slow", ["none", "main", "side"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_planted_race_is_found_and_its_correction_is_clean(sim_two, case, slow: str) -> None:
    for found in sim_two.run(_races, case, False, slow):
        assert CASES[case] in found
    for found in sim_two.run(_races, case, True, slow):
        assert found == []
