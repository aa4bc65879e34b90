"""Guarded parameters: not gathered, with true metadata and no values.

While a parameter rests as shards, the same ``nn.Parameter`` object has its class flipped to a
guarded subclass. Metadata and hooks work as always. Everything that would read values waits for a
refresh, gathers on demand inside forward and backward, or raises an error that says what to do.
"""

# ruff: noqa: SIM905 - long lists of names read better as one text

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.core.errors import UsageError

Tensor = torch.Tensor


class ParamOwner(Protocol):
    """What a guarded parameter needs of its owner."""

    name: str

    def access(self, what: str) -> None:
        """Makes the parameter's values readable, or raises."""

    def write(self, value: Tensor) -> None:
        """Overwrites the parameter with a full value, which must be equal on all ranks."""


OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weak on both sides: an owner holds its parameter, so a strong entry would never be freed."""


def owner_of(tensor: Tensor) -> Any:
    """The owner of a guarded tensor; raises if its sharded model was freed."""
    owner = OWNERS[tensor]()
    if owner is None:
        raise UsageError(
            f"A sharded parameter of shape {tuple(tensor.shape)} has no values any more, because "
            "its model was freed; keep the model as long as its parameters."
        )
    return owner


_PROPERTIES = (
    "shape dtype device requires_grad is_leaf grad_fn ndim layout names _version _base output_nr "
    "itemsize nbytes retains_grad is_cpu is_cuda is_meta is_mps is_mkldnn is_mtia is_nested "
    "is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu is_maia is_ipu "
    "_backward_hooks _post_accumulate_grad_hooks grad _grad"
).split()
_METHODS = (
    "size numel nelement dim ndimension stride is_contiguous element_size is_floating_point "
    "is_complex is_signed get_device __len__ __hash__ register_hook "
    "register_post_accumulate_grad_hook has_names storage_offset is_inference is_same_size "
    "is_conj is_neg __dir__ is_set_to new_empty new_empty_strided new_zeros new_ones new_full "
    "new_tensor"
).split()
_FUNCTIONS = (
    "is_floating_point is_complex numel is_signed is_same_size is_inference is_conj is_neg "
    "_has_compatible_shallow_copy_type empty_like zeros_like ones_like full_like rand_like "
    "randn_like randint_like"
).split()


def _metadata() -> set[Callable[..., Any]]:
    allowed: set[Callable[..., Any]] = {torch.autograd.grad, torch.autograd.backward}
    for name in _PROPERTIES:
        if (found := getattr(torch.Tensor, name, None)) is not None:
            allowed.add(found.__get__)
    grad: Any = torch.Tensor.grad  # a property of the class, although its stubs say otherwise
    allowed.update((grad.__set__, grad.__delete__))
    allowed.update(getattr(torch.Tensor, n) for n in _METHODS if hasattr(torch.Tensor, n))
    allowed.update(getattr(torch, n) for n in _FUNCTIONS if hasattr(torch, n))
    return allowed


METADATA = _metadata()
_TARGETS: dict[str, torch.device | torch.dtype | None] = {
    "to": None,
    "cpu": torch.device("cpu"),
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
_CASTS: dict[Callable[..., Any], torch.device | torch.dtype | None] = {
    getattr(torch.Tensor, name): target for name, target in _TARGETS.items()
}


class GuardedParameter(nn.Parameter):
    """A parameter whose values are sharded. See the module's docstring."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (special := _SPECIAL.get(func)) is not None and isinstance(args[0], cls):
            return special(func, *args, **kwargs)
        for parameter in _guarded_in((args, kwargs)):
            if parameter.__class__ is cls:  # an earlier access may have gathered this one as well
                owner_of(parameter).access(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"Parameter {owner_of(self).name!r} of shape {tuple(self.shape)}, {self.dtype}, "
            f"{self.device}: not gathered"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: Any) -> Any:
        raise refuse_copy(owner_of(self).name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy(owner_of(self).name)


class TiledParameter(GuardedParameter):
    """A guarded parameter that is computed in tiles: autograd never reaches it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _HOOKS:
            raise UsageError(
                f"'{func.__name__}' has no effect on parameter '{owner_of(args[0]).name}', because "
                "it is computed in tiles and has no gradient as a whole; raise tiling.numel in the "
                "plan to compute it without tiles."
            )
        return super().__torch_function__(func, types, args, kwargs)


_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


def refuse_copy(name: str) -> UsageError:
    return UsageError(
        f"'{name}' cannot be copied or pickled while it is sharded: use "
        "shardwise.state_dict(model) for its values, build a second model from them, or undo with "
        "shardwise.unshard(model)."
    )


def own(parameter: nn.Parameter, owner: ParamOwner) -> None:
    """Registers the owner of a parameter, which answers accesses while it is guarded."""
    OWNERS[parameter] = weakref.ref(owner)


def disown(parameter: nn.Parameter) -> None:
    OWNERS.pop(parameter, None)


def close(parameters: Iterable[nn.Parameter], *, tiled: bool = False) -> None:
    """Guards these parameters: reading them now asks their owner."""
    for parameter in parameters:
        parameter.__class__ = TiledParameter if tiled else GuardedParameter


def open_up(parameters: Iterable[nn.Parameter]) -> None:
    """Makes these parameters ordinary again."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter


def set_raw_grad(parameter: nn.Parameter, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = grad


def _guarded_in(tree: Any) -> list[GuardedParameter]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, GuardedParameter)]


