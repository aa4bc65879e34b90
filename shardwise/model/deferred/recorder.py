"""Decides which operations are deferred, and records them.

An operation is deferred if it uses a deferred tensor, requests the meta device, or makes a tensor
of `MIN_NUMEL` elements or more from smaller ones. All others run at once, so small buffers have
values immediately. An operation that needs values (`item`, `nonzero`, a write into a real tensor)
gets them from an immediate replay.
"""

from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.model.deferred.history import Lost, Op, cell_of, make_cell, record, ref_to
from shardwise.model.deferred.operators import Traits, map_leaves, tensors_in, traits_of
from shardwise.model.deferred.replay import materialize
from shardwise.model.deferred.streams import Streams

MIN_NUMEL = 16384
"""Smaller tensors are real from the start: they cost little, and model code reads them."""

_PLACE = ("device", "pin_memory", "generator")
"""Arguments for the device of an operation: replay sets its own."""


class Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # would import torch._dynamo: seconds, and 60 MB

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._streams = Streams()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, traits_of(func), args, kwargs or {})

    def _dispatch(self, func: Any, traits: Traits, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(args, kwargs)
        cells = [cell for t in tensors if (cell := cell_of(t))]
        device = torch.device(kwargs.get("device") or "cpu")
        if traits.is_view or (not cells and any(t.is_meta for t in tensors)):
            return func(*args, **kwargs)
        shadow: Any = NotImplemented
        if not cells and device.type != "meta":
            if traits.creates and (
                traits.shape_only or all(t.numel() < MIN_NUMEL for t in tensors)
            ):
                shadow = _on_meta(func, traits, args, kwargs)
            if all(t.numel() < MIN_NUMEL for t in tensors_in(shadow)):
                return func(*args, **kwargs)
        named = dict(zip(traits.names, args, strict=False)) | kwargs
        written = tensors_in([named.get(name) for name in traits.writes])
        if traits.asks or (written and not any(cell_of(t) for t in written)):
            return _on_values(func, args, kwargs)
        inputs = _capture(traits, args, kwargs, written)
        if not all(cell_of(t) for t in written):
            _on_values(func, args, kwargs)  # for the real ones; recorded for the others
        if traits.fills and len(written) == len(tensors) == 1:
            shadow = written[0]  # cannot fail, and is the most frequent case
        if shadow is NotImplemented:
            shadow = _on_meta(func, traits, args, kwargs)
        if shadow is NotImplemented and not written:  # the shape of the result depends on values
            return _on_values(func, args, kwargs)
        shadow = written[0] if shadow is NotImplemented else shadow
        if not tensors and "dtype" in traits.names:
            inputs[1]["dtype"] = shadow.dtype  # the default dtype may differ at replay
        if device.type == "meta" or "device" not in kwargs:
            device = cells[0].device if cells else torch.device("cpu")
        results = tensors_in(shadow)
        outputs = [make_cell(t, self._streams.seed, device) for t in results]
        changed = written + [t for t, ref in zip(results, outputs, strict=True) if ref]
        if changed and not traits.uninitialised:
            stream = self._streams.next(kwargs.get("generator")) if traits.random else None
            record(Op(func, *inputs, outputs, stream), changed)
        return shadow

    def record_init(self, func: Any, frame: FrameType) -> None:
        """Record the call of the `nn.init` function that `frame` is executing."""
        names = func.__code__.co_varnames[: func.__code__.co_argcount]
        values = {name: frame.f_locals[name] for name in names}
        tensor, generator = values.pop("tensor"), values.pop("generator", None)
        cell = cell_of(tensor)
        assert cell is not None
        ref = ref_to(tensor, cell, fills=True)
        record(Op(func, [ref], values, [], self._streams.next(generator)), [tensor])

    def defer(self, source: Tensor) -> Tensor:
        """A deferred tensor with the values of a real one.

        They are not copied: a later write into `source` changes them.
        """
        shadow = _shape_of(source)
        output = make_cell(shadow, self._streams.seed, source.device)
        record(Op(torch.ops.aten.clone.default, [source.detach()], {}, [output]), [shadow])
        return shadow


def _capture(
    traits: Traits, args: Any, kwargs: dict[str, Any], written: list[Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as replay needs them: references to deferred tensors, copies of real ones."""
    keys = [cell.key for t in tensors_in(args, kwargs) if (cell := cell_of(t))]

    def take(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if traits.shape_only:
            return _shape_of(tensor)
        if not tensor.is_meta:
            return _copy(tensor)
        cell = cell_of(tensor)
        if cell is None:
            return Lost()
        is_written = any(tensor is t for t in written)
        fills = traits.fills and is_written and keys.count(cell.key) == 1
        return ref_to(tensor, cell, fills=fills)

    taken: dict[str, Any] = map_leaves(take, _placeless(kwargs))
    if "device" in traits.names:
        taken["device"] = None  # the target, at replay
    return map_leaves(take, args), taken


def _placeless(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name in _PLACE else value for name, value in kwargs.items()}


def _copy(tensor: Tensor) -> Tensor:
    """A copy no larger than the storage: an expanded tensor stays expanded."""
    if tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes():
        return tensor.detach().clone()
    window = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return window.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(func: Any, traits: Traits, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results of an operation without values; NotImplemented if they depend on values."""

    def as_meta(leaf: Any) -> Any:
        return _shape_of(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

    kwargs = _placeless(kwargs)
    if "device" in traits.names:
        kwargs["device"] = torch.device("meta")
    try:
        return func(*map_leaves(as_meta, args), **map_leaves(as_meta, kwargs))
    except Exception as error:
        if traits.writes and not isinstance(error, NotImplementedError):
            raise
        return NotImplemented


def _on_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on replayed values."""

    def real(leaf: Any) -> Any:
        cell = cell_of(leaf) if isinstance(leaf, Tensor) else None
        return materialize(leaf, device=cell.device) if cell else leaf

    return func(*map_leaves(real, args), **map_leaves(real, kwargs))
