"""Placements: how parameters and buffers lie along one of the axes that share a step, and what follows from that."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.collectives.traffic import Expected
from fds.errors import ComposeError, StateError, is_a, is_int

GRADS = ("same", "sum")


Range = tuple[int, int]  # of indices along a dim: the first one, and how many


@attrs.frozen
class SplitDim:
    """Every rank holds a piece along `dim`, in the order of the ranks, and has the gradient of its piece.

    The pieces are equal, unless `parts` says how long the dim is: the lengths of parts one after another, of each of
    which every rank holds a piece (queries, keys and values in one matrix). Of a part of length n the first n % ranks
    ranks hold one element more than the others.

    `encoded` has the lengths of the same parts as views may encode them: then a dim has one of several lengths.
    """

    dim: int
    parts: tuple[int, ...] = ()
    encoded: tuple[tuple[int, ...], ...] = ()

    def __attrs_post_init__(self) -> None:
        if not is_int(self.dim, 0):
            raise ComposeError("SplitDim takes a dim", got=repr(self.dim)[:80], want="an int >= 0")
        if not (is_a(self.parts, tuple) and all(is_int(n, 1) for n in self.parts)):
            raise ComposeError("SplitDim takes the lengths of parts", got=repr(self.parts)[:80], want="ints >= 1")

    def ranges(self, length: int, size: int, index: int) -> tuple[Range, ...]:
        """Return what rank `index` of `size` holds along the dim, which is `length` long as a whole."""
        ranges, start = list[Range](), 0
        for part in self.parts_of(length):
            (each, more) = divmod(part, size)
            first = index * each + min(index, more)
            ranges.append((start + first, each + (index < more)))
            start += part
        return tuple(ranges)

    def whole(self, piece: int, size: int) -> int:
        """Return the length of the dim, given that of a rank's piece."""
        # of parts that views encode all ranks have as much
        if not self.parts or any(sum(parts) == piece * size for parts in self.encoded):
            return piece * size
        return sum(self.parts)

    def parts_of(self, length: int) -> tuple[int, ...]:
        """Return the lengths of the parts of a dim that is so long; one part where none of them are."""
        return next((parts for parts in (self.parts, *self.encoded) if parts and sum(parts) == length), (length,))


@attrs.frozen
class Replicated:
    """Every rank holds all of it. The gradients of ranks are equal ("same"), or parts of a sum ("sum")."""

    grads: Literal["same", "sum"] = "same"

    def __attrs_post_init__(self) -> None:
        if self.grads not in GRADS:
            raise ComposeError("Replicated takes what gradients are", got=repr(self.grads)[:80], want="'same' or 'sum'")


@attrs.frozen
class Owned:
    """The ranks with these coordinates hold it, whole, and have the gradient of their own uses; the first comes first.

    A placement that says so has `owns`, and shares, adds up and collects by itself.
    """

    ranks: tuple[int, ...]


@attrs.frozen
class Local:
    """Every rank holds all of it, with values of its own: nobody adds gradients, and ranks agree now and then."""


