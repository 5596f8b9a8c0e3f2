"""Worlds: the ranks that are running, one alone, those of `simulate`, or those of torch.distributed."""

from __future__ import annotations

import datetime
import math
import os
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist

from fds.collectives.agreement import Checked
from fds.collectives.calls import Link
from fds.collectives.gloo import GlooLink
from fds.collectives.launch import on_one_node
from fds.collectives.nccl import NcclLink


class World(Protocol):
    """The ranks that are running, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Which of them it is."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    @property
    def device(self) -> torch.device:
        """The device whose tensors this rank sends."""
        ...

    @property
    def timeout(self) -> float:
        """How many seconds a rank waits for another; infinity where waiting for ever is noticed."""
        ...

    @property
    def shares_cores(self) -> bool:
        """Whether sending takes the cores that compute, so that it cannot go on beside computing for nothing."""
        ...

    @property
    def counters(self) -> list:
        """The `traffic.Traffic`s that are being counted."""
        ...

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return what carries messages between these ranks, of which this is one; collective over them.

        Collectives are matched by their order within a channel.
        """
        ...


@attrs.frozen(eq=False)
class Single:
    """One rank, alone."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    timeout: float = math.inf
    shares_cores: bool = False
    counters: list = attrs.field(factory=list)

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Fail: one rank has nobody to talk to."""
        raise AssertionError(ranks)


@attrs.define(eq=False)
class TorchWorld:
    """The ranks of torch.distributed's default group."""

    group: Any  # a ProcessGroup, as is:
    host: Any  # where tensors of the CPU go through gloo
    device: torch.device
    check: bool = False
    counters: list = attrs.field(factory=list)
    links: dict[tuple, Link] = attrs.field(factory=dict)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return the link between these ranks on a channel, made once; under NCCL on `group`, or a new one."""
        key = (ranks, self.check, channel)
        if key not in self.links:
            made: Link = GlooLink(self.host, ranks, ranks.index(self.rank), channel)
            if self.device.type == "cuda":
                made = NcclLink(self._nccl(ranks, channel) if group is None else group, made)
            if self.check:
                made = Checked(made, ranks, ranks.index(self.rank), datetime.timedelta(seconds=self.timeout), channel)
            self.links[key] = made
        return self.links[key]

    @property
    def timeout(self) -> float:
        """How many seconds a rank waits for another, as torch has it for what goes through the host."""
        return self.host._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    @property
    def shares_cores(self) -> bool:
        """Whether all ranks compute on the cores of one node."""
        return self.device.type == "cpu" and on_one_node(os.environ, self.size)

    def _nccl(self, ranks: tuple[int, ...], channel: str) -> Any:
        if ranks == tuple(range(self.size)) and not channel:
            return self.group
        order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        return dist.new_group(list(ranks), backend="nccl", use_local_synchronization=True, **order)


SINGLE = Single()
simulated: ContextVar[World | None] = ContextVar("fds_world", default=None)  # set in the threads of `simulate`
_torch: list[TorchWorld] = []  # the one of the default group that runs


def current() -> World:
    """Return the world of whoever asks."""
    world = simulated.get()
    if world is not None:
        return world
    if not dist.is_initialized():
        return SINGLE
    return of_torch()


def of_torch() -> TorchWorld:
    """Return the world of torch.distributed's default group, made at the first question: collective under pure NCCL."""
    group = dist.group.WORLD
    assert group is not None
    if not _torch or _torch[0].group is not group:
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        nccl = backends.get("cuda") == "nccl"
        host = group if backends.get("cpu") == "gloo" else dist.new_group(backend="gloo")
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        _torch[:] = [TorchWorld(group, host, device)]
    return _torch[0]
