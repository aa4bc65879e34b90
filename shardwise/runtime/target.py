"""The device on which a model is sharded."""

import logging
import warnings

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.device.abilities import HOST, separate_memory
from shardwise.device.choice import Asked, local_device, make_current

_log = logging.getLogger("shardwise")


def target_device(model: nn.Module, asked: Asked = None) -> torch.device:
    """The device that is asked for, else the accelerator that the model's parameters are on, else
    this rank's accelerator, or the CPU without one. It becomes the current device.

    Parameters of deferred models on the CPU say nothing: small ones are real there, because nobody
    has chosen a device yet.
    """
    if asked is None:
        asked = _device_of(model)
    return make_current(local_device(asked))


def _device_of(model: nn.Module) -> torch.device | None:
    """The accelerator that a model is on; None if it is on none."""
    found = {p.device for p in model.parameters() if not p.is_meta}
    if any(p.is_meta for p in model.parameters()):
        found.discard(HOST)
    if len(found) > 1:
        raise UsageError(
            f"The parameters of this {type(model).__name__} are on {_names(found)}; move all to "
            "one device, or pass shardwise.shard the one where they should be (device=)."
        )
    return next((device for device in found if separate_memory(device)), None)


def say_target(model: nn.Module, device: torch.device) -> None:
    """Rank 0 says where the model is sharded: a warning if its parameters leave the CPU for it,
    because its inputs must follow."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    real = {p.device for p in model.parameters() if not p.is_meta}
    deferred = any(p.is_meta for p in model.parameters())
    if separate_memory(device) and HOST in real and not deferred:
        warnings.warn(
            f"shardwise moves this {type(model).__name__} from the CPU to {device} (pass "
            "device='cpu' to keep it there); its inputs must be there as well.",
            UserWarning,
            stacklevel=4,
        )
    else:
        _log.info("%s is sharded on %s.", type(model).__name__, device)


def _names(devices: set[torch.device]) -> str:
    return " and ".join(sorted(str(device) for device in devices))
