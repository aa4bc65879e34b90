"""Hooks around a module's forward: they also run after an exception, and cannot be copied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import guard


def hook_forward(
    runtime: Runtime, module: nn.Module, pre: Callable[..., Any], post: Callable[..., Any]
) -> None:
    """Registers ``pre`` and ``post`` around a module's forward; ``runtime.removers`` undo it."""
    name = type(module).__name__
    handles = (
        module.register_forward_pre_hook(_Hook(pre, name), with_kwargs=True),
        # Also after an exception: a pass that failed must not look as if it were still running.
        module.register_forward_hook(_Hook(post, name), always_call=True),
    )
    runtime.removers += [handle.remove for handle in handles]


class _Hook:
    """A hook that cannot be copied, so its module cannot either: the copy's hooks would gather
    and reduce the original's units."""

    def __init__(self, function: Callable[..., Any], module: str) -> None:
        self._function, self._module = torch.compiler.disable(function), module

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: object) -> None:
        raise guard.refuse_copy(self._module)

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]


def disable_autocast_cache(runtime: Runtime, module: nn.Module) -> None:
    """Autocast's cache would keep a full copy of every weight that it casts, defeating sharding.

    Done per unit and not only for the model, because a forward may enter autocast itself.
    """
    before: list[bool] = []

    def pre(module: nn.Module, args: Any, kwargs: Any) -> None:
        before.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)

    def post(module: nn.Module, args: Any, output: Any) -> None:
        if before:
            torch.set_autocast_cache_enabled(before.pop())

    def forget() -> None:
        if before:
            torch.set_autocast_cache_enabled(before[0])
            before.clear()

    hook_forward(runtime, module, pre, post)
    runtime.forgets.append(forget)
