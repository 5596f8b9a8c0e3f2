"""Flat buckets: the layout of a tree's leaves in a few 1-D buffers, of which every rank owns one slice.

A bucket of `num_ranks` slices of `length` elements holds whole parameters one after another, each starting at a
multiple of `ALIGN` elements, gaps filled with zeros. Slice r is elements r * length to (r + 1) * length; a parameter
may lie in several slices, unless the optimizer needs it whole.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import StateError

# The default size of a bucket: one SHARE-th of all bytes, within bounds.
SHARE, LEAST_BYTES, MOST_BYTES = 16, 2**20, 32 * 2**20
ALIGN = 32  # elements, 64 bytes in 16 bit; at other addresses matrix products round differently on a CPU


Box = tuple[tuple[int, int], ...]  # a rectangular piece of a tensor: by dim its first index, and how many


class PieceOf(Protocol):
    """A rank's piece of a parameter; all ranks that hold pieces of it call these together."""

    def whole(self, x: Tensor) -> Tensor:
        """Return the whole of which every rank has a piece `x`, of the shape of its piece of the parameter."""
        ...

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's piece of a whole."""
        ...


@attrs.frozen(eq=False)  # segments are dict keys in every step; comparing their fields would cost 0.5 us each
class Segment:
    """The position of one parameter in a flat slice.

    Attributes:
        name: dotted parameter name.
        shape: of the whole parameter.
        offset: index in the slice of its first element there.
        length: number of its elements in the slice: all, some, or none where it is split over ranks.
        start: index in the flattened parameter of its first element in the slice.
        piece: of an optimizer that needs whole parameters and takes pieces, which one this is, where ranks hold pieces:
            `shape` is then that of the piece.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    length: int
    start: int = 0
    piece: PieceOf | None = None

    def of(self, flat: Tensor) -> Tensor:
        """Return the view (length,) of `flat` that holds this parameter.

        >>> Segment("bias", (2,), 1, 2).of(torch.arange(4))
        tensor([1, 2])
        """
        return flat[self.offset : self.offset + self.length]


@attrs.frozen
class Leaf:
    """What `plan` needs to know about one leaf: name, shape, dtype, and which leaves may share its bucket.

    Where ranks have pieces of different sizes, all of them put the same leaves together: by `most`, the elements of the
    largest piece; None where all have as many.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True
    kind: Hashable = None  # leaves of different kinds never share a bucket
    whole: bool = False  # it must lie in one slice
    unit: int = 1  # slices of its bucket hold a multiple of so many elements
    most: int | None = None

    @property
    def bound(self) -> int:
        """The number of elements on the ranks that have the largest piece."""
        return self.numel if self.most is None else self.most

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@attrs.frozen
class Bucket:
    """One buffer: `num_ranks` slices of `length` elements, and the parameters in it with their offsets."""

    name: str
    leaves: tuple[Leaf, ...]
    offsets: tuple[int, ...]
    length: int
    num_ranks: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the masters."""
        return self.leaves[0].dtype

    @property
    def trained(self) -> bool:
        """Whether its parameters are trained."""
        return self.leaves[0].trained

    @property
    def numel(self) -> int:
        """Elements of the whole bucket, gaps included."""
        return self.length * self.num_ranks

    @functools.cached_property
    def bound(self) -> int:
        """The length of a slice on the ranks that have the largest pieces of its parameters."""
        largest = [attrs.evolve(leaf, shape=(leaf.bound,)) for leaf in self.leaves]
        return _bucket(self.name, largest, self.num_ranks).length

    def gaps(self) -> list[tuple[int, int]]:
        """Return the (start, end) of the padding."""
        ends = sorted((o, o + leaf.numel) for o, leaf in zip(self.offsets, self.leaves, strict=True))
        edges = [0, *itertools.chain.from_iterable(ends), self.numel]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters as views of the whole bucket (numel,), in the order of `leaves`."""
        return self.cut(flat)[0]

    def cut(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the whole bucket (numel,): the parameters in the order of `leaves`, and the gaps (n,)."""
        sizes, places, gaps = self._cuts
        parts = flat.split(sizes)  # one call takes half the host time of slicing each part
        views = [parts[i] if shape is None else parts[i].view(shape) for i, shape in places]
        return views, [parts[i] for i in gaps]

    @functools.cached_property
    def _cuts(self) -> tuple[list[int], list[tuple[int, tuple[int, ...] | None]], list[int]]:
        """Return the sizes of a bucket's pieces; the indices and shapes (None if 1-D) of parameters; those of gaps."""
        sizes, places, gaps, end = [], {}, [], 0
        for offset, i in sorted(zip(self.offsets, range(len(self.leaves)), strict=True)):
            if offset > end:
                gaps.append(len(sizes))
                sizes.append(offset - end)
            places[i], end = len(sizes), offset + self.leaves[i].numel
            sizes.append(self.leaves[i].numel)
        if self.numel > end:
            gaps.append(len(sizes))
            sizes.append(self.numel - end)
        shapes = [None if len(leaf.shape) == 1 else leaf.shape for leaf in self.leaves]
        return sizes, [(places[i], x) for i, x in enumerate(shapes)], gaps

    def slice(self, rank: int, flat: Tensor) -> Tensor:
        """Return the view (length,) of the whole bucket that `rank` owns."""
        return flat[rank * self.length : (rank + 1) * self.length]

    def segments(self, rank: int) -> list[Segment]:
        """Return the segments of all parameters in the slice of `rank`, in the same order for every rank."""
        low, high = rank * self.length, (rank + 1) * self.length
        segments = []
        for offset, leaf in zip(self.offsets, self.leaves, strict=True):
            start, end = max(offset, low), min(offset + leaf.numel, high)
            inside = end > start
            segments.append(
                Segment(
                    leaf.name,
                    leaf.shape,
                    start - low if inside else 0,
                    max(end - start, 0),
                    start - offset if inside else 0,
                )
            )
        return segments

    def fill(self, flat: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Write parameters into the whole bucket (numel,) and zeros into the padding, and return it."""
        for a, b in self.gaps():
            flat[a:b].zero_()
        for view, part in zip(self.views(flat), parts, strict=True):
            view.copy_(part)
        return flat


@attrs.frozen(cache_hash=True)
class Layout:
    """All buckets of a tree; every rank computes the same.

    `spec` is the structure of the user's tree, `names` the names of its leaves in order.
    """

    names: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    num_ranks: int
    spec: Any = attrs.field(repr=False)

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """By name, the index of a leaf's bucket, and its index among the bucket's leaves."""
        return {leaf.name: (i, j) for i, b in enumerate(self.buckets) for j, leaf in enumerate(b.leaves)}

    def collect(self, bucket_views: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return leaves in the order of `names` from the leaves of every bucket."""
        return [bucket_views[i][j] for i, j in map(self.places.__getitem__, self.names)]

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the user's tree with these leaves, in the order of `names`."""
        return tree.builder(self.spec)(leaves)


@tree.record
class Sharded:
    """A rank's part of a tree of parameters: its slice of every bucket, (length,) each, under the bucket's name."""

    buckets: dict[str, Tensor]
    layout: Layout = tree.static(repr=False)

    def __getitem__(self, name: Any) -> Any:
        """Raise `StateError`, since no rank has whole parameters."""
        raise StateError(
            "these parameters are sharded, and this rank has slices of them",
            where="state.params",
            got=f"state.params[{name!r}]",
            want="step.params(state), a copy of the whole tree",
            hint="all ranks call it",
        )


def plan(leaves: Sequence[Leaf], spec: Any, *, num_ranks: int, bucket_bytes: int | None) -> Layout:
    """Plan the buckets of a tree.

    Leaves with the same kind, dtype and trainability fill a bucket in order up to `bucket_bytes`. A layer is split
    between two buckets only if it is larger than one; a leaf larger than a bucket gets its own. Buckets of leaves that
    must be whole hold up to `num_ranks` times as much, so that every rank owns some.

    Args:
        leaves: of the tree, in order.
        spec: its structure.
        num_ranks: slices per bucket.
        bucket_bytes: bound of a bucket, in the dtype of the masters; None for `bucket_bytes_of` all leaves of a kind.
    """
    largest: dict[tuple, int] = {}  # by kind: ranks may lack leaves of one kind, which must not change the others
    total: dict[tuple, int] = {}
    for leaf in leaves:
        key, num_bytes = _shared_properties(leaf), _bytes([leaf])
        largest[key], total[key] = max(largest.get(key, 0), num_bytes), total.get(key, 0) + num_bytes
    open_: dict[tuple, list[Leaf]] = {}
    closed: list[list[Leaf]] = []
    for _, group in itertools.groupby(leaves, key=lambda leaf: layer_of(leaf.name)):
        parts: dict[tuple, list[Leaf]] = {}
        for leaf in group:
            parts.setdefault(_shared_properties(leaf), []).append(leaf)
        for key, part in parts.items():
            bound = bucket_bytes_of(total[key]) if bucket_bytes is None else bucket_bytes
            if key[-1]:  # whole parameters are balanced only if a bucket can hold one large one per rank
                bound = num_ranks * max(bound, largest[key])
            for piece in _pieces(part, bound):
                members = open_.get(key)
                if members is None or _bytes(members) + _bytes(piece) > bound:
                    open_[key] = members = []
                    closed.append(members)
                members.extend(piece)
    first = {leaf.name: i for i, leaf in enumerate(leaves)}
    closed.sort(key=lambda members: first[members[0].name])
    buckets = tuple(_bucket(f"{i:04d}", members, num_ranks) for i, members in enumerate(closed))
    return Layout(tuple(leaf.name for leaf in leaves), buckets, num_ranks, spec)


def bucket_bytes_of(num_bytes: int) -> int:
    """Return the default bound of a bucket, for leaves of `num_bytes` in total.

    >>> [bucket_bytes_of(n) for n in (10_000, 100_000_000, 10_000_000_000)]
    [1048576, 6250000, 33554432]
    """
    return min(max(num_bytes // SHARE, LEAST_BYTES), MOST_BYTES)


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its name up to the first number, or else up to the last dot.

    >>> [layer_of(n) for n in ("h.3.attn.weight", "0.weight", "embed.weight", "scale")]
    ['h.3', '0', 'embed', '']
    """
    words = name.split(".")
    number = next((i for i, word in enumerate(words[:-1]) if word.isdecimal()), len(words) - 2)
    return ".".join(words[: number + 1])


def _shared_properties(leaf: Leaf) -> tuple:
    """Return the properties that all leaves of a bucket share."""
    return leaf.trained, leaf.dtype, leaf.kind, leaf.unit, leaf.whole


def _pieces(part: list[Leaf], bound: int) -> list[list[Leaf]]:
    """Return the leaves of a layer as one group if they fit into a bucket, otherwise one by one."""
    return [part] if _bytes(part) <= bound else [[leaf] for leaf in part]


def _bytes(leaves: list[Leaf]) -> int:
    return sum(_aligned(leaf.bound) * leaf.dtype.itemsize for leaf in leaves)


def _bucket(name: str, leaves: list[Leaf], num_ranks: int) -> Bucket:
    if leaves[0].whole:
        return _bucket_of_whole(name, leaves, num_ranks)
    offsets = list(itertools.accumulate((_aligned(leaf.numel) for leaf in leaves), initial=0))
    unit = math.lcm(ALIGN, leaves[0].unit)
    length = max(1, -(-offsets.pop() // (num_ranks * unit))) * unit  # a message is never empty
    return Bucket(name, tuple(leaves), tuple(offsets), length, num_ranks)


def _bucket_of_whole(name: str, leaves: list[Leaf], num_ranks: int) -> Bucket:
    """Assign every leaf to the rank with the fewest elements so far, the largest leaves first."""
    ends, places = [0] * num_ranks, {}
    for leaf in sorted(leaves, key=lambda leaf: -leaf.bound):
        rank = ends.index(min(ends))
        places[leaf.name] = rank, ends[rank]
        ends[rank] += _aligned(leaf.bound)
    unit = math.lcm(ALIGN, leaves[0].unit)
    length = max(1, -(-max(ends) // unit)) * unit
    offsets = [rank * length + start for rank, start in (places[leaf.name] for leaf in leaves)]
    return Bucket(name, tuple(leaves), tuple(offsets), length, num_ranks)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
