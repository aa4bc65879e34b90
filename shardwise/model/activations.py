"""How many bytes of activations a forward leaves for backward, without running it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def saved_bytes(build: Callable[[], nn.Module], run: Callable[[nn.Module], Any]) -> int:
    """Bytes that autograd saves in ``run(model)``, parameters and buffers aside.

    Both callables run on fake tensors: shapes, dtypes and the choice of kernels are real, memory
    is not touched. A storage that several operations save counts once.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        own = {_storage(t) for t in (*model.parameters(), *model.buffers())}
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if _storage(tensor) not in own:
                saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run(model)  # kept alive: storages must not be reused while counting
        del result
    return sum(saved.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
