"""Place: which share of every batch is a rank's. An axis without the ranks behind it, so that it can be pickled."""

from __future__ import annotations

from typing import Any

import attrs

from fds.collectives import Axis
from fds.errors import DataError


@attrs.frozen
class Place:
    """The coordinate of a rank among those that share a batch."""

    index: int = 0
    size: int = 1

    def share(self, begin: int, end: int) -> tuple[int, int]:
        """Return this rank's part of the rows from `begin` to `end`: contiguous, the parts in the order of ranks.

        >>> Place(index=1, size=4).share(100, 108)
        (102, 104)
        """
        part = (end - begin) // self.size
        return begin + self.index * part, begin + (self.index + 1) * part


def place_of(axis: Any) -> Place:
    """Return the place of this rank on an axis; None is an axis of one rank.

    Raises `DataError` for what is not an axis, `MeshError` for an axis of other ranks than those that run.
    """
    if axis is None:
        return Place()
    if isinstance(axis, Axis):
        axis.demand_current()
        return Place(axis.index, axis.size)
    if isinstance(axis, Place) and 0 <= axis.index < axis.size:
        return axis
    raise DataError(
        "not an axis", where="axis", got=repr(axis), want="an axis of a mesh, a Place of which the index is below the "
        "size, or None", hint='the axis of data ranks: fds.mesh(dp=-1)["dp"]',
    )  # fmt: skip
