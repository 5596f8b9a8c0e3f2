"""`simulate`: many ranks in one process, whose collectives run when the last rank has started them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import attrs
import torch

from fds import random
from fds.collectives import worlds
from fds.collectives.links import Collective, Link, Work, different, on_one_rank, reduce_in_rank_order, same_memory
from fds.collectives.turns import Turns, check_size
from fds.errors import FdsError, RankError

# Whether this thread runs a collective for all of its ranks: the memory that it reads and writes then is theirs too.
performing: ContextVar[bool] = ContextVar("fds_performing", default=False)


@attrs.define(eq=False)
class Rendezvous:
    """One collective, and the ranks that have started it."""

    ranks: tuple[int, ...]
    expected: tuple[int, ...]  # coordinates
    title: str  # its number, in words
    arrived: dict[int, tuple[Collective, Any, Any]] = attrs.field(factory=dict)  # coordinate -> collective, out, input
    over: bool = False

    def describe(self, collective: Collective) -> str:
        """Return a description of what a rank waits for."""
        missing = [str(self.ranks[i]) for i in self.expected if i not in self.arrived]
        return f"{collective}, {self.title}, for rank{'s' * (len(missing) > 1)} {', '.join(missing)}"


class Hub:
    """All collectives that some but not all ranks have started."""

    def __init__(self) -> None:
        self.turns: Turns | None = None  # while ranks run
        self.pending: dict[tuple, Rendezvous] = {}

    def join(
        self, key: tuple, rendezvous: Rendezvous, index: int, collective: Collective, out: Any, x: Any
    ) -> Rendezvous:
        """Start a collective on one rank; the last rank runs it for all. Raises `RankError` on a mismatch."""
        if self.turns is None:
            raise RankError(
                "this simulation is over", where=str(collective), want="a mesh made inside the simulated function"
            )
        rendezvous = self.pending.setdefault(key, rendezvous)
        for other, (theirs, _, _) in rendezvous.arrived.items():
            if _comparable(theirs) != _comparable(collective):
                started = {rendezvous.ranks[other]: str(theirs), rendezvous.ranks[index]: str(collective)}
                raise different(f"axis {collective.axis!r}, {rendezvous.title}", started)
        rendezvous.arrived[index] = (collective, out, x)
        if len(rendezvous.arrived) == len(rendezvous.expected):
            del self.pending[key]
            token = performing.set(True)
            try:
                with torch.no_grad():
                    _perform(collective, *zip(*(rendezvous.arrived[i][1:] for i in rendezvous.expected), strict=True))
            finally:
                performing.reset(token)
            rendezvous.over = True
            rendezvous.arrived.clear()
        return rendezvous

    def check_complete(self) -> None:
        """Raise `RankError` for collectives that some ranks never started."""
        if self.pending:
            lines = [
                f"rank {r.ranks[i]} started {r.describe(collective)}"
                for r in self.pending.values()
                for i, (collective, _, _) in r.arrived.items()
            ]
            raise RankError(
                "all ranks have ended, and some collectives were not started by all",
                got="\n".join(lines),
                want="every rank of an axis to start the same collectives",
            )


class MemoryLink:
    """The link of one axis of a simulated rank."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...], index: int, channel: str = ""):
        self.hub, self.ranks, self.index, self.channel = hub, ranks, index, channel
        self.count = 0
        self.direct: defaultdict[tuple[int, int], int] = defaultdict(int)  # (from, to) -> number of messages

    def start(self, collective: Collective, out: Any, x: Any) -> Work:
        """Start a collective."""
        if collective.op in ("send", "recv"):
            pair = (self.index, collective.peer) if collective.op == "send" else (collective.peer, self.index)
            self.direct[pair] += 1
            key, expected = (self.channel, self.ranks, pair, self.direct[pair]), pair
            title = f"message {self.direct[pair]} from {pair[0]} to {pair[1]}"
        else:
            self.count += 1
            key, expected = (self.channel, self.ranks, self.count), tuple(range(len(self.ranks)))
            title = f"number {self.count}"
        rendezvous = self.hub.join(key, Rendezvous(self.ranks, expected, title), self.index, collective, out, x)
        return _MemoryWork(self, collective, rendezvous)

    def rehearse(self, collective: Collective, out: Any, x: Any) -> Work:
        """Write what a collective would where all ranks had the values of this one."""
        return on_one_rank(collective, out, x, self.index, len(self.ranks))

    def exchange(self, collective: Collective, text: str) -> list[str]:
        """Return the texts of all ranks."""
        texts: list[str] = []
        self.start(collective, texts, text).wait()
        return texts


@attrs.frozen(eq=False)
class _MemoryWork:
    """A collective that a simulated rank has started."""

    link: MemoryLink
    collective: Collective
    rendezvous: Rendezvous

    def wait(self) -> None:
        turns = self.link.hub.turns
        assert turns is not None or self.done()
        if turns is not None:
            turns.wait(self.link.ranks[self.link.index], self.done, lambda: self.rendezvous.describe(self.collective))

    def done(self) -> bool:
        return self.rendezvous.over


def _comparable(collective: Collective) -> Collective:
    direct = collective.op in ("send", "recv")
    return attrs.evolve(collective, op="send and recv", peer=-1) if direct else collective


def _perform(collective: Collective, outs: tuple, xs: tuple) -> None:
    """Run a collective. `outs` and `xs` are in the order of the axis."""
    size = len(xs)
    match collective.op:
        case "all_gather":
            _copy([list(out.chunk(size)) for out in outs], [list(xs)] * size)
        case "reduce_scatter":
            pieces = [x.chunk(size) for x in xs]
            for i, out in enumerate(outs):
                reduce_in_rank_order([piece[i] for piece in pieces], out)
        case "all_reduce":
            total = torch.empty_like(xs[0])
            reduce_in_rank_order(list(xs), total, collective.how)
            _copy([list(xs)], [[total] * size])
        case "all_to_all":
            _copy([list(out.chunk(size)) for out in outs], zip(*(x.chunk(size) for x in xs), strict=True))
        case "broadcast":
            _copy([list(outs)], [[xs[collective.peer]] * size])
        case "send" | "recv":
            _copy([[outs[1]]], [[xs[0]]])
        case "exchange":
            for texts in outs:
                texts.extend(xs)


def _copy(outs: Any, sources: Any) -> None:
    for row, source in zip(outs, sources, strict=True):
        for out, x in zip(row, source, strict=True):
            if not same_memory(out, x):
                out.copy_(x)


T = TypeVar("T")


@attrs.define(eq=False, slots=False)
class SimulatedWorld(worlds.World):
    """The ranks of one call of `simulate`, as one of them sees them; collectives take tensors of any device."""

    hub: Hub = attrs.field(kw_only=True)
    links: dict[tuple, MemoryLink] = attrs.field(factory=dict, kw_only=True)

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

    ranks = [SimulatedWorld(rank, world_size, torch.get_default_device(), hub=hub) for rank in range(world_size)]
    with random.exclusive():  # ranks swap the default generators; their threads run in copies of this context
        hub.turns = Turns([lambda world=world: body(world) for world in ranks])
        try:
            results = hub.turns.run()
        finally:
            hub.turns = None
    hub.check_complete()
    return results
