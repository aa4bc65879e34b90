"""Boxes: how an interval of a flattened tensor is written in the tensor's own dimensions.

A rank owns an interval of a parameter's elements, in row-major order. Torch's distributed
checkpoints know boxes (offsets and sizes per dimension), and an interval of an n-dimensional tensor
is at most 2n-1 of them: the end of a row, whole rows, the beginning of a row, and the same inside
the broken rows. Each of these boxes is again one run of elements. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

LARGEST_BYTES = 1 << 28
"""Larger runs are cut: other readers load a whole box into memory, and zip's 32 bits suffice."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor; of a scalar both are empty."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of the elements from ``start`` to ``stop``, in their order.

    >>> [(box.offsets, box.sizes) for box in boxes((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    inner = shape[1:]
    width = prod(inner)
    (first, after), (last, before) = divmod(start, width), divmod(stop, width)
    if first == last:
        yield from _in_row(first, boxes(inner, after, before))
        return
    if after:
        yield from _in_row(first, boxes(inner, after, width))
        first += 1
    if last > first:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    if before:
        yield from _in_row(last, boxes(inner, 0, before))


def _in_row(row: int, inside: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.offsets), (1, *box.sizes)) for box in inside)


def pieces(shape: tuple[int, ...], start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Cuts an interval into runs of about ``most`` elements, where possible between rows.

    >>> list(pieces((4, 3), 2, 12, 4)), list(pieces((9,), 0, 9, 4))
    ([(2, 6), (6, 9), (9, 12)], [(0, 4), (4, 8), (8, 9)])
    """
    width = prod(shape[1:]) if len(shape) > 1 else 1
    while start < stop:
        end = min(start + max(1, most), stop)
        if end < stop and end // width * width > start:
            end = end // width * width
        yield start, end
        start = end


def box_of(shape: tuple[int, ...], start: int, stop: int) -> Box:
    """The box of a run that is exactly one box."""
    (box,) = boxes(shape, start, stop)
    return box


def runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int, int]]:
    """The runs of a box of any kind: the first element in the tensor and in the box, and how many.

    >>> list(runs((4, 3), Box((1, 1), (2, 2)))), list(runs((4, 3), Box((1, 0), (2, 3))))
    ([(4, 0, 2), (7, 2, 2)], [(3, 0, 6)])
    """
    split = len(shape)
    while split > 0 and box.sizes[split - 1] == shape[split - 1]:
        split -= 1
    split = max(0, split - 1)  # dimensions from here on are one run
    length = prod(box.sizes[split:])
    if not length:
        return
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    inner = sum(o * s for o, s in zip(box.offsets[split:], strides[split:], strict=True))
    for number in range(prod(box.sizes[:split])):
        rest, at = number, inner
        for axis in reversed(range(split)):
            rest, place = divmod(rest, box.sizes[axis])
            at += (box.offsets[axis] + place) * strides[axis]
        yield at, number * length, length
