"""Ranks, meshes with named axes over them, and collectives.

`Axis.start_*` are in place and asynchronous. The functions here are built on them; they return new tensors and are
differentiable.
"""

from fds.collectives.axis import Axis, alone
from fds.collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    recv,
    reduce_scatter,
    send,
)
from fds.collectives.joining import init_distributed
from fds.collectives.links import Work, fingerprint
from fds.collectives.meshes import Mesh, Topology, from_torch, mesh
from fds.collectives.simulation import simulate
from fds.collectives.traffic import counted
from fds.collectives.worlds import first_ranks

__all__ = [
    "init_distributed", "mesh", "from_torch", "simulate", "Mesh", "Topology", "Axis", "alone", "Work", "all_gather",
    "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv", "barrier", "counted", "fingerprint",
    "first_ranks",
]  # fmt: skip
