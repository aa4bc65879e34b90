"""Which device a rank uses, and how its ranks' process group is made."""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.errors import UsageError
from shardwise.device.abilities import HOST, accelerator, obstacle, separate_memory

Asked = torch.device | str | None
"""What a user asks for; None: this rank's accelerator, or the CPU without one."""

_REMEDY = "pass device='cpu' to use the CPU"


def local_device(asked: Asked = None) -> torch.device:
    """The device of this rank: what is asked for, else the accelerator of LOCAL_RANK, else the CPU.

    An accelerator that shardwise cannot use is an error if it is asked for; otherwise rank 0 says
    why the CPU is used.

    >>> local_device("cpu")
    device(type='cpu')
    """
    device = torch.device(asked) if asked is not None else accelerator() or HOST
    if not separate_memory(device):
        return HOST
    if (found := accelerator()) is None or found.type != device.type:
        offered = "none" if found is None else f"only {found.type}"
        raise UsageError(
            f"Device {device} cannot be used, because torch offers {offered} here; {_REMEDY}."
        )
    device = torch.device(device.type, _index(device))
    if reason := obstacle(device):
        if asked is not None:
            raise UsageError(f"Device {device} cannot be used, because {reason}; {_REMEDY}.")
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(
                f"shardwise uses the CPU and not {device}, because {reason}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return HOST
    return device


def _index(device: torch.device) -> int:
    """The index that a device names, else that of this rank's on its node."""
    count = torch.accelerator.device_count()
    if device.index is not None:
        if device.index >= count:
            raise UsageError(f"Device {device} does not exist: this process sees {count} of them.")
        return device.index
    if "LOCAL_RANK" not in os.environ:
        return torch.accelerator.current_device_index()
    index = int(os.environ["LOCAL_RANK"])
    if index >= count:
        raise UsageError(
            f"Local rank {index} has no {device.type} device of its own, because this process sees "
            f"{count} of them: start one rank per device, or name the device (device=) if every "
            "rank sees another."
        )
    return index


def make_current(device: torch.device) -> torch.device:
    """What is made without naming a device's index goes there from now on."""
    if separate_memory(device):
        torch.accelerator.set_device_index(device.index)
    return device


def collective_backend(device: torch.device) -> str:
    """The name of torch's backend for collectives between devices."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        raise UsageError(
            f"Torch has no collectives for devices of type {device.type}, so several ranks cannot "
            f"train on them; {_REMEDY}."
        ) from None


def host_backend() -> str:
    """The backend of a group for exchanges between hosts.

    If the default group is bound to a device (``device_id``), torch asks every group for a backend
    of that device, so that the host's must be named for both.
    """
    host, everyone = collective_backend(HOST), dist.group.WORLD
    bound = None if everyone is None else everyone.bound_device_id
    return host if bound is None else f"{HOST.type}:{host},{bound.type}:{host}"


def process_group_options(device: torch.device) -> dict[str, Any]:
    """How to call ``init_process_group``: with a backend for the device, and one for the host."""
    host = collective_backend(HOST)
    if not separate_memory(device):
        return {"backend": host}
    own = collective_backend(device)
    options: dict[str, Any] = {"backend": f"{HOST.type}:{host},{device.type}:{own}"}
    if dist.Backend.backend_type_map.get(own) != dist.ProcessGroup.BackendType.CUSTOM:
        # Torch's own backends connect at once then, to this device and no other; registered ones
        # need not know what it means.
        options["device_id"] = device
    return options