class Placement:
    """How parameters and buffers lie along an axis; everything else follows from `axis` and `lies`.

    This one: every rank holds all of them, alike.
    """

    axis: Axis | None = None

    def lies(self, name: str) -> SplitDim | Replicated | Owned | Local:
        """Say how a parameter, or a buffer, lies along the axis: the same on every rank of it."""
        return Replicated()

    def holding(self, encodings: Sequence[Any]) -> Placement:
        """Return the same placement for parameters that these views may encode."""
        return self

    @property
    def owns(self) -> bool:
        """Whether ranks hold different parameters, each of its own whole."""
        return False

    @property
    def differs(self) -> bool:
        """Whether what ranks hold may differ, apart from slices of buckets."""
        return self.axis is not None and self.axis.size > 1

    @property
    def slice(self) -> int | None:
        """Which slice of every flat bucket this rank holds; None where the placement slices nothing."""
        return None

    @property
    def split(self) -> tuple[Axis, ...]:
        """The axes over which what an optimizer gets of a parameter is split."""
        return (self.axis,) if self.axis is not None and self.differs else ()

    def copies(self, name: str | None, *, sliced: bool) -> tuple[int, int]:
        """Of the ranks along the axis that hold the same elements of a leaf, which one this is, and how many.

        Args:
            name: of the parameter, or buffer, that the leaf is of; None for a leaf that every rank holds.
            sliced: whether the leaf lies in slices of buckets.
        """
        if self.axis is None or (name is not None and not isinstance(self.lies(name), Replicated)):
            return 0, 1
        return self.axis.index, self.axis.size

    def names(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of all parameters, given those that this rank holds."""
        return names

    def shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the whole shapes of all parameters by name, given those of what this rank holds."""
        if not self.differs or self.axis is None:
            return shapes
        size = self.axis.size

        def whole(lies: SplitDim | Replicated | Owned | Local, i: int, n: int) -> int:
            return lies.whole(n, size) if isinstance(lies, SplitDim) and lies.dim == i else n

        return {
            name: tuple(whole(self.lies(name), i, n) for i, n in enumerate(shape)) for name, shape in shapes.items()
        }

    def holds(self, name: str) -> bool:
        """Say whether this rank holds a parameter, or a buffer, or a piece of it."""
        return True

    def kind(self, name: str) -> Hashable:
        """Return what a parameter may share a bucket with: others of this kind.

        Raises `ComposeError` where `lies` says something that nothing here follows from.
        """
        lies = self.lies(name)
        if not is_a(lies, Owned if self.owns else SplitDim | Replicated):
            raise ComposeError(
                "a placement does not say how a parameter lies",
                where=f"{type(self).__name__}.lies({name!r})",
                got=repr(lies)[:80],
                want="SplitDim(dim), Replicated('same') or Replicated('sum')",
            )
        return SplitDim if isinstance(lies, SplitDim) else lies

    def counts(self, names: Sequence[str | None]) -> list[bool]:
        """Say whether this rank's elements of each parameter count in norms: of ranks that hold the same, one's do.

        None stands for padding.
        """
        if self.axis is None or self.axis.index == 0:
            return [True] * len(names)
        return [name is None or isinstance(self.lies(name), SplitDim) for name in names]

    def cut(self, name: str, x: Tensor) -> Tensor:
        """Return this rank's piece of a whole parameter, or buffer: a view, unless it is of several parts.

        Raises `StateError` for one that ranks cannot hold pieces of.
        """
        if not isinstance(lies := self.lies(name), SplitDim) or self.axis is None:
            return x
        dim, size, parts = lies.dim, self.axis.size, lies.parts
        fits = dim < x.dim() and (
            lies.parts_of(x.shape[dim]) in (parts, *lies.encoded) if parts else x.shape[dim] % size == 0
        )
        if not fits:
            raise StateError(
                "this cannot be split over an axis",
                where=name,
                got=f"shape {tuple(x.shape)}, split along dim {dim}",
                want=f"{sum(parts)} there, as {parts}"
                if parts
                else f"a multiple of {size} there, the ranks of {self.axis.name!r}",
            )
        pieces = [x.narrow(dim, first, n) for first, n in lies.ranges(x.shape[dim], size, self.axis.index)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def share(self, name: str, x: Tensor) -> None:
        """Give a new parameter the values that it has on the first of the ranks that hold it, in place."""
        if self.axis is not None and isinstance(self.lies(name), Replicated) and x.numel():
            self.axis.start_broadcast(_bytes(x), 0).wait()

    def add_up(self, name: str, grad: Tensor) -> None:
        """Sum a contiguous gradient over the ranks that hold the parameter and saw other uses of it, in place."""
        if self.axis is not None and self.lies(name) == Replicated("sum") and grad.numel():
            self.axis.start_all_reduce(grad, what="shared").wait()

    def messages(self, name: str, numel: int, dtype: torch.dtype) -> list[Expected]:
        """Return the messages of `add_up` for a gradient of so many elements."""
        if self.axis is None or self.lies(name) != Replicated("sum") or not numel:
            return []
        return [Expected.of(self.axis, "all_reduce", numel, dtype, what="shared")]

    def collect(self, held: Any) -> Any:
        """Return a tree of all whole parameters, or buffers, on every rank, given what each holds."""
        (leaves, build), names = tree.flatten(held), tree.paths(held)
        return build([self._whole(name, x) for name, x in zip(names, leaves, strict=True)])

    def _whole(self, name: str, x: Tensor) -> Tensor:
        if not isinstance(lies := self.lies(name), SplitDim) or self.axis is None:
            return x
        dim, size = lies.dim, self.axis.size
        length = lies.whole(x.shape[dim], size)
        ranges = [[n for _, n in lies.ranges(length, size, index)] for index in range(size)]  # the first has the most
        pieces = x.new_empty((size, *x.shape[:dim], sum(ranges[0]), *x.shape[dim + 1 :]))
        if pieces.numel():
            sent = x if x.shape == pieces.shape[1:] else pieces.new_zeros(pieces.shape[1:])
            if sent is not x:
                sent.narrow(dim, 0, x.shape[dim]).copy_(x)
            self.axis.start_all_gather(_bytes(pieces), _bytes(sent.contiguous())).wait()
        each = [torch.split(p.narrow(dim, 0, sum(n)), n, dim) for p, n in zip(pieces, ranges, strict=True)]
        return torch.cat([of_rank[part] for part in range(len(ranges[0])) for of_rank in each], dim)

    def __repr__(self) -> str:
        return ""  # nothing to say beside the axis


@attrs.frozen(repr=False)
class LocalCopies(Placement):
    """Every rank of an axis has parameters of its own, which an entry of the station `after` makes equal.

    They begin equal, and nothing of them is put together: whole parameters are those of this rank.
    """

    axis: Axis  # pyright: ignore[reportIncompatibleVariableOverride]  (never None)

    def lies(self, name: str) -> Local:
        """Say that all of them are each rank's own."""
        return Local()

    @property
    def differs(self) -> bool:
        """Whether ranks hold different parameters, or pieces of them: versions of the same ones."""
        return False

    def copies(self, name: str | None, *, sliced: bool) -> tuple[int, int]:
        """Say that no other rank holds the same: of what all have alike, the first speaks."""
        return 0, 1

    def kind(self, name: str) -> Hashable:
        """Return the same for all."""
        return None

    def counts(self, names: Sequence[str | None]) -> list[bool]:
        """Say that all elements count: a norm is that of one rank's gradients."""
        return [True] * len(names)


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, (num_bytes,) uint8: every dtype travels."""
    return x.detach().view(-1).view(torch.uint8)
