"""Optimizers that need whole parameters, where ranks hold pieces of them: which they take, and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from fds.errors import StateError
from fds.layout import Segment
from fds.optim import Optimizer
from fds.step.placements import Placement, SplitDim
from fds.step.topology import Dimensions


@attrs.frozen(eq=False)
class Piece:
    """A rank's piece of a parameter, and how to put such pieces together."""

    name: str
    shape: tuple[int, ...]
    placements: list[Placement]  # along which it is cut, the first one first

    def whole(self, x: Tensor) -> Tensor:
        """Return the whole of which every rank has a piece; all of them call this."""
        by_name = {self.name: x.view(self.shape)}
        for placement in reversed(self.placements):
            by_name = placement.collect(by_name)
        return by_name[self.name]

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's piece of a whole."""
        for placement in self.placements:
            x = placement.cut(self.name, x)
        return x


def check_whole(optimizer: Optimizer, dimensions: Dimensions, name: str, shape: Sequence[int]) -> None:
    """Raise `StateError` for a parameter that the optimizer needs whole, and cannot have."""
    place = dimensions.cells(name, shape) if optimizer.needs_whole(name) else None
    if place is None:
        return
    if not optimizer.takes_pieces(name):
        raise StateError(
            "the optimizer needs whole parameters, and each rank has a piece of this one",
            where=name,
            got=repr(optimizer),
            want="an optimizer that works on pieces, as adamw and lamb do",
            hint=f"by_name({{{name!r}: adamw(), ...}})",
        )
    least, _ = dimensions.extremes(name, shape)
    if not least:
        raise StateError(
            "the optimizer puts pieces of parameters together, and a rank has none of this one",
            where=name,
            got=f"shape {place[0]}",
            want="elements on every rank",
            hint=f"by_name({{{name!r}: adamw(), ...}})",
        )


def with_pieces(segments: list[list[Segment]], optimizer: Optimizer, dimensions: Dimensions) -> list[list[Segment]]:
    """Return segments that know which pieces they are, those of which an optimizer needs the whole."""
    if not dimensions.pieces:
        return segments
    return [[_known(s, dimensions) if optimizer.needs_whole(s.name) else s for s in inside] for inside in segments]


def _known(segment: Segment, dimensions: Dimensions) -> Segment:
    lying = [placement for _, placement in dimensions.differing]
    cuts = [placement for placement in lying if isinstance(placement.lies(segment.name), SplitDim)]
    return attrs.evolve(segment, piece=Piece(segment.name, segment.shape, cuts)) if cuts else segment
