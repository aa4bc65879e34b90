"""Build a model without memory; give its tensors their values later, one by one.

Inside `deferred_init()` large tensors are meta tensors whose operations are recorded, below
autograd; `materialize` replays those that one tensor depends on, on any device. Values depend on
the seed and the program, never on what else was materialised. What cannot be replayed raises.

[Note: what is deferred] Operations that touch a deferred tensor, ask for the meta device, or make
a tensor of `MIN_NUMEL` elements or more from smaller ones. All else really runs, so that small
buffers have values at once. An operation that needs values (`item`, `nonzero`, a write into a real
tensor) gets them from a replay on the spot.

[Note: histories] All aliases of a storage (views, `nn.Parameter`, `detach`) share one cell, an
attribute of the torch storage that dies with it. A cell points at its last write, a write at the
one before it. A write that fills the storage has none before it, so that dead stores
(`reset_parameters` before `normal_`) drop out while recording. No history points at a cell:
reference counts alone release it.

[Note: looking real] `nn.init` and model code skip initialisation when they see meta tensors. So
inside the context Python is told the device that the code asked for. The functions of `nn.init`
that skip meta tensors are recorded as one call at the moment they ask `is_meta`: control flow that
depends on values (`trunc_normal_` draws until all samples fit) must not be frozen under one seed.

[Note: random numbers] Each random operation has its own stream, derived from a base seed and the
number of random operations before it in the context. The base is drawn from torch's generator on
entry, so that `torch.manual_seed` fixes it, and two models built one after the other differ. An
explicit generator's seed is the base of its own operations: `materialize(seed=)` leaves it.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.core.errors import UsageError

MIN_NUMEL = 16384
"""Smaller tensors are real from the start: they cost little, and model code reads them."""

_aten = torch.ops.aten
_order = itertools.count()


@dataclass(slots=True, eq=False)
class _Cell:
    """A storage without memory."""

    key: int
    seed: int
    device: torch.device
    """What the code asked for."""
    write: "_Write | None" = None


@dataclass(slots=True, eq=False)
class _Ref:
    """A tensor as an operation saw it: a window on a storage at one point of its history."""

    key: int
    layout: "_Layout"
    write: "_Write | None"
    filled: bool = False
    """The operation fills the whole storage without reading it."""


@dataclass(slots=True, eq=False)
class _Op:
    order: int
    func: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[_Ref | None]
    """The storages it creates; None for a result that is none."""
    stream: tuple[int, int, bool] | None
    """Of a random operation: base seed, index, whether an explicit generator pinned the base."""

    def refs(self) -> list[_Ref]:
        return _leaves(_Ref, self.args, self.kwargs, self.outputs)


@dataclass(slots=True, eq=False)
class _Write:
    op: _Op
    before: "_Write | None"


class _Layout(NamedTuple):
    nbytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(t: Tensor) -> "_Layout":
        nbytes, offset = t.untyped_storage().nbytes(), int(t.storage_offset())
        return _Layout(nbytes, t.dtype, t.shape, t.stride(), offset, t.is_conj(), t.is_neg())

    def fills_storage(self) -> bool:
        dense = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != dense:
                return False
            dense *= size
        return dense * self.dtype.itemsize == self.nbytes


class _Lost:
    """Stands for a tensor whose values nobody recorded."""


class _Record(NamedTuple):
    """What to replay for a tensor. Of a parameter also kept as the context left it: `_find`."""

    ref: _Ref
    seed: int
    version: int


_parameters = WeakIdKeyDictionary()


class _Traits(NamedTuple):
    """What an operator's schema says."""

    names: tuple[str, ...]
    writes: frozenset[str]
    fills: bool  # what it writes does not depend on what was there
    creates: bool  # all results are new tensors
    is_view: bool
    asks: bool  # returns no tensor and writes none: it needs values
    shape_only: bool  # does not need the values of its inputs
    uninitialised: bool
    random: bool


_FILLS = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_FILLS |= {"log_normal_", "cauchy_", "geometric_"}


