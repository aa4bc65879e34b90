"""``simccl``: collectives of the simulated device, as a backend of ``torch.distributed``."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.accelerator.device.sim import _device

NAME = "simccl"


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout)
    return _device.make_collectives(gloo, rank, size)


dist.Backend.register_backend(NAME, _create, devices=["sim"])
