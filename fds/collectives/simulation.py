"""`simulate`: many ranks in one process, on threads that take turns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

from fds import random
from fds.collectives import worlds
from fds.collectives.calls import Link
from fds.collectives.memory import Hub, MemoryLink
from fds.collectives.turns import Turns, refuse_size
from fds.errors import FdsError

T = TypeVar("T")


@attrs.frozen(eq=False)
class SimulatedWorld:
    """The ranks of one call of `simulate`, as one of them sees them."""

    rank: int
    size: int
    hub: Hub
    device: torch.device = torch.device("cpu")
    timeout: float = math.inf  # of ranks that wait for each other nobody can run, which is noticed
    shares_cores: bool = False  # ranks that take turns stand for ranks of a cluster
    counters: list = attrs.field(factory=list)
    links: dict[tuple, MemoryLink] = attrs.field(factory=dict)

    def link(self, ranks: tuple[int, ...], group: Any = None, channel: str = "") -> Link:
        """Return the link between these ranks on a channel, made once."""
        made = MemoryLink(self.hub, ranks, ranks.index(self.rank), channel)
        return self.links.setdefault((ranks, channel), made)


def simulate(fn: Callable[[], T], world_size: int) -> list[T]:
    """Run `fn()` once per rank and return the results, in rank order.

    The ranks are threads that take turns: one runs until it waits in a collective or ends, then the next rank that can.
    Each draws from global generators of its own, torch's of the CPU, Python's and NumPy's, which start as the caller's
    are; the caller's stay as they were.
    What runs, and in what order sums are taken, is the same every time. Steps of other threads wait for its end, so a
    rank must not wait for a thread of its own that steps, unless that runs in a copy of the rank's context
    (`contextvars.copy_context().run`): there the step raises `FdsError` after two minutes in which nothing runs.

    A `torch.profiler` may run in one rank at a time, where it sees this rank alone; around `simulate` it sees none. Two
    that run at once, in two ranks that take turns, end the process: torch has one for all threads.

    Raises what the first rank raised, with a note that names it; `RankError` when no rank can run, when ranks call
    different collectives, or when one was started that others never came to; `FdsError` inside another simulation.

    >>> from fds.collectives import mesh
    >>> simulate(lambda: mesh(dp=-1)["dp"].exchange("hello"), 2)
    [['hello', 'hello'], ['hello', 'hello']]
    """
    refuse_size(world_size)
    if worlds.simulated.get() is not None:
        raise FdsError("a simulated rank cannot simulate", got="simulate inside simulate", want="one of them")
    hub = Hub()

    def body(world: SimulatedWorld) -> T:
        worlds.simulated.set(world)
        return fn()

    ranks = [SimulatedWorld(rank, world_size, hub) for rank in range(world_size)]
    with random.exclusive():  # turns exchange the default generator; the ranks' threads run in copies of this context
        hub.turns = Turns([lambda world=world: body(world) for world in ranks])
        try:
            results = hub.turns.run()
        finally:
            hub.turns = None
    hub.refuse_unmet()
    return results
