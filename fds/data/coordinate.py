"""`Coordinate`: a rank's position among those that share a batch; unlike an axis it can be pickled."""

from __future__ import annotations

from typing import Any

import attrs

from fds.collectives import Axis
from fds.errors import DataError


@attrs.frozen
class Coordinate:
    """A rank's position among those that share a batch."""

    index: int = 0
    size: int = 1

    def share(self, begin: int, end: int) -> tuple[int, int]:
        """Return this rank's part of the rows from `begin` to `end`: contiguous, in rank order.

        >>> Coordinate(index=1, size=4).share(100, 108)
        (102, 104)
        """
        part = (end - begin) // self.size
        return begin + self.index * part, begin + (self.index + 1) * part


def coordinate_on(axis: Any) -> Coordinate:
    """Return the coordinate of this rank on an axis; None is an axis of one rank.

    Raises `DataError` if this is not an axis, and `MeshError` for an axis of a mesh over other ranks.
    """
    if axis is None:
        return Coordinate()
    if isinstance(axis, Axis):
        axis.check_current()
        return Coordinate(axis.index, axis.size)
    if isinstance(axis, Coordinate) and 0 <= axis.index < axis.size:
        return axis
    raise DataError(
        "not an axis",
        where="axis",
        got=repr(axis),
        want="an axis of a mesh, a Coordinate with index < size, or None",
        hint='the axis of data ranks: fds.mesh(dp=-1)["dp"]',
    )
