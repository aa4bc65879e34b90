"""From a history to values: runs exactly the operations that a tensor depends on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import UsageError
from shardwise.device.abilities import forked_random
from shardwise.model.deferred.history import Layout, Lost, Op, Ref
from shardwise.model.deferred.lookup import require
from shardwise.model.deferred.operators import leaves, map_leaves, plain_torch, tensors_in

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


def materialize(
    tensor: Tensor,
    *,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    allocate: Callable[[int], torch.UntypedStorage] | None = None,
) -> Tensor:
    """The values of a deferred tensor: detached, contiguous, on `device`.

    Args:
        seed: replaces the seed of the context, so that all ranks can use rank 0's.
        allocate: allocates zeroed memory for the tensor, instead of torch.
    """
    with plain_torch():
        found = require(tensor)
        target = torch.empty(0, device=device).device  # a type alone gets the current index
        with forked_random(target):
            values = _Replay(target, seed, allocate).run(found.ref)
        return values.to(tensor.dtype)


def recorded_ops(tensor: Tensor) -> list[str]:
    """The operations that `materialize` would run, in order."""
    with plain_torch():
        return [
            str(getattr(op.func, "_overloadpacket", op.func.__name__))
            for op in _slice(require(tensor).ref)
        ]


def _slice(ref: Ref) -> list[Op]:
    """The operations that a tensor depends on, in the order in which they were recorded."""
    ops: dict[int, Op] = {}
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
    """The storages of one replay; each is released after its last use."""

    def __init__(
        self,
        device: torch.device,
        seed: int | None,
        allocate: Callable[[int], torch.UntypedStorage] | None,
    ) -> None:
        self.device = device
        self.seed = seed
        self.allocate = allocate
        self.storages: dict[int, torch.UntypedStorage] = {}

    def run(self, target: Ref) -> Tensor:
        ops = _slice(target)
        if blind := next((op for op in ops if leaves(Lost, op.args, op.kwargs)), None):
            raise UsageError(
                f"a deferred tensor of shape {tuple(target.layout.size)} depends through "
                f"{blind.func} on a meta tensor without values: give that one values, or "
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

    def _move(self, op: Op, last_use: dict[int, Op]) -> bool:
        """Let a copy take over its source's memory if the source is not needed any more."""
        if op.func not in _COPIES:
            return False
        source, output = op.args[0], op.outputs[0]
        if not isinstance(source, Ref) or output is None or source.layout != output.layout:
            return False
        if last_use.get(source.key) is not op:
            return False
        self._window(source)
        self.storages[output.key] = self.storages.pop(source.key)
        return True

    def _execute(self, op: Op) -> None:
        args, kwargs = map_leaves(self._real, (op.args, op.kwargs))
        if "device" in kwargs:
            kwargs["device"] = self.device
        if op.stream:
            op.stream.reseed(self.device, self.seed)
        result = op.func(*args, **kwargs)
        for ref, output in zip(op.outputs, tensors_in(result), strict=False):
            if ref is None:
                continue
            if Layout.of(output) == ref.layout:
                self.storages[ref.key] = output.untyped_storage()
            else:  # strides of the real kernel may differ from those of the meta kernel
                self._window(ref).copy_(output)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self._window(leaf)
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return leaf.to(self.device)
        return leaf

    def _blank(self, nbytes: int, *, filled: bool) -> torch.UntypedStorage:
        if self.allocate is not None:
            return self.allocate(nbytes)
        # Memory that was never written has zeros, so that all ranks have the same values.
        make = torch.empty if filled else torch.zeros
        return make(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def _window(self, ref: Ref) -> Tensor:
        nbytes, dtype, size, stride, offset, is_conj, is_neg = ref.layout
        if ref.key not in self.storages:
            self.storages[ref.key] = self._blank(nbytes, filled=ref.filled)
        window = torch.empty(0, dtype=dtype, device=self.device)
        window = window.set_(self.storages[ref.key], offset, size, stride)
        window = torch._neg_view(window) if is_neg else window
        return window.conj() if is_conj else window
