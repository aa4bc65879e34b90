"""Outputs of tiled layers that have not been read yet, and their cross entropy tile by tile.

[Note: Unread projections]
A language model's logits are often its largest activation, and training only computes a loss from
them. So in training a tiled projection outside all blocks returns a tensor with a shape and a
dtype, but without values. What models do before the loss (change leading dimensions and the dtype)
is done to the projection's input instead. ``F.cross_entropy`` then computes one tile after another:
each yields a few numbers per row, and is computed again in backward. Any other operation that reads
such a tensor gets its values, with gradients, by computing the whole projection.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import once_differentiable

from shardwise.core.errors import UsageError
from shardwise.model.tiling import Tile, Whole, check_range, embedding, linear, own_entries, rows_of

_PROPERTIES = "shape dtype device requires_grad is_leaf grad_fn ndim layout is_cpu is_cuda is_meta"
_METHODS = "size numel nelement dim ndimension is_floating_point is_complex __len__"
_SHAPES = "view reshape flatten contiguous unsqueeze squeeze"
_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


@dataclass(frozen=True)
class Projected:
    """A projection that has not been computed: its input, its weight, and how."""

    tiles: list[Tile]
    x: Tensor
    version: int
    """The version of ``x`` when the layer was called; every write to it increases it."""
    bias: nn.Parameter | None
    around: Callable[[], AbstractContextManager[None]]
    """Entered while tiles are computed."""
    autocast: torch.dtype | None
    """The dtype of autocast, if it was on when the layer was called."""
    casts: tuple[torch.dtype, ...] = ()
    """Dtypes to which the output is converted, one after the other."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.tiles[-1].stop))

    @property
    def dtype(self) -> torch.dtype:
        return self.casts[-1] if self.casts else self.autocast or self.x.dtype

    @property
    def requires_grad(self) -> bool:
        tensors = (self.x, self.bias, *(tile.weight for tile in self.tiles))
        return any(t is not None and t.requires_grad for t in tensors)

    def compute(self) -> Tensor:
        """Compute the whole output."""
        with self.as_called():
            return _cast(linear(self.tiles, self.x, self.bias), self.casts)

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Inside, tiles can be computed, with autocast as it was when the layer was called."""
        self.check()
        on = self.autocast is not None
        with torch.autocast(self.x.device.type, dtype=self.autocast, enabled=on), self.around():
            yield

    def check(self) -> None:
        """Raise if the input was changed since the layer was called."""
        if self.x._version != self.version:
            raise UsageError(
                "The input of a tiled projection was changed in place before its logits, which "
                "are computed with their loss, were used; set tiling.loss = false in the plan."
            )

    def of(self, x: Tensor) -> "Projected":
        """The same projection of another view of the input."""
        self.check()
        return replace(self, x=x, version=x._version)


def _cast(value: Tensor, casts: tuple[torch.dtype, ...]) -> Tensor:
    for dtype in casts:
        value = value.to(dtype)
    return value


class _Unread(torch.autograd.Function):
    """Puts an unread projection into the graph, where no gradient may ever reach it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, projected: Projected) -> Tensor:
        nothing = torch.full((), math.nan, dtype=projected.dtype, device=projected.x.device)
        return nothing.expand(projected.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise UsageError(
            "The logits of a tiled projection were used by an operation that shardwise cannot "
            "intercept (a custom autograd function?), so they were never computed; set "
            "tiling.loss = false in the plan."
        )


_unread: Callable[[Tensor, Projected], Tensor] = _Unread.apply


class Unread(torch.Tensor):
    """See [Note: Unread projections]."""

    projected: Projected

    @staticmethod
    def output(
        tiles: list[Tile],
        x: Tensor,
        bias: nn.Parameter | None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> "Unread":
        """The tensor that a layer returns instead of its output."""
        kind = x.device.type
        on = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if on else None
        return Unread.of(Projected(tiles, x, x._version, bias, around, dtype))

    @staticmethod
    def of(projected: Projected) -> "Unread":
        # One real number, even under fake tensors, because those cannot be of another class.
        with torch._C.DisableTorchFunctionSubclass(), unset_fake_temporarily():
            anchor = torch.zeros((), requires_grad=projected.requires_grad)
            unread = _unread(anchor, projected).as_subclass(Unread)
        assert isinstance(unread, Unread)
        unread.projected = projected
        return unread

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(args[0], cls):
            _refuse_changes(getattr(func, "__name__", ""))
            special = _SPECIAL.get(func)
            if special is not None and (found := special(func, *args, **kwargs)) is not None:
                return found
        args, kwargs = read((args, kwargs))
        return func(*args, **kwargs)


def _refuse_changes(name: str) -> None:
    """Refuse writes to values that do not exist, and hooks on their gradient.

    Computing and changing the values now would not change other views of the same logits.
    """
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    if in_place or name in ("__setitem__", "__set__", "register_hook", "retain_grad"):
        raise UsageError(
            f"'{name}' on the logits of a tiled projection would have no effect, because they are "
            "computed tile by tile with their loss; set tiling.loss = false in the plan."
        )


def read(values: Any) -> Any:
    """Nested values with every unread projection in them computed; without one, the same object."""

    def computed(value: Any) -> Any:
        return value.projected.compute() if isinstance(value, Unread) else value

    if not any(isinstance(leaf, Unread) for leaf in torch.utils._pytree.tree_leaves(values)):
        return values
    return torch.utils._pytree.tree_map(computed, values)


def in_tiles(
    whole: Whole,
    layer: nn.Module,
    input: Tensor,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """The output of a layer whose weight is cut into tiles."""
    input = read(input)
    if isinstance(layer, nn.Embedding):
        return embedding(whole.tiles, input, layer.padding_idx)
    assert isinstance(layer, nn.Linear)
    wants_loss = any(layer is other for other in whole.wants_loss)
    if wants_loss and layer.training and torch.is_grad_enabled():
        return Unread.output(whole.tiles, input, layer.bias, around)
    return linear(whole.tiles, input, layer.bias)


# --- what is done to the input instead ------------------------------------------------------------


def _reshaped(func: Callable[..., Any], unread: Unread, *args: Any, **kwargs: Any) -> Unread | None:
    """Change leading dimensions: rows keep their order, so the input is reshaped instead."""
    projected = unread.projected
    like = func(torch.empty(projected.shape, device="meta"), *args, **kwargs).shape
    if like[-1:] != projected.shape[-1:]:
        return None
    return Unread.of(projected.of(projected.x.reshape(*like[:-1], projected.x.shape[-1])))


def _indexed(func: Callable[..., Any], unread: Unread, index: Any) -> Unread | None:
    """Select rows; None if the index cuts the last dimension, so that values must be read."""
    projected = unread.projected
    items = index if isinstance(index, tuple) else (index,)
    if not all(type(item) in (int, slice, type(...)) for item in items):
        return None
    if ... in items:
        at = items.index(...)
        skipped = projected.x.dim() - (len(items) - 1)
        items = (*items[:at], *[slice(None)] * skipped, *items[at + 1 :])
    if len(items) > projected.x.dim():
        return None
    if len(items) == projected.x.dim() and items[-1] != slice(None):
        return None
    return Unread.of(projected.of(projected.x[items]))


def _converted(func: Callable[..., Any], unread: Unread, *args: Any, **kwargs: Any) -> Any:
    projected = unread.projected
    dtype = _CASTS.get(func)
    if dtype is None:
        if kwargs.pop("copy", None) or (args and isinstance(args[0], torch.Tensor)):
            return None
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and torch.device(device).type != projected.x.device.type:
            return None
    if dtype is None or dtype == projected.dtype:
        return unread
    casts = (*(projected.casts or (projected.dtype,)), dtype)
    return Unread.of(replace(projected, casts=casts))


# --- cross entropy --------------------------------------------------------------------------------


def _cross_entropy(
    func: Callable[..., Any],
    unread: Unread,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy`` of rows with class indices; in all other cases the logits are read."""
    projected = unread.projected
    usual = weight is None and size_average is None and reduce is None
    rows = projected.x.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if not usual or not rows or len(target) != len(projected.x) or not len(target):
        return None
    counts = target != ignore_index
    target = torch.where(counts, target, 0)
    check_range(target, projected.shape[-1], "Target is out of bounds.")
    losses = _row_losses(projected, target, label_smoothing)
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


def _row_losses(projected: Projected, target: Tensor, smoothing: float) -> Tensor:
    def summary(weight: Tensor, *inputs: Tensor | None) -> Any:
        return _summary(weight, *inputs, projected.casts, bool(smoothing))

    found = []
    with projected.as_called():
        for tile in projected.tiles:
            inside, own = own_entries(tile, target)
            bias = rows_of(projected.bias, tile)
            found.append(tile.run(summary, projected.x, bias, inside, own))
    normalisers, targets, sums = (
        torch.stack(values, dim=-1) for values in zip(*found, strict=True)
    )
    normaliser = normalisers.logsumexp(dim=-1)
    losses = normaliser - targets.sum(dim=-1)
    if not smoothing:
        return losses
    mean = sums.sum(dim=-1) / projected.shape[-1]
    return (1 - smoothing) * losses + smoothing * (normaliser - mean)


class _Summary(torch.autograd.Function):
    """What the cross entropy needs from one tile's logits: three numbers per row.

    The logits are computed again in backward: saving them for all tiles would take the memory that
    tiles save.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        inside: Tensor,
        own: Tensor,
        casts: tuple[torch.dtype, ...],
        sums: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw = F.linear(x, weight, bias)
        logits = _cast(raw, casts)
        normaliser = logits.logsumexp(dim=-1)
        at_target = torch.where(inside, logits.gather(-1, own.unsqueeze(-1)).squeeze(-1), 0)
        ctx.save_for_backward(weight, x, bias, inside, own, normaliser)
        ctx.casts, ctx.dtype = casts, raw.dtype
        ctx.set_materialize_grads(False)
        return normaliser, at_target, logits.sum(dim=-1) if sums else normaliser.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_normaliser: Tensor, by_target: Tensor, by_sum: Tensor | None) -> Any:
        weight, x, bias, inside, own, normaliser = ctx.saved_tensors
        # In autocast's dtype, if it was on in forward: it is off in backward.
        cast_x, cast_weight = x.to(ctx.dtype), weight.to(ctx.dtype)
        cast_bias = None if bias is None else bias.to(ctx.dtype)
        grad = _cast(F.linear(cast_x, cast_weight, cast_bias), ctx.casts)
        grad = grad.sub_(normaliser.unsqueeze(-1)).exp_().mul_(by_normaliser.unsqueeze(-1))
        grad.scatter_add_(-1, own.unsqueeze(-1), torch.where(inside, by_target, 0).unsqueeze(-1))
        if by_sum is not None:
            grad += by_sum.unsqueeze(-1)
        for dtype in reversed((ctx.dtype, *ctx.casts[:-1])):
            grad = grad.to(dtype)
        wants_weight, wants_x, wants_bias = ctx.needs_input_grad[:3]
        return (
            (grad.mT @ cast_x).to(weight.dtype) if wants_weight else None,
            (grad @ cast_weight).to(x.dtype) if wants_x else None,
            grad.sum(dim=0).to(bias.dtype) if wants_bias else None,
            *[None] * 4,
        )


_summary: Callable[..., Any] = _Summary.apply


def _metadata() -> set[Callable[..., Any]]:
    found = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()}
    return found | {getattr(torch.Tensor, name) for name in _METHODS.split()}


_METADATA = _metadata()
_SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch.Tensor, name): _reshaped for name in _SHAPES.split()},
    torch.flatten: _reshaped,
    torch.reshape: _reshaped,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.to: _converted,
    **dict.fromkeys(_CASTS, _converted),
    F.cross_entropy: _cross_entropy,
}
