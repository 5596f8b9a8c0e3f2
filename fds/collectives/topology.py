"""`Topology`: the coordinates of ranks on named axes, as pure data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import attrs

from fds.errors import MeshError, nearest


@attrs.frozen
class Topology:
    """Ranks arranged on named axes, the last of which varies fastest.

    >>> grid = Topology.of(pp=2, dp=2)
    >>> grid.get_rank(pp=1, dp=0), grid.get_coord(3), grid.get_axis_comm_lists("pp")
    (2, {'pp': 1, 'dp': 1}, [[0, 2], [1, 3]])
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]  # in row-major order of the coordinates

    @classmethod
    def of(cls, **sizes: int) -> Topology:
        """Arrange ranks 0, 1, ... on axes of these sizes."""
        return cls(tuple(sizes), tuple(sizes.values()), tuple(range(math.prod(sizes.values()))))

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by name."""
        return dict(zip(self.names, self.sizes, strict=True))

    def get_rank(self, **coords: int) -> int:
        """Return the rank with these coordinates, one for every axis. Raises `MeshError`."""
        if missing := [name for name in self.names if name not in coords]:
            raise MeshError(
                "a rank is identified by a coordinate on every axis",
                got=_text(coords),
                want=", ".join(missing) + " too",
                hint="filter_match takes some of them",
            )
        return self.filter_match(**coords)[0]

    def get_coord(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by axis. Raises `MeshError` for an unknown rank."""
        if rank not in self.ranks:
            raise MeshError("no such rank in this mesh", got=str(rank), want=f"one of {_short(self.ranks)}")
        index, coord = self.ranks.index(rank), {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            index, coord[name] = divmod(index, size)
        return {name: coord[name] for name in self.names}

    def get_axis_comm_lists(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along an axis; along several, the last named varies fastest."""
        self.check_names(axes)
        rest = [name for name in self.names if name not in axes]
        along = lambda names: [
            dict(zip(names, at, strict=True)) for at in itertools.product(*(range(self.shape[n]) for n in names))
        ]
        return [[self.get_rank(**fixed, **moving) for moving in along(axes)] for fixed in along(rest)]

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks that have these coordinates, in order. Raises `MeshError` for an unknown axis."""
        self.check_names(coords)
        for name, at in coords.items():
            if not 0 <= at < self.shape[name]:
                raise MeshError("no such coordinate", where=name, got=str(at), want=f"0 to {self.shape[name] - 1}")
        strides = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        spans = [[coords[n]] if n in coords else range(s) for n, s in zip(self.names, self.sizes, strict=True)]
        return [self.ranks[sum(c * s for c, s in zip(at, strides, strict=True))] for at in itertools.product(*spans)]

    def check_names(self, names: tuple[str, ...] | Mapping[str, int]) -> None:
        """Raise `MeshError` for an unknown or repeated name of an axis."""
        for name in names:
            if name not in self.names:
                raise MeshError(
                    f"the mesh has no axis {name!r}",
                    got=repr(name),
                    want="one of " + _text(self.shape),
                    hint=nearest(str(name), self.names),
                )
        if len(set(names)) < len(names):
            raise MeshError("an axis is named twice", got=", ".join(names), want="each axis once")


def _text(coords: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={at}" for name, at in coords.items()) or "nothing"


def _short(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
