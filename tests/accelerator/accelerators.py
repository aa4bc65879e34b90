"""One way to ask what a run did on an accelerator, simulated or real, so that a test runs on both.

A test takes the accelerator that ``SHARDWISE_TEST_DEVICE`` names (``sim`` if nothing does), watches a
piece of code on it, and asserts on what was seen. What only the simulation can see (races, waits of
the host, pinned bytes) is None on real hardware: ``seen.require("races")`` skips the test there.
"""

import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist


@dataclass
class Seen:
    """What happened while code was watched; filled in when the watch ends."""

    launches: dict[str, int] = field(default_factory=dict)
    """How often each kernel, copy and collective was launched."""
    peak_bytes: int = 0
    """The most device memory that was allocated at once, what was there before included."""
    start_bytes: int = 0
    end_bytes: int = 0
    races: list[str] | None = None
    host_waits: dict[str, int] | None = None
    """How often the program waited for the device, by kind and place."""
    pinned_start_bytes: int | None = None
    pinned_peak_bytes: int | None = None
    pinned_end_bytes: int | None = None

    @property
    def launch_count(self) -> int:
        return sum(self.launches.values())

    @property
    def host_wait_count(self) -> int | None:
        return None if self.host_waits is None else sum(self.host_waits.values())

    def count_wait(self, kind: str) -> None:
        """Counts waits of the program, with the place; threads of our own may wait."""
        if threading.current_thread().name.startswith("shardwise-"):
            return
        assert self.host_waits is not None
        stack = (f for f in traceback.extract_stack() if "/shardwise/" in f.filename)
        # All waits are made in device/; who asks for one says more.
        ours = [f for f in stack if "/shardwise/device/" not in f.filename]
        at = f"{ours[-1].filename.rpartition('/shardwise/')[2]}:{ours[-1].lineno}" if ours else ""
        what = f"{kind} at {at}" if at else kind
        self.host_waits[what] = self.host_waits.get(what, 0) + 1

    def require(self, what: str) -> Any:
        """A figure that only some accelerators have; the test is skipped on the others."""
        value = getattr(self, what)
        if value is None:
            pytest.skip(f"only the simulated device sees {what}")
        return value


class Accelerator(Protocol):
    """A kind of device that tests run on."""

    type: str

    def unavailable(self, world: int) -> str | None:
        """Why tests of so many ranks cannot run here, or None."""

    def prepare(self, rank: int, world: int) -> dict[str, Any]:
        """On a rank: makes it use its own device; what ``init_process_group`` gets for it."""

    @property
    def device(self) -> torch.device:
        """This process's device."""

    def delay(self, slow: str, microseconds: int = 1000, seed: int = 0) -> None:
        """Makes streams late, where that can be done; see ``sim.delay``."""

    def watch(self) -> Any:
        """A context; it gives a ``Seen`` that is complete when the context ends."""


class Simulated:
    """The simulated device: it sees everything."""

    type = "sim"

    def unavailable(self, world: int) -> str | None:
        from tests.accelerator.device import build

        return build.missing()

    def prepare(self, rank: int, world: int) -> dict[str, Any]:
        from tests.accelerator.device import ccl, kernels, sim

        kernels.install()
        sim.set_device_count(world)
        torch.accelerator.set_device_index(rank)
        return {"backend": f"cpu:gloo,sim:{ccl.NAME}", "device_id": self.device}

    @property
    def device(self) -> torch.device:
        return torch.device("sim", torch.accelerator.current_device_index())

    def delay(self, slow: str, microseconds: int = 1000, seed: int = 0) -> None:
        from tests.accelerator.device import sim

        sim.delay(slow, microseconds, seed)

    @contextmanager
    def watch(self) -> Iterator[Seen]:
        from tests.accelerator.device import sim

        torch.accelerator.synchronize()
        sim.clear()
        seen = Seen(start_bytes=torch.accelerator.memory_allocated(), host_waits={})
        seen.pinned_start_bytes = sim.statistics()["pinned"]
        sim.on_wait(seen.count_wait)
        try:
            yield seen
        finally:
            sim.on_wait(None)
        torch.accelerator.synchronize()
        found = sim.statistics()
        seen.launches, seen.races = found["launches_by_name"], found["races"]
        seen.peak_bytes = torch.accelerator.max_memory_allocated()
        seen.end_bytes = torch.accelerator.memory_allocated()
        seen.pinned_peak_bytes, seen.pinned_end_bytes = found["pinned_peak"], found["pinned"]


class Real:
    """A real device: memory as its allocator counts it, launches as the profiler sees them."""

    def __init__(self, kind: str) -> None:
        self.type = kind

    def unavailable(self, world: int) -> str | None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != self.type:
            return f"torch offers no device of type {self.type} here"
        count = torch.accelerator.device_count()
        return f"{world} devices are needed, and there are {count}" if count < world else None

    def prepare(self, rank: int, world: int) -> dict[str, Any]:
        torch.accelerator.set_device_index(rank)
        own = dist.get_default_backend_for_device(self.type)
        return {"backend": f"cpu:gloo,{self.type}:{own}", "device_id": self.device}

    @property
    def device(self) -> torch.device:
        return torch.device(self.type, torch.accelerator.current_device_index())

    def delay(self, slow: str, microseconds: int = 1000, seed: int = 0) -> None:
        pass  # a real device is as late as it is; races are not looked for on it

    @contextmanager
    def watch(self) -> Iterator[Seen]:
        from torch.profiler import ProfilerActivity, profile

        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        seen = Seen(start_bytes=torch.accelerator.memory_allocated())
        activities = [getattr(ProfilerActivity, self.type.upper()), ProfilerActivity.CPU]
        with profile(activities=activities) as profiled:
            yield seen
            torch.accelerator.synchronize()
        kind = getattr(torch.autograd.DeviceType, self.type.upper())
        for event in profiled.events():
            if event.device_type == kind:
                seen.launches[event.name] = seen.launches.get(event.name, 0) + 1
        seen.peak_bytes = torch.accelerator.max_memory_allocated()
        seen.end_bytes = torch.accelerator.memory_allocated()


KINDS: dict[str, Accelerator] = {"sim": Simulated(), "cuda": Real("cuda"), "xpu": Real("xpu")}
"""By torch's word for the type; AMD's devices are cuda as well."""


def chosen() -> Accelerator:
    """The accelerator that ``SHARDWISE_TEST_DEVICE`` names."""
    name = os.environ.get("SHARDWISE_TEST_DEVICE", "sim")
    if name not in KINDS:
        raise pytest.UsageError(f"SHARDWISE_TEST_DEVICE is {name!r}, known are {', '.join(KINDS)}")
    return KINDS[name]


def prepare(rank: int, world: int) -> dict[str, Any]:
    """What ranks of the chosen accelerator start with."""
    return chosen().prepare(rank, world)
