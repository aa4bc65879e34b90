"""Makes deferred tensors look real to model code.

`nn.init` and model code skip initialisation when they see meta tensors. So inside the context
tensors report the device that the code asked for. The functions of `nn.init` that skip meta tensors
are recorded as one call when they read `is_meta`: control flow that depends on values
(`trunc_normal_` draws until all samples fit) must not be fixed by one seed.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from shardwise.model.deferred.history import cell_of
from shardwise.model.deferred.operators import plain_torch
from shardwise.model.deferred.recorder import Recorder
from shardwise.model.deferred.replay import materialize

_SKIP_META = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_INITS = {f.__code__: f for name in _SKIP_META if (f := getattr(init, name, None))}
_IS_META, _DEVICE, _SET_DATA = (
    Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.data.__set__,  # type: ignore[attr-defined]
)


class Facade(TorchFunctionMode):
    """Handles what the dispatcher sees too late or never."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if func == _SET_DATA:
            with plain_torch():
                value = self._as_data(args[0], args[1])
            return func(tensor, value)
        cell = None if tensor is None else cell_of(tensor)
        if tensor is None or cell is None:
            return func(*args, **kwargs)
        if func == _DEVICE:
            return cell.device
        if func == _IS_META:
            caller = sys._getframe(1)
            if is_init := caller.f_code in _INITS:
                self._recorder.record_init(_INITS[caller.f_code], caller)
            return is_init
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            return func(materialize(tensor), *args[1:], **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (tensor, _real_index(args[1]), *args[2:])
        if func is Tensor.new_tensor:
            kwargs = {"device": cell.device} | kwargs
        return func(*args, **kwargs)

    def _as_data(self, tensor: Tensor, value: Tensor) -> Tensor:
        """A value that `tensor.data = value` accepts: torch requires both real or both meta."""
        if cell_of(tensor) and not value.is_meta:
            return self._recorder.defer(value)
        if not tensor.is_meta and cell_of(value):
            return materialize(value, device=tensor.device)
        return value


def _real_index(index: Any) -> Any:
    """An index as a real tensor: torch would move a list to the meta device and lose its values."""
    if isinstance(index, tuple):
        return tuple(_real_index(item) for item in index)
    is_data = isinstance(index, list) or hasattr(index, "__array_interface__")
    return torch.as_tensor(index, device="cpu") if is_data else index
