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
        ours = [f for f in traceback.extract_stack() if "/shardwise/" in f.filename]
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


class Cuda:
    """A real device: memory as its allocator counts it, launches as the profiler sees them."""

    type = "cuda"

    def unavailable(self, world: int) -> str | None:
        if not torch.cuda.is_available():
            return "there is no CUDA or ROCm device"
        if torch.cuda.device_count() < world:
            return f"{world} devices are needed, and there are {torch.cuda.device_count()}"
        return None

    def prepare(self, rank: int, world: int) -> dict[str, Any]:
        torch.accelerator.set_device_index(rank)
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": self.device}

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def delay(self, slow: str, microseconds: int = 1000, seed: int = 0) -> None:
        pass  # a real device is as late as it is; races are not looked for on it

    @contextmanager
    def watch(self) -> Iterator[Seen]:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seen = Seen(start_bytes=torch.cuda.memory_allocated())
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            yield seen
            torch.cuda.synchronize()
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                seen.launches[event.name] = seen.launches.get(event.name, 0) + 1
        seen.peak_bytes = torch.cuda.max_memory_allocated()
        seen.end_bytes = torch.cuda.memory_allocated()


KINDS: dict[str, Accelerator] = {"sim": Simulated(), "cuda": Cuda()}


def chosen() -> Accelerator:
    """The accelerator that ``SHARDWISE_TEST_DEVICE`` names."""
    name = os.environ.get("SHARDWISE_TEST_DEVICE", "sim")
    if name not in KINDS:
        raise pytest.UsageError(f"SHARDWISE_TEST_DEVICE is {name!r}, known are {', '.join(KINDS)}")
    return KINDS[name]


def prepare(rank: int, world: int) -> dict[str, Any]:
    """What ranks of the chosen accelerator start with."""
    return chosen().prepare(rank, world)
