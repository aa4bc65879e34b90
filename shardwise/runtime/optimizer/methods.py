"""Wraps methods of the user's optimizer, on that object only."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.surface import grads


def wrap(runtime: Runtime, optimizer: Optimizer, recover: Callable[[], None]) -> None:
    """Shadows ``step``, ``zero_grad`` and ``add_param_group``; ``runtime.removers`` undo it.

    ``recover`` ends a step that raised.
    """
    add = _checked_add(runtime, optimizer.add_param_group)
    _shadow(runtime, optimizer, "step", _guarded_step(optimizer.step, recover))
    _shadow(runtime, optimizer, "zero_grad", _forgetting(runtime, optimizer.zero_grad, recover))
    _shadow(runtime, optimizer, "add_param_group", add)


def check_groups(runtime: Runtime, groups: list[dict[str, Any]]) -> None:
    """Raises if a group lists a parameter on meta that is not in the model."""
    known = {face.parameter for face in runtime.faces}
    for group in groups:
        for parameter in group["params"]:
            if parameter not in known and getattr(parameter, "is_meta", False):
                raise UsageError(
                    "The optimizer has a parameter on the meta device that is not in the "
                    "model; build the optimizer from model.parameters()."
                )


def _guarded_step(step: Callable[..., Any], recover: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(step)  # schedulers set attributes on it
    def guarded(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        recover()
        try:
            return step(*args, **kwargs)
        finally:
            recover()  # nothing to do unless step raised

    return guarded


def _forgetting(
    runtime: Runtime, zero_grad: Callable[..., Any], recover: Callable[[], None]
) -> Callable[..., Any]:
    @functools.wraps(zero_grad)
    def forgetting(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        recover()
        result = zero_grad(*args, **kwargs)
        # So that the memory of dropped gradients is free in forward. A backward that an exception
        # left unfinished still has to be finished, which notices what was dropped meanwhile; and
        # after updates in a backward the next forward reports the step that was skipped.
        unfinished = runtime.in_pass or runtime.backward.active or runtime.steps.half_updated
        if not unfinished:
            grads.read(runtime)
        return result

    return forgetting


def _checked_add(runtime: Runtime, add: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    @functools.wraps(add)
    def checked(_: Optimizer, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        if not isinstance(params, torch.Tensor):
            params = list(params)  # may be a generator
        frozen = {face.parameter: face for face in runtime.faces if not face.slots[0].is_trained}
        for item in [params] if isinstance(params, torch.Tensor) else params:
            parameter: Any = item[1] if isinstance(item, tuple) else item
            face = frozen.get(parameter)
            if face is not None:
                raise UsageError(
                    f"'{face.name}' was frozen when the model was sharded and has no gradient "
                    "memory; shardwise.unshard(model), unfreeze it and shard again."
                )
        add({**param_group, "params": params})

    return checked


def _shadow(
    runtime: Runtime, optimizer: Optimizer, name: str, function: Callable[..., Any]
) -> None:
    """Shadows a method on this object; undone later, unless somebody wrapped it again."""
    attributes = optimizer.__dict__
    before = attributes.get(name)
    # A bound method: schedulers that wrap step look for its function.
    method = attributes[name] = types.MethodType(function, optimizer)

    def restore() -> None:
        if attributes.get(name) is method:
            del attributes[name]
            if before is not None:
                attributes[name] = before

    runtime.removers.append(restore)


def run_closure(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Runs a closure while groups list parameters; the step then only returns its loss."""
    closure: Callable[[], Any] | None = kwargs.get("closure") or (
        args[1] if len(args) > 1 else None
    )
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    done = lambda: loss  # noqa: E731
    if kwargs.get("closure"):
        return args, {**kwargs, "closure": done}
    return (args[0], done, *args[2:]), kwargs
