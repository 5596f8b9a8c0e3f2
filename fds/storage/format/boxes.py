"""Boxes: rectangular pieces of a leaf, flat ranges of their elements, and copies from one range to another.

A rectangle is a box whose elements lie one after another in memory. The elements of a flat range of a box make a few
of them: rest of a row, whole rows, beginning of a row, along every dim. What a rank holds of a leaf may be ranges of
every dim, and so a box for each choice of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from fds.layout import Box

Placed = tuple[int, Box]  # index in the flat range of a rectangle's first element, and where it is in the leaf
Ranges = tuple[tuple[tuple[int, int], ...], ...]  # by dim, one after another: a first index, and how many


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is all of a leaf."""
    return tuple((0, n) for n in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(n for _, n in box)


def numel(box: Box) -> int:
    """Return the number of a box's elements."""
    return math.prod(sizes(box))


def rectangles(box: Box, start: int, end: int) -> list[Placed]:
    """Return the rectangles of elements `start` to `end` of the flattened box, in order.

    >>> rectangles(((0, 3), (4, 2)), 1, 6)
    [(0, ((0, 1), (5, 1))), (1, ((1, 2), (4, 2)))]
    """
    placed, at = [], 0
    for inside in _rectangles(sizes(box), start, end):
        rectangle = tuple((first + low, n) for (first, _), (low, n) in zip(box, inside, strict=True))
        placed.append((at, rectangle))
        at += numel(rectangle)
    return placed


def _rectangles(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    if start >= end:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (first, low), (last, high) = divmod(start, inner), divmod(end, inner)
    if first == last:
        yield from (((first, 1), *rest) for rest in _rectangles(shape[1:], low, high))
        return
    if low:
        yield from (((first, 1), *rest) for rest in _rectangles(shape[1:], low, inner))
        first += 1
    if first < last:
        yield ((first, last - first), *whole(shape[1:]))
    if high:
        yield from (((last, 1), *rest) for rest in _rectangles(shape[1:], 0, high))


def shape_at(ranges: Ranges) -> tuple[int, ...]:
    """Return the shape of what lies at ranges of every dim, put together."""
    return tuple(sum(n for _, n in along) for along in ranges)


def index_of(ranges: Ranges, index: Sequence[int]) -> list[int]:
    """Return where an element of what lies at ranges of every dim is in the leaf.

    >>> index_of((((0, 2), (6, 2)),), [3])
    [7]
    """
    each = zip(ranges, index, strict=True)
    return [next(itertools.islice(itertools.chain(*(range(f, f + n) for f, n in along)), i, None)) for along, i in each]


def by_box(flat: Tensor, ranges: Ranges, start: int) -> Iterator[tuple[Box, int, Tensor]]:
    """Yield elements of the flattened whole of what lies at ranges of every dim, from `start` on, by box of the leaf.

    Yields (box, index in the flattened box of the first of these elements, view of them); they follow one another in
    the flattened box.

    >>> import torch
    >>> for box, start, x in by_box(torch.arange(3, 8), (((0, 2),), ((0, 3), (9, 1))), 3):
    ...     print(box, start, x.tolist())
    ((0, 2), (0, 3)) 3 [[4, 5, 6]]
    ((0, 2), (9, 1)) 0 [[3]]
    ((0, 2), (9, 1)) 1 [[7]]
    """
    all_of_it = whole(shape_at(ranges))
    placed, before = (rectangles(all_of_it, i, j) for i, j in ((start, start + len(flat)), (0, start)))
    along = [zip(part, itertools.accumulate((n for _, n in part), initial=0), strict=False) for part in ranges]
    for choice in itertools.product(*along):
        box, inside = tuple(part for part, _ in choice), tuple((first, n) for (_, n), first in choice)
        at = sum(numel(both) for _, part in before if (both := common(part, inside)) is not None)
        for first, part in placed:
            if (both := common(part, inside)) is not None:
                yield box, at, view(flat, first, part, both)
                at += numel(both)


def common(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share, None where they share no element."""
    shared = tuple((max(i, j), min(i + n, j + m) - max(i, j)) for (i, n), (j, m) in zip(a, b, strict=True))
    return None if any(n <= 0 for _, n in shared) else shared


def shares(a: Sequence[Placed], b: Sequence[Placed]) -> bool:
    """Return whether two flat ranges have an element in common."""
    return any(common(x, y) is not None for _, x in a for _, y in b)


def copy_common(out: Tensor, wanted: Sequence[Placed], x: Tensor, placed: Sequence[Placed]) -> int:
    """Copy what two flat ranges have in common from `x` to `out`, both (length,); return the number of elements."""
    count = 0
    for at, a in wanted:
        for origin, b in placed:
            both = common(a, b)
            if both is not None:
                view(out, at, a, both).copy_(view(x, origin, b, both))
                count += numel(both)
    return count


def view(flat: Tensor, at: int, rectangle: Box, inside: Box) -> Tensor:
    """Return the view of a box inside a rectangle that lies at `at` in a flat tensor."""
    x = flat[at : at + numel(rectangle)].view(sizes(rectangle))
    return x[tuple(slice(i - first, i - first + n) for (first, _), (i, n) in zip(rectangle, inside, strict=True))]


def extent(shape: Sequence[int], rectangle: Box) -> tuple[int, int]:
    """Return the index in the flattened leaf of a rectangle's first element, and of the one after its last."""
    strides = _strides(shape)
    first = sum(i * s for (i, _), s in zip(rectangle, strides, strict=True))
    return first, first + sum((n - 1) * s for (_, n), s in zip(rectangle, strides, strict=True)) + 1


def runs(shape: Sequence[int], placed: Iterable[Placed]) -> Iterator[tuple[int, int, int]]:
    """Yield (index in the flattened leaf, index in the flat range, length) of what is consecutive in both.

    >>> list(runs((3, 4), rectangles(((1, 2), (2, 2)), 0, 4)))
    [(6, 0, 2), (10, 2, 2)]
    """
    strides = _strides(shape)
    for at, rectangle in placed:
        dim, length = len(shape), 1
        while dim and rectangle[dim - 1] == (0, shape[dim - 1]):
            dim, length = dim - 1, length * shape[dim - 1]
        if dim:  # what is cut along this dim alone is still consecutive
            dim, length = dim - 1, length * rectangle[dim - 1][1]
        inner = sum(i * s for (i, _), s in zip(rectangle[dim:], strides[dim:], strict=True))
        for index in itertools.product(*(range(i, i + n) for i, n in rectangle[:dim])):
            yield inner + sum(i * s for i, s in zip(index, strides[:dim], strict=True)), at, length
            at += length


def apart(boxes: Iterable[Box]) -> bool:
    """Return whether boxes of one leaf are cells of a grid: along every dim equal, or without a common index."""
    for along in zip(*boxes, strict=True):
        ordered = sorted(set(along))
        if any(i + n > j for (i, n), (j, _) in itertools.pairwise(ordered)):
            return False
    return True


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]
