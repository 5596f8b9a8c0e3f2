"""Worlds: the ranks that are running, which are one process, those of `simulate`, or those of torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import math
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fds.collectives.agreement import Checked
from fds.collectives.gloo import GlooLink
from fds.collectives.launch import launched, on_one_node
from fds.collectives.links import Link
from fds.collectives.nccl import NcclLink
from fds.collectives.waits import answer_others, limit_of
from fds.errors import MeshError


@attrs.define(eq=False, slots=False)
class World:
    """The ranks that are running, from the point of view of one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # of the tensors that collectives take
    timeout: float = math.inf  # seconds that a rank waits for others; infinity if deadlocks are detected
    shares_cores: bool = False  # whether communication uses the cores of computation: overlapping them gains nothing
    counters: list = attrs.field(factory=list)  # the active `traffic.Traffic` counters

    @property
    def is_current(self) -> bool:
        """Whether these are the ranks that run."""
        return current() is self

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return the link between these ranks, of which this is one; all of them must call this.

        Collectives are matched by their order within a channel. A single process has none.
        """
        raise AssertionError(ranks)


class Single(World):
    """A single process."""


class TorchWorld(World):
    """The ranks of torch.distributed's default group."""

    def __init__(self, group: Any, host: Any, device: torch.device):
        self.group = group  # a ProcessGroup
        self.host = host  # a ProcessGroup in which CPU tensors use gloo; perhaps the same
        self.rank, self.size, self.device = group.rank(), group.size(), device
        self.check, self.counters = False, []
        self.links: dict[tuple, Link] = {}

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return the link between these ranks on a channel, which is kept; with NCCL on `group`, or on a new one."""
        key = (ranks, self.check, channel)
        if key not in self.links:
            link: Link = GlooLink(self.host, ranks, ranks.index(self.rank), channel)
            if self.device.type == "cuda":
                link = NcclLink(self._nccl(ranks, channel) if group is None else group, link)
            if self.check:
                link = Checked(link, ranks, ranks.index(self.rank), datetime.timedelta(seconds=self.timeout), channel)
            self.links[key] = link
        return self.links[key]

    @property
    def timeout(self) -> float:
        """For how many seconds a rank waits for others: the timeout of the gloo group."""
        return limit_of(self.host)

    @property
    def shares_cores(self) -> bool:
        """Whether all ranks compute on the CPU of one node."""
        return self.device.type == "cpu" and on_one_node(os.environ, self.size)

    def _nccl(self, ranks: tuple[int, ...], channel: str) -> Any:
        if ranks == tuple(range(self.size)) and not channel:
            return self.group
        order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise MeshError(
                "ranks of an axis over NCCL stand in another order than those of the job",
                where=f"torch {torch.__version__}",
                got=str(ranks),
                want="ascending ranks, or a torch whose new_group takes sort_ranks, as 2.13 does",
                hint="name the axes in the order of the mesh: mesh['a', 'b'], not mesh['b', 'a']",
            )
        timeout = datetime.timedelta(seconds=self.timeout)  # NCCL's own default is another than the job's
        return dist.new_group(list(ranks), timeout, "nccl", use_local_synchronization=True, **order)


class FirstRanks(World):
    """The first ranks of a larger world; the others take no part in what is made here."""

    def __init__(self, world: World, size: int):
        self.world, self.rank, self.size = world, world.rank, size
        self.device, self.counters = world.device, world.counters

    @property
    def is_current(self) -> bool:
        """Whether these ranks run, by themselves or with the others of the larger world."""
        return current() in (self, self.world)

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return the link between these ranks in the larger world."""
        return self.world.link(ranks, group, channel)

    @property
    def timeout(self) -> float:
        """For how many seconds a rank waits for others, as in the larger world."""
        return self.world.timeout

    @property
    def shares_cores(self) -> bool:
        """Whether the ranks compute on the CPU of one node, as in the larger world."""
        return self.world.shares_cores


SINGLE = Single()
simulated: ContextVar[World | None] = ContextVar("fds_world", default=None)  # set in the threads of `simulate`
_torch: list[TorchWorld] = []  # the world of the current default group, if it was asked for


def current() -> World:
    """Return the world of the caller."""
    world = simulated.get()
    if world is not None:
        return world
    if not dist.is_initialized():
        return SINGLE
    return of_torch()


@contextlib.contextmanager
def among(world: World) -> Iterator[None]:
    """Let a world be the current one inside, for this thread."""
    token = simulated.set(world)
    try:
        yield
    finally:
        simulated.reset(token)


@contextlib.contextmanager
def first_ranks(count: int) -> Iterator[None]:
    """Let the first `count` ranks, of which this is one, be the current world inside; all of them call it."""
    world = current()
    assert world.rank < count <= world.size, (world.rank, count, world.size)
    if count == world.size:
        yield
        return
    with among(FirstRanks(world, count)):
        yield


def process_rank() -> int:
    """Return the rank of this process, of torch.distributed or else of its launcher; 0 if it is the only one.

    Simulated ranks are of one process. Raises `MeshError` for an incomplete environment.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    launch = launched(os.environ)
    return 0 if launch is None else launch.rank


def of_torch() -> TorchWorld:
    """Return the world of torch.distributed's default group. With pure NCCL all ranks must make the first call."""
    group = dist.group.WORLD
    assert group is not None
    if not _torch or _torch[0].group is not group:
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        nccl = backends.get("cuda") == "nccl"
        host = group if backends.get("cpu") == "gloo" else dist.new_group(backend="gloo")
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        _torch[:] = [TorchWorld(group, host, device)]
        answer_others()
    return _torch[0]
