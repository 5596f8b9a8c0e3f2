"""Ranks that are not there: of a composition for many, what one of them would hold is known without running any."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor

from fds.collectives import worlds
from fds.collectives.links import Collective, Link, Work
from fds.collectives.meshes import Mesh, mesh
from fds.errors import MeshError, is_int


@attrs.frozen
class NoLink:
    """The link of ranks that are not there: nothing can be sent."""

    size: int

    def start(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Raise `MeshError`."""
        self._refuse(str(collective))

    def exchange(self, collective: Collective, text: str) -> list[str]:
        """Raise `MeshError`."""
        self._refuse(str(collective))

    def _refuse(self, got: str) -> NoReturn:
        raise MeshError(
            f"this is one of {self.size} ranks that are only planned, and nothing can be sent",
            got=got,
            want="what needs no other rank: step.structure, step.describe",
        )


@attrs.frozen(eq=False)
class Planned:
    """A world of ranks of which none runs."""

    rank: int
    size: int
    device: torch.device = torch.device("cpu")
    timeout: float = math.inf
    shares_cores: bool = False
    counters: list = attrs.field(factory=list)

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return a link over which nothing can be sent."""
        return NoLink(self.size)


@contextlib.contextmanager
def planned(sizes: Mapping[str, int], rank: int) -> Iterator[Mesh]:
    """Yield a mesh with axes of these sizes, seen from a rank that is only planned; inside, those ranks are current.

    Raises `MeshError` for sizes below 1, and for a rank that is none of them.
    """
    for name, size in sizes.items():
        if not is_int(size, 1):
            raise MeshError("not a size of an axis", where=str(name), got=repr(size), want="1 or more")
    count = math.prod(sizes.values())
    if not is_int(rank, 0) or rank >= count:
        raise MeshError("there is no such rank", where="rank", got=repr(rank), want=f"0 to {count - 1}")
    token = worlds.simulated.set(Planned(rank, count))
    try:
        yield mesh(**sizes)
    finally:
        worlds.simulated.reset(token)
