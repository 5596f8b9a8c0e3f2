"""Parameters that the ranks of a step have parts of, or of their own: what a mask of all of them must know.

Where a tensor axis cuts a weight, this rank's piece of its mask; every rank holds the mask whole.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from fds.compression import masks
from fds.errors import ComposeError
from fds.layout import Leaf
from fds.step import Call, Placement, SplitDim


def counts(call: Call) -> bool:
    """Say whether masks that this rank makes become all ranks': of ranks with parameters of their own, the first's."""
    local = call.dimensions.local
    return local is None or local.index == 0


def cuts_of(name: str, call: Call) -> list[tuple[Placement, SplitDim]]:
    """Return how axes whose ranks have parts of parameters cut this one, with the placement of each such axis."""
    return [
        (entry.placement, lies)
        for entry in call.dimensions.entries
        if entry.axis is not None and entry.axis.size > 1 and not entry.placement.owns
        for lies in [entry.placement.lies(name)]
        if isinstance(lies, SplitDim)
    ]


@attrs.frozen(eq=False)
class Piece:
    """What this rank holds of a weight; `shape` is that of the whole one."""

    placement: Placement
    name: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Leaf, call: Call, together: int) -> Piece | None:
        """Return this rank's piece, None of a weight that is whole here.

        `together` is how many numbers of a row are compared with one another, 0 for more.

        Raises `ComposeError` where a mask of the piece cannot be made of the piece alone.
        """
        cut = cuts_of(leaf.name, call)
        if not cut:
            return None
        placement, lies = cut[0]
        axis, shape = placement.axis, placement.shapes({leaf.name: leaf.shape})[leaf.name]
        assert axis is not None
        width = math.prod(shape[lies.dim + 1 :])
        starts = [
            first * width
            for index in range(axis.size)
            for first, _ in lies.ranges(shape[lies.dim], axis.size, index)
            if lies.dim
        ]
        if not together or len(cut) > 1 or any(start % math.lcm(masks.BITS, together) for start in starts):
            raise ComposeError(
                "prune_weights compares numbers of a weight that are on several ranks",
                where=f"{leaf.name} {shape}",
                got=f"dim {lies.dim} cut by {axis.name!r}",
                want=f'block="2:4" where ranks hold whole rows, or multiples of {masks.BITS} columns; '
                "or excluded=... with such weights",
            )
        return cls(placement, leaf.name, shape)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of a mask (rows, numbers of a row), of the shape of its weight."""
        return self.placement.cut(self.name, whole.view(self.shape))

    def whole(self, piece: Tensor) -> Tensor:
        """Return the mask (rows, numbers of a row) that has this piece, and False in the place of others'."""
        count = math.prod(self.shape)
        index = self.placement.cut(self.name, torch.arange(count, device=piece.device).view(self.shape))
        flat = torch.zeros(count, dtype=torch.bool, device=piece.device)
        return masks.matrix(flat.index_copy(0, index.flatten(), piece.flatten()).view(self.shape))
