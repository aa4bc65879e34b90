"""Which optimizers can run on shards, and which of torch's kernels they use."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.device.abilities import HOST

_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop",
    "Rprop", "Adagrad", "Adadelta", "Adamax", "ASGD",
)  # fmt: skip
_REFUSED = {
    "Adafactor": "it factors second moments over the rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "it needs inner products over all parameters and evaluates the loss itself",
    "SparseAdam": "it needs sparse gradients of whole matrices",
}


def check_elementwise(optimizer: Optimizer, assume: bool) -> None:
    """Refuses optimizers whose update of an element depends on other elements."""
    kind = type(optimizer)
    for base in kind.__mro__:
        if reason := _REFUSED.get(base.__name__):
            raise UsageError(
                f"{kind.__name__} cannot run on shards of parameters: {reason}; use an "
                f"element-wise optimizer ({', '.join(_ELEMENTWISE)})."
            )
    if not assume and not _is_known(kind):
        raise UsageError(
            f"shardwise does not know whether {kind.__name__} updates every element on its own; "
            "if it does, pass elementwise=True to shardwise.shard."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError("A differentiable optimizer cannot be sharded; omit differentiable=True.")


def _is_known(kind: Any) -> bool:
    """Whether its step is that of one of torch's element-wise classes."""
    for base in kind.__mro__:
        if base.__name__ in _ELEMENTWISE and base.__module__.startswith("torch.optim"):
            # torch wraps the step of every instantiated class: compare the functions inside.
            return inspect.unwrap(kind.step) is inspect.unwrap(base.step)
    return False


def fused_options(
    group: dict[str, Any], parts: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Selects torch's fused kernel where there is one and the user made no choice."""
    chosen = group.get("foreach") is not None or group.get("fused") is not None
    if "fused" not in group or chosen or group.get("capturable"):
        return {}
    same_kind = len({(p.device.type, p.is_floating_point()) for p in parts}) <= 1
    if not (same_kind and all(p.is_floating_point() for p in parts)):
        return {}
    moving = [state for part, state in zip(parts, states, strict=True) if part.grad is not None]
    if len({state.get("momentum_buffer") is None for state in moving}) > 1:
        return {}  # fused SGD cannot create some momentum buffers while others exist
    return {"fused": True}


def place_counters(
    group: dict[str, Any], parts: Sequence[torch.Tensor], states: Mapping[Any, dict[str, Any]]
) -> None:
    """Puts step counters where the group's kernels expect them: torch's fused and capturable ones
    count on the device of the shard, and a counter that was loaded may be anywhere.

    Others keep them as they are, as torch does; a counter on another device than the CPU or the
    shard's would not do.
    """
    for part in parts:
        state = states.get(part, {}) if part.numel() else {}
        step = state.get("step")
        if not isinstance(step, torch.Tensor) or step.device == part.device:
            continue
        if group.get("fused") or group.get("capturable"):
            state["step"] = step.to(part.device, torch.float32)
        elif step.device != HOST:
            state["step"] = step.to(HOST)


def step_on(optimizer: Optimizer, pieces: dict[nn.Parameter, nn.Parameter]) -> None:
    """Runs the optimizer's step with pieces in its groups, without any hooks."""
    saved = []
    for group in optimizer.param_groups:
        chosen = [pieces[p] for p in group["params"] if p in pieces]
        options = fused_options(group, chosen, [optimizer.state.get(p, {}) for p in chosen])
        before = {key: group[key] for key in ("params", *options)}
        saved.append((group, before))
        group.update(options, params=chosen)
        place_counters(group, chosen, optimizer.state)
    try:
        with torch.no_grad():
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    finally:
        for group, before in saved:
            group.update(before)