@functools.cache
def _traits(func: Any) -> _Traits:
    name, names = func._schema.name.split("::")[1], [a.name for a in func._schema.arguments]
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    results = [r for r in func._schema.returns if "Tensor" in str(r.type)]
    aliased = any(result.alias_info for result in results)
    return _Traits(
        names=tuple(names),
        writes=frozenset(a.name for a in written),
        fills=name in _FILLS or all(a.is_out for a in written),
        creates=bool(results) and not aliased and not written,
        is_view=(aliased and not written) or torch.Tag.inplace_view in func.tags,
        asks=not results and not written,
        shape_only="device" in names and (name.startswith("new_") or name.endswith("_like")),
        uninitialised=not written and name.startswith(("empty", "new_empty")),
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    """Applies `fn` to the leaves of an operator's arguments, much faster than torch's pytree."""
    if isinstance(value, list | tuple):
        return [_map(fn, item) for item in value]
    if isinstance(value, dict):
        return {name: _map(fn, item) for name, item in value.items()}
    return fn(value)


def _leaves(kind: type, *values: Any) -> list[Any]:
    found: list[Any] = []
    _map(lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None, values)
    return found


def _tensors(*values: Any) -> list[Tensor]:
    return _leaves(Tensor, *values)


def _cell(tensor: Tensor) -> _Cell | None:
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), "_shardwise_cell", None)


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # would import torch._dynamo: seconds, and 60 MB

    def __init__(self) -> None:
        super().__init__()
        self.seed = int(torch.randint(2**62, ()))
        self.num_random = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, _traits(func), args, kwargs or {})

    def _dispatch(self, func: Any, traits: _Traits, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = _tensors(args, kwargs)
        cells = [cell for t in tensors if (cell := _cell(t))]
        device = torch.device(kwargs.get("device") or "cpu")
        if traits.is_view or (not cells and any(t.is_meta for t in tensors)):
            return func(*args, **kwargs)
        shadow: Any = NotImplemented
        if not cells and device.type != "meta":
            if traits.creates and (
                traits.shape_only or all(t.numel() < MIN_NUMEL for t in tensors)
            ):
                shadow = _on_meta(func, traits, args, kwargs)
            if all(t.numel() < MIN_NUMEL for t in _tensors(shadow)):
                return func(*args, **kwargs)
        named = dict(zip(traits.names, args, strict=False)) | kwargs
        written = _tensors([named.get(name) for name in traits.writes])
        if traits.asks or (written and not any(_cell(t) for t in written)):
            return _on_values(func, args, kwargs)
        inputs = _capture(traits, args, kwargs, written)
        if not all(_cell(t) for t in written):
            _on_values(func, args, kwargs)  # for the real ones; recorded for the others
        if traits.fills and len(written) == len(tensors) == 1:
            shadow = written[0]  # nothing that could fail, and the most frequent case
        if shadow is NotImplemented:
            shadow = _on_meta(func, traits, args, kwargs)
        if shadow is NotImplemented and not written:  # the shape of the result depends on values
            return _on_values(func, args, kwargs)
        shadow = written[0] if shadow is NotImplemented else shadow
        if not tensors and "dtype" in traits.names:
            inputs[1]["dtype"] = shadow.dtype  # the default dtype may be another one at replay
        if device.type == "meta" or "device" not in kwargs:
            device = cells[0].device if cells else torch.device("cpu")
        results = _tensors(shadow)
        outputs = [_make_cell(t, self.seed, device) for t in results]
        changed = written + [t for t, ref in zip(results, outputs, strict=True) if ref]
        if changed and not traits.uninitialised:
            stream = self.stream(kwargs.get("generator")) if traits.random else None
            _record(_Op(next(_order), func, *inputs, outputs, stream), changed)
        return shadow

    def stream(self, generator: torch.Generator | None) -> tuple[int, int, bool]:
        self.num_random += 1
        base = generator.initial_seed() if generator else self.seed
        return base, self.num_random, generator is not None

    def record_init(self, func: Any, frame: FrameType) -> None:
        """Records the call of an `nn.init` function that `frame` is executing."""
        names = func.__code__.co_varnames[: func.__code__.co_argcount]
        values = {name: frame.f_locals[name] for name in names}
        tensor, generator = values.pop("tensor"), values.pop("generator", None)
        layout, cell = _Layout.of(tensor), _cell(tensor)
        assert cell is not None
        filled = layout.fills_storage()
        ref = _Ref(cell.key, layout, None if filled else cell.write, filled)
        _record(_Op(next(_order), func, [ref], values, [], self.stream(generator)), [tensor])


def _make_cell(tensor: Tensor, seed: int, device: torch.device) -> _Ref | None:
    if _cell(tensor):
        return None  # an alias
    cell = _Cell(next(_order), seed, device)
    tensor.untyped_storage()._shardwise_cell = cell  # type: ignore[attr-defined]
    return _Ref(cell.key, _Layout.of(tensor), None, filled=True)


def _record(op: _Op, written: list[Tensor]) -> None:
    filled = {ref.key for ref in op.refs() if ref.filled}
    for key, cell in {cell.key: cell for t in written if (cell := _cell(t))}.items():
        cell.write = _Write(op, None if key in filled else cell.write)


_PLACE = ("device", "pin_memory", "generator")


def _capture(
    traits: _Traits, args: Any, kwargs: dict[str, Any], written: list[Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """What replay needs of the arguments: windows on deferred tensors, copies of real ones."""
    keys = [cell.key for t in _tensors(args, kwargs) if (cell := _cell(t))]

    def take(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if traits.shape_only:
            return _shape_of(tensor)
        if not tensor.is_meta:
            return _copy(tensor)
        cell = _cell(tensor)
        if cell is None:
            return _Lost()
        layout, is_written = _Layout.of(tensor), any(tensor is t for t in written)
        filled = (
            traits.fills and is_written and keys.count(cell.key) == 1 and layout.fills_storage()
        )
        return _Ref(cell.key, layout, None if filled else cell.write, filled)

    taken: dict[str, Any] = _map(take, _placeless(kwargs))
    if "device" in traits.names:
        taken["device"] = None  # the target, at replay
    return _map(take, args), taken


def _placeless(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name in _PLACE else value for name, value in kwargs.items()}


def _copy(tensor: Tensor) -> Tensor:
    """A copy no larger than the storage: an expanded tensor stays expanded."""
    if tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes():
        return tensor.detach().clone()
    window = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return window.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _as_meta(leaf: Any) -> Any:
    return _shape_of(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _on_meta(func: Any, traits: _Traits, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs = _placeless(kwargs)
    if "device" in traits.names:
        kwargs["device"] = torch.device("meta")
    try:
        return func(*_map(_as_meta, args), **_map(_as_meta, kwargs))
    except Exception as error:
        if traits.writes and not isinstance(error, NotImplementedError):
            raise
        return NotImplemented


def _on_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def real(leaf: Any) -> Any:
        cell = _cell(leaf) if isinstance(leaf, Tensor) else None
        return materialize(leaf, device=cell.device) if cell else leaf

    return func(*_map(real, args), **_map(real, kwargs))


_SKIP_META = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_INITS = {f.__code__: f for name in _SKIP_META if (f := getattr(init, name, None))}
_IS_META, _DEVICE, _SET_DATA = (
    Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.data.__set__,  # type: ignore[attr-defined]
)


class _Facade(TorchFunctionMode):
    """Handles what the dispatcher sees too late or never; [Note: looking real]."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if func == _SET_DATA:
            with _plain_torch():
                value = self._as_data(args[0], args[1])
            return func(tensor, value)
        cell = None if tensor is None else _cell(tensor)
        if tensor is None or cell is None:
            return func(*args, **kwargs)
        if func == _DEVICE:
            return cell.device
        if func == _IS_META:
            caller = sys._getframe(1)
            if is_init := caller.f_code in _INITS:
                self.recorder.record_init(_INITS[caller.f_code], caller)
            return is_init
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            return func(materialize(tensor), *args[1:], **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (tensor, _real_index(args[1]), *args[2:])
        if func is Tensor.new_tensor:
            kwargs = {"device": cell.device} | kwargs
        return func(*args, **kwargs)

    def _as_data(self, tensor: Tensor, value: Tensor) -> Tensor:
        """What `tensor.data = value` may assign: torch wants both real or both meta."""
        if _cell(tensor) and not value.is_meta:
            # Not copied: a later write into `value` shows, as it would without the context.
            source, value = value.detach(), _shape_of(value)
            output = _make_cell(value, self.recorder.seed, source.device)
            _record(_Op(next(_order), _aten.clone.default, [source], {}, [output], None), [value])
        elif not tensor.is_meta and _cell(value):
            value = materialize(value, device=tensor.device)
        return value


def _real_index(index: Any) -> Any:
    """torch would put the values of a list on the device of the tensor: on meta, they are lost."""
    if isinstance(index, tuple):
        return tuple(_real_index(item) for item in index)
    is_data = isinstance(index, list) or hasattr(index, "__array_interface__")
    return torch.as_tensor(index, device="cpu") if is_data else index


def _slice(ref: _Ref) -> list[_Op]:
    """The operations that a tensor depends on, in the order in which they were recorded."""
    ops: dict[int, _Op] = {}
    seen: set[int] = set()
    pending = [ref.write]
    while pending:
        write = pending.pop()
        while write is not None and id(write) not in seen:
            seen.add(id(write))
            if write.op.order not in ops:
                ops[write.op.order] = write.op
                pending.extend(ref.write for ref in write.op.refs())
            write = write.before
    return [ops[order] for order in sorted(ops)]


class _Replay:
    def __init__(self, device: torch.device, seed: int | None) -> None:
        self.device = device
        self.seed = seed
        self.storages: dict[int, torch.UntypedStorage] = {}

    def run(self, target: _Ref) -> Tensor:
        ops = _slice(target)
        if blind := next((op for op in ops if _leaves(_Lost, op.args, op.kwargs)), None):
            raise UsageError(
                f"the values of a deferred tensor of shape {tuple(target.layout.size)} come "
                f"through {blind.func} from a meta tensor that has none: give that one values, or "
                "create it inside `deferred_init()`"
            )
        last_use = {ref.key: op for op in ops for ref in op.refs()}
        last_use.pop(target.key, None)
        for op in ops:
            if not self._move(op, last_use):
                self._execute(op)
            for ref in op.refs():
                if last_use.get(ref.key) is op:
                    self.storages.pop(ref.key, None)
        result = self._window(target).resolve_conj().resolve_neg()
        if result.is_contiguous() and result.untyped_storage().nbytes() == result.nbytes:
            return result
        return result.clone(memory_format=torch.contiguous_format)

    def _move(self, op: _Op, last_use: dict[int, _Op]) -> bool:
        """A copy whose source is not needed any more takes over the memory of the source."""
        if op.func not in (_aten.clone.default, _aten._to_copy.default):
            return False
        source, output = op.args[0], op.outputs[0]
        if not isinstance(source, _Ref) or output is None or source.layout != output.layout:
            return False
        if last_use.get(source.key) is not op:
            return False
        self._window(source)
        self.storages[output.key] = self.storages.pop(source.key)
        return True

    def _execute(self, op: _Op) -> None:
        args, kwargs = _map(self._real, (op.args, op.kwargs))
        if "device" in kwargs:
            kwargs["device"] = self.device
        if op.stream:
            self._reseed(*op.stream)
        result = op.func(*args, **kwargs)
        for ref, output in zip(op.outputs, _tensors(result), strict=False):
            if ref is None:
                continue
            if _Layout.of(output) == ref.layout:
                self.storages[ref.key] = output.untyped_storage()
            else:  # strides of the real kernel may differ from those of the meta kernel
                self._window(ref).copy_(output)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, _Ref):
            return self._window(leaf)
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return leaf.to(self.device)
        return leaf

    def _window(self, ref: _Ref) -> Tensor:
        nbytes, dtype, size, stride, offset, is_conj, is_neg = ref.layout
        if ref.key not in self.storages:
            # Zeros where nothing was ever written, so that all ranks have the same.
            make = torch.empty if ref.filled else torch.zeros
            blank = make(nbytes, dtype=torch.uint8, device=self.device)
            self.storages[ref.key] = blank.untyped_storage()
        window = torch.empty(0, dtype=dtype, device=self.device)
        window = window.set_(self.storages[ref.key], offset, size, stride)
        window = torch._neg_view(window) if is_neg else window
        return window.conj() if is_conj else window

    def _reseed(self, base: int, index: int, pinned: bool) -> None:
        seed = _mix(base if pinned or self.seed is None else self.seed, index)
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            accelerator = torch.get_device_module(self.device)
            with accelerator.device(self.device):
                accelerator.manual_seed(seed)


def _mix(base: int, index: int) -> int:
    """A seed for operation `index`. Generators on CPU use its lower 32 bits only: they come from a
    bijection (the finaliser of murmur3), so that no two operations of a program share a stream."""
    base = ((base ^ (base >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    base = ((base ^ (base >> 27)) * 0x94D049BB133111EB) % 2**64
    low = (base + index) % 2**32
    low = ((low ^ (low >> 16)) * 0x85EBCA6B) % 2**32
    low = ((low ^ (low >> 13)) * 0xC2B2AE35) % 2**32
    return (base >> 32 << 32) | (low ^ (low >> 16))


@contextmanager
def _plain_torch() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def _remember(module: Any, name: str, parameter: Tensor | None) -> None:
    with _plain_torch():
        if parameter is not None and _cell(parameter):
            _parameters[parameter] = None


def _record_of(tensor: Tensor, cell: _Cell) -> _Record:
    return _Record(_Ref(cell.key, _Layout.of(tensor), cell.write), cell.seed, _version(tensor))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _find(tensor: Tensor) -> _Record | None:
    """A parameter that was cast after the context (`model.to(dtype)`) has a new storage, without a
    history: its record of when the context ended stands in."""
    if cell := _cell(tensor):
        return _record_of(tensor, cell)
    left = _parameters.get(tensor)
    if left is None or not tensor.is_meta or tensor.dtype == left.ref.layout.dtype:
        return None
    return left if tensor.shape == left.ref.layout.size else None


def _require(tensor: Tensor) -> _Record:
    found, left, shape = _find(tensor), _parameters.get(tensor), tuple(tensor.shape)
    if not tensor.is_meta:
        raise UsageError(f"a tensor of shape {shape} is not deferred: it has its values already")
    if found is None:
        raise UsageError(
            f"a meta tensor of shape {shape} has no recorded initialisation: create, copy and cast "
            "it inside `deferred_init()`, or load its values"
        )
    if left and left.ref.write is found.ref.write and left.version != _version(tensor):
        raise UsageError(
            f"a deferred parameter of shape {shape} was written to after `deferred_init()`, where "
            "nothing is recorded: initialise it inside the context, or materialise it first"
        )
    return found


@contextmanager
def deferred_init() -> Iterator[None]:
    """Models built inside get their large tensors without memory, on the meta device.

    Nested contexts are one. Writes after the context are not recorded: those through a registered
    parameter make `materialize` raise, those through `parameter.data` go unnoticed.
    """
    if any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack()):
        yield
        return

    recorder = _Recorder()
    hook = register_module_parameter_registration_hook(_remember)
    try:
        with recorder, _Facade(recorder):
            yield
    finally:
        hook.remove()
        with _plain_torch():  # some may be guarded by now: look at them without asking them
            for parameter, left in list(_parameters.items()):
                cell = _cell(parameter)
                if cell is not None and (left is None or left.ref.write is not cell.write):
                    _parameters[parameter] = _record_of(parameter, cell)


def materialize(
    tensor: Tensor, *, device: torch.device | str = "cpu", seed: int | None = None
) -> Tensor:
    """The values of a deferred tensor: detached, contiguous, on `device`.

    Args:
        seed: instead of the seed of the context, so that all ranks can use rank 0's.
    """
    with _plain_torch():
        found = _require(tensor)
        target = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        others = [] if target.type == "cpu" else [target.index]
        kind = target.type if others else "cuda"
        with torch.random.fork_rng(others, device_type=kind):
            values = _Replay(target, seed).run(found.ref)
        return values.to(tensor.dtype)


def forget(tensor: Tensor) -> None:
    """Drops what is kept about a parameter: to be called when it has its values.

    Otherwise its history, with real tensors that were copied into it, lives as long as it does, and
    the weak reference to it keeps `torch.utils.swap_tensors` from working.
    """
    _parameters.pop(tensor, None)


def is_deferred(tensor: Tensor) -> bool:
    """Whether the tensor is on the meta device and `materialize` knows its values."""
    with _plain_torch():
        return _find(tensor) is not None


def deferred_seed(tensor: Tensor) -> int:
    """The base seed of the context that made the tensor."""
    with _plain_torch():
        return _require(tensor).seed


def recorded_ops(tensor: Tensor) -> list[str]:
    """The operations that `materialize` would run, in order."""
    with _plain_torch():
        return [
            str(getattr(op.func, "_overloadpacket", op.func.__name__))
            for op in _slice(_require(tensor).ref)
        ]
