"""What a device can do. No other package may ask for the name of its type.

Accelerators are used through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``, so every
backend of torch that offers these works: NVIDIA's and AMD's (which torch calls cuda), Intel's, and
those that register themselves with torch. A device without them is refused with the reason; it is
never treated like a CPU.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

HOST = torch.device("cpu")
"""The device whose memory is the host's."""

_RUNS_TRITON = ("cuda", "xpu")
"""Types that triton compiles for; torch calls AMD's GPUs cuda as well."""
_CHUNK_NUMEL = {"cpu": 1 << 18}
_CHUNK_NUMEL_OF_OTHERS = 1 << 24


def separate_memory(device: torch.device) -> bool:
    """Whether its memory is not the host's, so that values are copied between the two."""
    return device.type != HOST.type


@cache
def obstacle(device: torch.device) -> str:
    """Why shardwise cannot use a device; empty if it can."""
    if not separate_memory(device):
        return ""
    try:
        # On this index, because others are other ranks' devices and must not get memory of ours.
        stream = torch.Stream(device, priority=-1)
        event = torch.Event(device)
        event.record(stream)
        event.synchronize()
        current = torch.accelerator.current_stream(device)
    except (RuntimeError, NotImplementedError) as error:  # torch's default of a backend
        reason = str(error).splitlines()[0].rstrip(".")
        return f"it has no streams and events, which order transfers beside compute ({reason})"
    if stream.stream_id == current.stream_id:
        return "it has one stream only, so that no transfer could run beside compute"
    return ""


def has_streams(device: torch.device) -> bool:
    """Whether work is enqueued on streams, which run beside the host and beside each other."""
    return separate_memory(device) and not obstacle(device)


def accelerator() -> torch.device | None:
    """The type of accelerator of this process, if there is one; without an index."""
    return torch.accelerator.current_accelerator(check_available=True)


def runs_triton(device: torch.device) -> bool:
    """Whether codecs run as triton's kernels on it."""
    return device.type in _RUNS_TRITON


def chunk_numel(device: torch.device) -> int:
    """How many elements a codec handles at once: on CPU a sum over peers must stay in cache; a
    launch on an accelerator should be much larger."""
    return _CHUNK_NUMEL.get(device.type, _CHUNK_NUMEL_OF_OTHERS)


def supports_bfloat16(device: torch.device) -> bool:
    """Whether an accelerator computes in bfloat16."""
    asked = getattr(_module(device), "is_bf16_supported", None)
    if asked is not None:
        return bool(asked())
    return torch.bfloat16 in torch.accelerator.get_device_capability(device)["supported_dtypes"]


def device_name(device: torch.device) -> str:
    """The name of a device; for a CPU with the number of threads per rank."""
    if not separate_memory(device):
        threads = torch.get_num_threads()
        return f"{_cpu_name()} ({threads} thread{'s' * (threads > 1)})"
    named = getattr(_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else f"accelerator {device.type}"


# --- random numbers -------------------------------------------------------------------------------


@contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Inside, random numbers of the CPU and of a device may be drawn; afterwards their generators
    are as before."""
    if separate_memory(device):
        forked = torch.random.fork_rng([device.index], device_type=device.type)
    else:
        forked = torch.random.fork_rng([])
    with forked:
        yield


def seed_random(device: torch.device, seed: int) -> None:
    """Set the default generators of the CPU and of a device."""
    torch.default_generator.manual_seed(seed)
    if separate_memory(device):
        with torch.accelerator.device_index(device.index):
            _module(device).manual_seed(seed)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the default generators of the CPU and of a device."""
    states = {"cpu": torch.get_rng_state()}
    if separate_memory(device):
        states["device"] = _module(device).get_rng_state(device)
    return states


def set_random_states(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    """Restore what ``random_states`` returned; generators that are absent stay as they are."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "device" in states and separate_memory(device):
        _module(device).set_rng_state(states["device"], device)


def _module(device: torch.device) -> Any:
    """What torch offers for a type of device: torch.cuda, torch.xpu and so on."""
    return torch.get_device_module(device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
