"""Meshes: ranks arranged on named axes."""

from __future__ import annotations

import math
import os
from typing import Any

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh

from fds.collectives import worlds
from fds.collectives.axis import Axis
from fds.collectives.launch import launched
from fds.collectives.topology import Topology
from fds.collectives.worlds import World
from fds.errors import MeshError, is_int


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
