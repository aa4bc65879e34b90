"""Guarded gradients: reduced and sharded, with true metadata and no values.

A guarded gradient is a tensor of its parameter's shape whose in-place arithmetic acts on this
rank's shard. Everything else that would read values raises an error that says what to do.
"""

# ruff: noqa: SIM905 - long lists of names read better as one text

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.core.errors import UsageError
from shardwise.runtime.surface import guard
from shardwise.runtime.surface.opened import open_grads


class GradOwner(Protocol):
    """What a guarded gradient needs of its owner."""

    name: str

    @property
    def slots(self) -> Sequence[Any]:
        """The slots that hold the gradient; ``open_grads`` brings a slot's flat into memory."""
        ...

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the reduced gradient."""
        ...

    def highest(self, flag: Tensor) -> Tensor:
        """The maximum of a value over all ranks; collective."""
        ...


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element for all guarded gradients: an allocation of a device takes 512 bytes at least."""
    return torch.full((), float("nan"), dtype=dtype, device=device)


class GuardedGrad(torch.Tensor):
    """A gradient that is reduced and sharded. See the module's docstring."""

    @staticmethod
    def make(parameter: nn.Parameter, owner: GradOwner) -> "GuardedGrad":
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            nothing = _nothing(parameter.dtype, parameter.device)
            grad = nothing.expand(parameter.shape).as_subclass(GuardedGrad)
        guard.OWNERS[grad] = weakref.ref(owner)
        return grad

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GET_DTYPE:
            # The accumulator's dtype, which may be wider than the parameter's: GradScaler would
            # refuse to unscale float16.
            return guard.owner_of(args[0]).grad_dtype
        if func in guard.METADATA or func in _GRAD_HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _GRAD_ELEMENTWISE and _all_numbers((args[1:], kwargs)):
            return _on_parts(func, args, kwargs)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args)
        name = next(
            guard.owner_of(g).name
            for g in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(g, GuardedGrad)
        )
        raise UsageError(
            f"'{getattr(func, '__name__', func)}' cannot read the gradient of '{name}', which is "
            "sharded: use shardwise.clip_grad_norm_ to clip, or shardwise.full_grads(model) for "
            "its values."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Gradient of {guard.owner_of(self).name!r}, shape {tuple(self.shape)}: not gathered"

    def __deepcopy__(self, memo: Any) -> Any:
        raise guard.refuse_copy(f"gradient of {guard.owner_of(self).name}")


_GET_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_GRAD_HARMLESS = {torch.Tensor.detach_, torch.Tensor.requires_grad_}
_GRAD_ELEMENTWISE = {
    getattr(torch.Tensor, name) for name in "mul_ div_ zero_ clamp_ nan_to_num_ neg_".split()
} | {
    getattr(torch, name)
    for name in "_foreach_mul_ _foreach_div_ _foreach_zero_ _foreach_clamp_min_ "
    "_foreach_clamp_max_ _foreach_neg_".split()
}


def _all_numbers(operands: Any) -> bool:
    """Whether the other operands are numbers, which apply alike to all shards of a gradient."""
    return not any(
        isinstance(x, torch.Tensor) and x.dim() > 0
        for x in torch.utils._pytree.tree_leaves(operands)
    ) and not any(isinstance(x, (list, tuple)) for x in operands[0])


def _on_parts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Element-wise in-place arithmetic on gradients, done on this rank's shards."""
    target = args[0]
    many = isinstance(target, (list, tuple))
    with torch.no_grad():
        for parts in _parts(target if many else [target]):
            if many:
                func(parts, *args[1:], **kwargs)
                continue
            for part in parts:
                func(part, *args[1:], **kwargs)
    return None if many else target


def _parts(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The memory behind gradients: this rank's shards of guarded ones, ordinary ones whole.

    Yields everything that is in memory at once, then what rests on a disk, flat by flat.
    """
    homes: dict[Any, list[Any]] = {}
    whole: list[Tensor] = []
    for grad in grads:
        if isinstance(grad, GuardedGrad):
            for slot in guard.owner_of(grad).slots:
                slot.require_unspent()
                homes.setdefault(slot.flat, []).append(slot)
        else:
            whole.append(grad)
    with ExitStack() as stack:
        for home in [home for home in homes if home.grads.is_resident]:
            opened = stack.enter_context(open_grads(home, writes=True))
            whole += [part for slot in homes.pop(home) for part in opened.of(slot)]
        if whole:
            yield whole
    for home, slots in homes.items():
        with open_grads(home, writes=True) as opened:
            if parts := [part for slot in slots for part in opened.of(slot)]:
                yield parts


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's unscaling and check: an overflow on one rank counts on all ranks."""
    for parts in _parts(grads):
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inv_scale)
    owner = next(guard.owner_of(g) for g in grads if isinstance(g, GuardedGrad))
    found_inf.copy_(owner.highest(found_inf).view(found_inf.shape))
