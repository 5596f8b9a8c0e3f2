"""`simulate`: run many ranks in one process, on threads of which one runs at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

from fds import random
from fds.collectives import worlds
from fds.collectives.links import Link
from fds.collectives.memory import Hub, MemoryLink
from fds.collectives.turns import Turns, check_size
from fds.errors import FdsError

T = TypeVar("T")


@attrs.frozen(eq=False)
class SimulatedWorld:
    """The ranks of one call of `simulate`, as one of them sees them."""

    rank: int
    size: int
    hub: Hub
    device: torch.device  # of what a pipeline sends; collectives take tensors of any
    timeout: float = math.inf  # deadlocks are detected, since then no rank can run
    shares_cores: bool = False  # simulated ranks stand for ranks of a cluster
    counters: list = attrs.field(factory=list)
    links: dict[tuple, MemoryLink] = attrs.field(factory=dict)

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return the link between these ranks on a channel; created at the first call."""
        made = MemoryLink(self.hub, ranks, ranks.index(self.rank), channel)
        return self.links.setdefault((ranks, channel), made)


def simulate(fn: Callable[[], T], world_size: int) -> list[T]:
    """Run `fn()` once per rank and return the results, in rank order.

    The ranks are threads that take turns: one runs until it waits in a collective or ends, then the next one that can
    run. Stages of a pipeline send each other tensors of the caller's default device. Each has its own global
    generators (torch's, Python's and NumPy's), which start with the caller's states; the caller's are restored. The
    order of execution and of sums is deterministic.

    Steps in other threads wait until the simulation ends. So a rank must not wait for another thread that steps, unless
    that thread runs in a copy of the rank's context (`contextvars.copy_context().run`); otherwise the step raises
    `FdsError` after the process has been idle for two minutes.

    A `torch.profiler` may run in one rank at a time, and profiles this rank only; around `simulate` it profiles none.
    Profilers in two ranks at once end the process, since torch has only one for all threads.

    Raises the error of the first rank that failed, with a note that names the rank; `RankError` for a deadlock, for
    ranks that start different collectives, and for collectives that some ranks never start; `FdsError` inside another
    simulation.

    >>> from fds.collectives import mesh
    >>> simulate(lambda: mesh(dp=-1)["dp"].exchange("hello"), 2)
    [['hello', 'hello'], ['hello', 'hello']]
    """
    check_size(world_size)
    if worlds.simulated.get() is not None:
        raise FdsError("a simulated rank cannot simulate", got="simulate inside simulate", want="one simulation")
    hub = Hub()

    def body(world: SimulatedWorld) -> T:
        worlds.simulated.set(world)
        return fn()

    ranks = [SimulatedWorld(rank, world_size, hub, torch.get_default_device()) for rank in range(world_size)]
    with random.exclusive():  # ranks swap the default generators; their threads run in copies of this context
        hub.turns = Turns([lambda world=world: body(world) for world in ranks])
        try:
            results = hub.turns.run()
        finally:
            hub.turns = None
    hub.check_complete()
    return results
