"""Accelerators as reports describe them: versions, each device, and each ability."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.errors import UsageError
from shardwise.device import abilities, choice, host, memory, streams

_DRIVER_TOOLS = (
    ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showdriverversion", "--csv"),
    ("xpu-smi", "discovery", "-d", "0"),
)
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that a device may offer."""

    name: str
    there: bool
    remark: str
    """Why it is not there, or how it is."""


def versions() -> dict[str, str]:
    """Versions of all that runs on a device, by name; what is not there says so."""
    toolkits = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    found = {f"torch.version.{name}": str(value) for name, value in toolkits.items() if value}
    return {
        "torch": torch.__version__,
        **found,
        "triton": _version_of("triton"),
        "driver": _driver(),
        "collectives": _collectives_version(),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """One device: its name, memory, and what its runtime says of it."""
    module = torch.get_device_module(device)
    free, total = torch.accelerator.get_memory_info(device)
    facts: dict[str, Any] = {
        "device": str(device),
        "name": abilities.device_name(device),
        "memory_bytes": int(total),
        "free_bytes": int(free),
    }
    asked = getattr(module, "get_device_capability", None)
    if asked is not None:
        facts["capability"] = _short(asked(device))
    properties = getattr(module, "get_device_properties", None)
    if properties is not None:
        found = properties(device)
        for name in ("multi_processor_count", "gcnArchName", "max_compute_units", "L2_cache_size"):
            if hasattr(found, name):
                facts[name] = getattr(found, name)
    return facts


def find_abilities(device: torch.device) -> list[Ability]:
    """Every ability that shardwise asks for, tried on a device."""
    checks: dict[str, Callable[[torch.device], tuple[bool, str]]] = {
        "streams and events": _streams,
        "high-priority streams": _priorities,
        "collectives": _collectives,
        "triton kernels": _triton,
        "bfloat16": lambda device: (abilities.supports_bfloat16(device), ""),
        "exact pinned memory": _exact_pinning,
        "free memory": lambda device: (True, f"{memory.free_bytes(device)} bytes"),
        "peak memory": lambda device: (torch.accelerator.max_memory_allocated(device) >= 0, ""),
        "random numbers forked": _forked_random,
        "threads for updates on the host": lambda device: (
            True,
            f"{host.host_update_threads(device)} of this process",
        ),
    }
    return [_tried(name, check, device) for name, check in checks.items()]


def _tried(
    name: str, check: Callable[[torch.device], tuple[bool, str]], device: torch.device
) -> Ability:
    try:
        return Ability(name, *check(device))
    except Exception as error:  # of any kind: it is what the report is for
        return Ability(name, False, first_line(error))


def first_line(error: BaseException) -> str:
    """An error as one line."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    return line if isinstance(error, UsageError) else f"{type(error).__name__}: {line}".rstrip(": ")


def _streams(device: torch.device) -> tuple[bool, str]:
    reason = abilities.obstacle(device)
    return not reason, reason


def _priorities(device: torch.device) -> tuple[bool, str]:
    stream = streams.side_stream(device)
    priority = getattr(stream, "priority", None)
    if priority is None:  # a generic stream does not tell
        return True, "accepted; torch does not tell what it made of it"
    return priority < 0, f"priority {priority}"


def _collectives(device: torch.device) -> tuple[bool, str]:
    backend = choice.collective_backend(device)
    there = backend in dist.Backend.backend_list and dist.is_backend_available(backend)
    return there, backend if there else f"this build of torch has no {backend}"


def _triton(device: torch.device) -> tuple[bool, str]:
    if not abilities.runs_triton(device):
        return False, f"triton does not compile for {device.type}; codecs are made of torch's own"
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    return True, ""


def _exact_pinning(device: torch.device) -> tuple[bool, str]:
    asked = 3 * memory.PAGE_BYTES
    takes = memory.pinned_bytes(asked, device)
    remark = "" if takes == asked else "torch rounds sizes up to powers of two on this device"
    return takes == asked, remark


def _forked_random(device: torch.device) -> tuple[bool, str]:
    with abilities.forked_random(device):
        abilities.seed_random(device, 0)
        drawn = torch.rand(4, device=device)
    with abilities.forked_random(device):
        abilities.seed_random(device, 0)
        return torch.equal(drawn, torch.rand(4, device=device)), ""


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """What the vendor's tool says; it knows more than torch."""
    for name, *arguments in _DRIVER_TOOLS:
        tool = shutil.which(name)
        if tool is None:
            continue
        try:
            done = subprocess.run(
                [tool, *arguments], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return first_line(error)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if lines:
            return f"{lines[-1]} ({name})"
    return "unknown: none of " + ", ".join(tool[0] for tool in _DRIVER_TOOLS) + " is installed"


def _collectives_version() -> str:
    device = abilities.accelerator()
    if device is None:
        return "no accelerator"
    backend = choice.collective_backend(device)
    if backend != "nccl":
        return backend
    return f"nccl {_short(torch.cuda.nccl.version())}"


def _short(value: object) -> str:
    """A version or a capability: 9.0 rather than (9, 0)."""
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    if isinstance(value, dict):  # some backends list dtypes
        return ", ".join(f"{key}: {_names(item)}" for key, item in value.items())
    return str(value)


def _names(item: object) -> str:
    if isinstance(item, (set, frozenset, list, tuple)):
        return " ".join(sorted(str(one).removeprefix("torch.") for one in item))
    return str(item)
