"""Meshes: ranks arranged on named axes, those that run and those that are only planned."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fds.collectives import worlds
from fds.collectives.axis import Axis
from fds.collectives.gloo import AlikeLink
from fds.collectives.launch import launched
from fds.collectives.links import Collective, Link, Work, on_one_rank
from fds.collectives.worlds import World
from fds.errors import MeshError, is_int, nearest


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
            shown = ", ".join(map(str, self.ranks[:16])) + (", ..." if len(self.ranks) > 16 else "")
            raise MeshError("no such rank in this mesh", got=str(rank), want=f"one of {shown}")
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


@attrs.frozen
class Mesh:
    """Ranks on named axes: `mesh["dp"]` is an axis, `mesh["pp", "dp"]` two of them flattened, the last varying fastest.

    Meshes are equal if they have the same axes over the same ranks of the same world. With NCCL an axis creates its
    process group at its first use, so all ranks must access new axes in the same order; otherwise it needs none.
    """

    world: World = attrs.field(repr=False)
    topology: Topology
    groups: dict[str, Any] = attrs.field(eq=False, repr=False, factory=dict)  # of a DeviceMesh, by axis
    axes: dict[tuple[str, ...], Axis] = attrs.field(eq=False, repr=False, init=False, factory=dict)

    @property
    def rank(self) -> int:
        """The rank of this process in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return len(self.topology.ranks)

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of the axes, by name."""
        return self.topology.shape

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """Return an axis. Raises `MeshError` for a name that the mesh lacks."""
        names = (names,) if isinstance(names, str) else names
        if names not in self.axes:
            if not names:
                raise MeshError("an axis has a name", got="mesh[()]", want='mesh["' + self.topology.names[0] + '"]')
            ranks = next(tuple(g) for g in self.topology.get_axis_comm_lists(*names) if self.rank in g)
            link = self.world.link(ranks, self.groups.get(",".join(names))) if len(ranks) > 1 else None
            self.axes[names] = Axis(self.world, ",".join(names), ranks, ranks.index(self.rank), self, link)
        return self.axes[names]

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinates of a rank by axis; of this rank by default."""
        return self.topology.get_coord(self.rank if rank is None else rank)

    def get_rank(self, **coords: int) -> int:
        """Return the rank with these coordinates, one for every axis."""
        return self.topology.get_rank(**coords)

    def get_coord(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by axis."""
        return self.topology.get_coord(rank)

    def get_axis_comm_lists(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that communicate along an axis, or along several, flattened."""
        return self.topology.get_axis_comm_lists(*axes)

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks that have these coordinates."""
        return self.topology.filter_match(**coords)

    def to_torch(self) -> DeviceMesh:
        """Return a `DeviceMesh` of the same ranks and names; all ranks call it. Raises `MeshError` in other worlds."""
        if not isinstance(self.world, worlds.TorchWorld):
            raise MeshError(
                "only torch.distributed's ranks have a DeviceMesh",
                got=f"a mesh of {self.size} ranks, {type(self.world).__name__}",
                want="fds.init_distributed() under torchrun",
            )
        ranks = torch.tensor(self.topology.ranks, device="cpu").view(self.topology.sizes)
        return DeviceMesh(self.world.device.type, ranks, mesh_dim_names=self.topology.names)


def mesh(**axes: int) -> Mesh:
    """Arrange the running ranks on named axes: `mesh(pp=2, dp=-1)`. The last varies fastest; one size may be -1.

    Raises `MeshError` if the product of the sizes is not the number of ranks, and if a launcher started ranks that have
    not called `init_distributed` yet.
    """
    world, launch = worlds.current(), launched(os.environ)
    text = f"mesh({', '.join(f'{name}={size}' for name, size in axes.items())})"
    if not axes:
        raise MeshError("a mesh needs an axis", got=text, want="mesh(dp=-1)")
    if world is worlds.SINGLE and launch is not None and launch.world_size > 1:
        raise MeshError(
            "the ranks that were started together are not connected yet",
            got=text,
            want="fds.init_distributed() before it",
            hint=f"the environment names rank {launch.rank} of {launch.world_size}",
        )
    for name, size in axes.items():
        if not is_int(size) or (size < 1 and size != -1):
            raise MeshError("not a size of an axis", where=name, got=repr(size), want="1 or more, or -1 for the rest")
    free = [name for name, size in axes.items() if size == -1]
    if len(free) > 1:
        raise MeshError("only one axis can have size -1", got=text, want="-1 once")
    product = math.prod(size for size in axes.values() if size != -1)
    if world.size % product if free else world.size != product:
        raise MeshError(
            f"these axes do not fit {world.size} rank{'s' * (world.size > 1)}",
            got=text,
            want=f"sizes that multiply to {world.size}" if not free else f"sizes that divide {world.size}",
            hint="fds.init_distributed() comes first, under torchrun" if world.size == 1 else "",
        )
    sizes = {name: world.size // product if size == -1 else size for name, size in axes.items()}
    return Mesh(world, Topology.of(**sizes))


def from_torch(device_mesh: DeviceMesh) -> Mesh:
    """Return the mesh of a `DeviceMesh` with named dims; with NCCL it uses its process groups. Raises `MeshError`."""
    world, names = worlds.current(), device_mesh.mesh_dim_names
    if names is None:
        raise MeshError("the dims of this DeviceMesh have no names", got=repr(device_mesh), want="mesh_dim_names")
    if device_mesh.get_coordinate() is None:
        raise MeshError("this rank is not in the mesh", got=f"rank {world.rank}", want=repr(device_mesh))
    ranks = device_mesh.mesh
    topology = Topology(tuple(names), tuple(ranks.shape), tuple(ranks.flatten().tolist()))
    nccl = world.device.type == "cuda"
    return Mesh(world, topology, {name: device_mesh.get_group(name) for name in names} if nccl else {})


@attrs.frozen
class NoLink:
    """The link of ranks that are not there: nothing can be sent."""

    size: int
    alike: AlikeLink

    def rehearse(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Do on this rank what a real link does, as gloo does it on a CPU."""
        if x.device.type == "cpu":
            return self.alike.start(collective, out, x)
        return on_one_rank(collective, out, x, self.alike.index, self.alike.size)

    def start(self, collective: Collective, out: Any, x: Any) -> NoReturn:
        """Raise `MeshError`."""
        raise MeshError(
            f"this is one of {self.size} ranks that are only planned, and nothing can be sent",
            got=str(collective),
            want="what needs no other rank: step.structure, step.describe",
        )

    def exchange(self, collective: Collective, text: str) -> NoReturn:
        """Raise `MeshError`."""
        self.start(collective, None, None)


class Planned(World):
    """A world of ranks of which none runs."""

    def __init__(self, rank: int, size: int, *, shares_cores: bool):
        super().__init__(rank, size, shares_cores=shares_cores)
        self.links: dict[tuple[Any, ...], Link] = {}

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return a link over which nothing can be sent, which is kept."""
        return self.links.setdefault((ranks, channel), NoLink(self.size, AlikeLink(ranks, ranks.index(self.rank))))


@contextlib.contextmanager
def planned(sizes: Mapping[str, int], rank: int) -> Iterator[Mesh]:
    """Yield a mesh with axes of these sizes, seen from a rank that is only planned; inside, those ranks are current.

    They share cores where the ranks that are running do, on which the size of their buckets depends.

    Raises `MeshError` for sizes below 1, and for a rank that is none of them.
    """
    for name, size in sizes.items():
        if not is_int(size, 1):
            raise MeshError("not a size of an axis", where=str(name), got=repr(size), want="1 or more")
    count = math.prod(sizes.values())
    if not is_int(rank, 0) or rank >= count:
        raise MeshError("there is no such rank", where="rank", got=repr(rank), want=f"0 to {count - 1}")
    with worlds.among(Planned(rank, count, shares_cores=worlds.current().shares_cores)):
        yield mesh(**sizes)
