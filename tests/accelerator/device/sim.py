"""``torch.sim``: the simulated accelerator's Python side, shaped as ``torch.cuda`` is.

Importing this module makes ``sim`` the accelerator of the process, for good: only test ranks and
subprocesses do it.
"""

import atexit
import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tests.accelerator.device import threads
from tests.accelerator.device.build import load

_device = load()
Kernel = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]

# Streams end before the interpreter does; what they have not begun is dropped.
atexit.register(_device.end)
os.register_at_fork(after_in_child=_device.after_fork)
threads.watch(_device)
torch.utils.rename_privateuse1_backend("sim")


# --- the module that torch looks for ---------------------------------------------------------------
class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> "Stream":
        if known:
            return torch.Stream.__new__(cls, **known)
        return torch.Stream.__new__(cls, _as_device(device), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> "Event":
        return torch.Event.__new__(cls, "sim", enable_timing=enable_timing, blocking=blocking)


class _Runtime:
    """The two functions of CUDA's runtime library that pin pages which the host has already."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        code = int(_device.host_register(address, nbytes))
        if code == 0:
            self._sizes[address] = nbytes
        return code

    def cudaHostUnregister(self, address: int) -> int:
        return int(_device.host_unregister(address, self._sizes.pop(address)))


_runtime = _Runtime()


def _index(device: Any = None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _as_device(device: Any = None) -> torch.device:
    return torch.device("sim", _index(device))


@contextlib.contextmanager
def _use_stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    # ``with stream`` keeps what it restores in the stream, so that it could not be nested.
    if stream is None:
        yield None
        return
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield stream
        finally:
            torch.accelerator.set_stream(before)


def _generator(device: Any = None) -> torch.Generator:
    return _device.default_generator(_index(device))


def _seed_all(seed: int) -> None:
    for index in range(torch.accelerator.device_count()):
        _generator(index).manual_seed(int(seed))


def _functions() -> dict[str, Any]:
    accelerator = torch.accelerator
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: accelerator.current_stream(_index(device)),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=torch.device("sim").type
        ),
        "set_stream": accelerator.set_stream,
        "cudart": lambda: _runtime,
        "stream": _use_stream,
        "device": lambda device: accelerator.device_index(_index(device)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _device.device_count,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_index(device)),
        "get_device_name": lambda device=None: "simulated device",
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "manual_seed": lambda seed: _generator().manual_seed(int(seed)),
        "manual_seed_all": _seed_all,
        "initial_seed": lambda: _generator().initial_seed(),
        "get_rng_state": lambda device=None: _generator(device).get_state(),
        "set_rng_state": lambda state, device=None: _generator(device).set_state(state),
        "mem_get_info": lambda device=None: accelerator.get_memory_info(_index(device)),
        "memory_allocated": lambda device=None: accelerator.memory_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(
            _index(device)
        ),
        "memory_reserved": lambda device=None: accelerator.memory_reserved(_index(device)),
        "max_memory_reserved": lambda device=None: accelerator.max_memory_reserved(_index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(
            _index(device)
        ),
        "memory_stats": lambda device=None: accelerator.memory_stats(_index(device)),
        "empty_cache": accelerator.empty_cache,
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
        "_is_in_bad_fork": _device.in_forked_child,
        "_lazy_init": lambda: None,
    }


module = types.ModuleType("torch.sim")
for _name, _value in _functions().items():
    setattr(module, _name, _value)
torch._register_device_module("sim", module)
sys.modules["torch.sim"] = module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
torch._C._set_storage_data_ptr_access_error_msg = _device.refuse_access


# --- what only a simulation can do ----------------------------------------------------------------
def set_device_count(count: int) -> None:
    """How many devices there are, one by default; before the first is used."""
    _device.set_device_count(count)


def launch(
    name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], kernel: Kernel
) -> None:
    """Runs ``kernel(reads, writes)`` as one launch on the current stream.

    It is called later, by the stream, with CPU tensors that are views of the same memory. A tensor
    that is read and written is named in both lists.
    """
    _device.launch(name, list(reads), list(writes), kernel)


def delay(slow: str = "none", microseconds: int = 0, seed: int = 0) -> None:
    """Makes streams late before each piece of work: ``none``, the default stream (``main``), the
    others (``side``), ``all``, or every fourth piece of work at ``random``."""
    if slow not in ("none", "main", "side", "all", "random"):
        raise ValueError(f"no such delay: {slow}")
    _device.delay(slow, microseconds, seed)


def on_wait(call: Callable[[str], None] | None) -> None:
    """Calls a function, on the thread that waits, before every wait of the host that is counted."""
    _device.on_wait(call)


def clear() -> None:
    """Forgets races, launches and waits, and starts peaks of memory anew."""
    _device.clear()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)


def statistics() -> dict[str, Any]:
    """``launches`` and ``launches_by_name``; ``host_waits`` by kind; ``without_shape``: waits that a
    real device would not have, because torch knows no shape function of an operation; ``races`` as
    sentences; ``pinned`` bytes, their peak, and what is reserved for them."""
    return dict(_device.statistics())


def set_memory_limit(nbytes: int) -> None:
    """How much memory each device has."""
    _device.set_memory_limit(nbytes)


def devices_used() -> list[int]:
    """The devices on which this process has ever allocated memory."""
    return [index for index in range(torch.accelerator.device_count()) if _device.ever_used(index)]


def priority_of(stream: torch.Stream) -> int:
    """The priority a stream was made with: -1 is high."""
    return int(_device.priority(stream.device_index, stream.stream_id))
