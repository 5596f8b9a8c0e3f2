"""Parameters that the ranks of a step have parts of, or of their own: what a mask of all of them must know.

Every rank holds a mask whole. Where an axis cuts a weight, ranks put together what they compare, and each takes its
part of the mask; in the calls that make masks alone, so that in others nothing is sent.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.compression import masks
from fds.errors import ComposeError
from fds.layout import Sharded
from fds.step import Call, Placement, SplitDim


def counts(call: Call) -> bool:
    """Say whether masks that this rank makes become all ranks': of ranks with parameters of their own, the first's."""
    local = call.dimensions.local
    return local is None or local.index == 0


@attrs.frozen(eq=False)
class Piece:
    """What this rank has of a parameter; `shape` is that of all of it."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]  # along the axes that cut it, the first one first; none where it is whole

    @classmethod
    def of(cls, name: str, shape: Sequence[int], call: Call) -> Piece:
        """Return this rank's piece of a parameter, given the shape that it has here.

        Raises `ComposeError` where ranks that pass other batches have pieces: they do not meet while the loss runs.
        """
        lying: list[Placement] = []
        for entry in call.dimensions.entries:
            placement, axis = entry.placement, entry.axis
            if axis is None or axis.size == 1 or placement.owns or not isinstance(placement.lies(name), SplitDim):
                continue
            if not entry.repeats:
                raise ComposeError(
                    "ranks that pass other batches have pieces of what is pruned, and a mask is of all of it",
                    where=name,
                    got=f"{entry!r:.80}",
                    want="excluded=... with this one",
                )
            lying.append(placement)
        shapes = {name: tuple(shape)}
        for placement in reversed(lying):
            shapes = placement.shapes(shapes)
        return cls(name, shapes[name], tuple(lying))

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of a tensor that multiplies the whole parameter, elementwise."""
        whole = whole.expand(self.shape) if self.placements else whole
        for placement in self.placements:
            whole = placement.cut(self.name, whole)
        return whole

    def whole(self, x: Tensor) -> Tensor:
        """Return the whole of which every rank has a piece, without its gradient; all ranks call this."""
        by_name = {self.name: x.detach()}
        for placement in reversed(self.placements):
            by_name = placement.collect(by_name)
        return by_name[self.name]

    def sums(self, x: Tensor, dim: int) -> Tensor:
        """Return the sums of magnitudes of the whole at each index along a dim, float64; all ranks call this."""
        sums = masks.row_scores(x.detach().movedim(dim, 0))
        if not self.placements:
            return sums
        index = torch.arange(self.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1)).movedim(0, dim)
        for placement in self.placements:
            lies = placement.lies(self.name)
            index = placement.cut(self.name, index) if isinstance(lies, SplitDim) and lies.dim == dim else index
        sums = sums.new_zeros(self.shape[dim]).index_copy_(0, index.flatten(), sums)
        for placement in self.placements:
            assert placement.axis is not None
            sums = placement.axis.all_reduce(sums, what="scores")
        return sums


def shapes_of(params: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the parameters of which a rank has slices, or which it has."""
    if isinstance(params, Sharded):
        yield from ((leaf.name, leaf.shape) for bucket in params.layout.buckets for leaf in bucket.leaves)
    else:
        yield from ((name, tuple(x.shape)) for name, x in tree.paths(params).items())


def wholes(params: Any, names: Container[str], call: Call) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters of these names, whole and on the device, from what the station `after` is given; all ranks do.

    Of slices one bucket is whole at a time.
    """
    for name, x in _unsliced(params, names, call):
        x = x.detach().to(call.device)
        yield name, Piece.of(name, x.shape, call).whole(x)


def _unsliced(params: Any, names: Container[str], call: Call) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters as ranks have them that share no slices."""
    if not isinstance(params, Sharded):
        yield from ((name, x) for name, x in tree.paths(params).items() if name in names)
        return
    (axis,) = (x.placement.axis for x in call.dimensions.entries if x.placement.slice is not None)
    assert axis is not None
    for bucket in params.layout.buckets:
        if any(leaf.name in names for leaf in bucket.leaves):
            part = params.buckets[bucket.name].detach().to(call.device)
            whole = part.new_empty(bucket.numel)
            axis.used_for("gather").start_all_gather(whole, part).wait()
            for leaf, x in zip(bucket.leaves, bucket.views(whole), strict=True):
                if leaf.name in names:
                    yield leaf.name, x