def _cast(func: Callable[..., Any], parameter: GuardedParameter, *args: Any, **kwargs: Any) -> Any:
    """``.to()`` and the like: returns the parameter if nothing changes, otherwise raises."""
    target = _CASTS[func]
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    with torch._C.DisableTorchFunctionSubclass():
        if func is torch.Tensor.to:
            if args and isinstance(args[0], torch.Tensor):
                args = (args[0].device, args[0].dtype)
            kwargs.pop("copy", None)
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        elif isinstance(target, torch.device):
            device = target
        else:
            dtype = target
        same_device = device is None or torch.device(device).type == parameter.device.type
        if same_device and dtype in (None, parameter.dtype):
            return parameter
        current = f"{parameter.dtype} on {parameter.device}"
    if _readable(parameter):
        return func(parameter, *args, **kwargs)
    raise UsageError(
        f"Parameter '{owner_of(parameter).name}' is sharded as {current} and cannot be moved or "
        "cast: do that before shardwise.shard, or set the plan's precision."
    )


def _readable(parameter: GuardedParameter) -> bool:
    """Whether the values can be read now; inside forward and backward this gathers them."""
    try:
        owner_of(parameter).access("to")
    except UsageError:
        return False
    return not isinstance(parameter, GuardedParameter)


def _copy(
    func: Callable[..., Any], parameter: GuardedParameter, value: Tensor, *_: Any, **__: Any
) -> Tensor:
    """``p.copy_(full)``: every rank takes its shard; load_state_dict uses this."""
    if value is not parameter:
        with torch.no_grad():
            owner_of(parameter).write(value.detach().expand(parameter.shape))
    return parameter


def _set_data(func: Callable[..., Any], parameter: GuardedParameter, value: Tensor) -> None:
    if value is not parameter:
        if value.shape != parameter.shape:
            raise UsageError(
                f"Parameter '{owner_of(parameter).name}' is sharded with shape "
                f"{tuple(parameter.shape)} and cannot become {tuple(value.shape)}; "
                "change shapes before shardwise.shard."
            )
        _copy(func, parameter, value)


def _set_requires_grad(
    func: Callable[..., Any], parameter: GuardedParameter, value: bool = True
) -> GuardedParameter:
    if bool(value) != parameter.requires_grad:
        raise UsageError(
            f"requires_grad of '{owner_of(parameter).name}' cannot change while it is sharded; "
            "freeze or unfreeze before shardwise.shard, or shardwise.unshard(model) first."
        )
    return parameter


_SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(_CASTS, _cast),
    torch.Tensor.copy_: _copy,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
}
