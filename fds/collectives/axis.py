"""Axis: the ranks along one direction of a mesh, and the collectives among them, in place and asynchronous."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives.links import COMBINE, DONE, Collective, Exchange, Link, Work, dry, replay
from fds.collectives.worlds import World
from fds.errors import FdsError, MeshError

_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Axis] = weakref.WeakValueDictionary()


class _Now(threading.local):  # torch.compile traces no `ContextVar`
    alone: bool = False


_now = _Now()


@contextlib.contextmanager
def alone() -> Generator[None]:
    """Let every axis be one of a single rank in this thread: a loss that looks at an axis runs as on one rank.

    Axes must not be made meanwhile.
    """
    before, _now.alone = _now.alone, True
    try:
        yield
    finally:
        _now.alone = before


@attrs.frozen(repr=False)
class Axis:
    """The ranks that differ from this one only along one axis of a mesh (or several, flattened).

    `start_*` returns at once and writes into the tensors passed; until `wait` returns, its input must not be written to
    and its output not be used. All ranks must start the collectives of an axis in the same order, and wait for them in
    that order. On an axis of one rank they do nothing. Axes are equal if they have the same ranks and the same name in
    the same world.
    """

    world: World
    name: str
    ranks: tuple[int, ...]  # in the world, in the order of the axis
    _index: int = attrs.field(alias="index")
    mesh: Any = attrs.field(eq=False)
    _link: Link | None = attrs.field(eq=False, alias="link")
    purpose: str = attrs.field(default="", eq=False)  # of its collectives: see `used_for`
    handle: int = attrs.field(eq=False, init=False, factory=_handles.__next__)

    def __attrs_post_init__(self) -> None:
        _by_handle[self.handle] = self

    def __repr__(self) -> str:
        return f"Axis(name={self.name!r}, ranks={self.ranks}, index={self._index})"

    def __deepcopy__(self, memo: dict) -> Axis:
        """Return the axis itself: copies of a module that communicates do so along the same axis."""
        return self

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if _now.alone else len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's coordinate."""
        return 0 if _now.alone else self._index

    @property
    def device(self) -> torch.device:
        """The device of the tensors that collectives take: a GPU with NCCL, else the CPU."""
        return self.world.device

    @property
    def timeout(self) -> float:
        """For how many seconds a rank waits for others; infinity without a limit."""
        return self.world.timeout

    def channel(self, name: str) -> Axis:
        """Return an axis of the same ranks whose collectives are matched independently of this one's.

        With NCCL it is another process group, so all ranks must call this.
        """
        link = None if self._link is None else self.world.link(self.ranks, None, name)
        return attrs.evolve(self, link=link, purpose=name)

    def used_for(self, purpose: str) -> Axis:
        """Return the same axis for a purpose, such as "gather", under which `fds.messages` shows its collectives."""
        return attrs.evolve(self, purpose=purpose)

    @property
    def is_current(self) -> bool:
        """Whether the current world is the one in which the mesh was made."""
        return self.world.is_current

    def check_current(self) -> None:
        """Raise `MeshError` if the current world is not the one in which the mesh was made."""
        if not self.is_current:
            raise MeshError(
                "this axis belongs to other ranks than those that are running",
                got=f"axis {self.name!r} of {self.size} ranks",
                want="a mesh made here",
                hint="make it after fds.init_distributed(), or inside the function that fds.simulate runs",
            )

    def start_all_gather(self, out: Tensor, part: Tensor) -> Work:
        """Gather the parts (n,) of all ranks into `out` (size * n,); `part` may be a view of its place in `out`."""
        if self._link is None or _now.alone:
            return _alone(out, part)
        self._check("all_gather", out, part, len(out) == self.size * len(part))
        return self._start("all_gather", part, out, part)

    def start_reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        """Sum piece `index` of every rank's `whole` (size * n,) into `out` (n,), which may be a view of that piece.

        With gloo and in simulations sums are taken in rank order, those of 16 bits in float32 and rounded once.
        """
        if self._link is None or _now.alone:
            return _alone(out, whole)
        self._check("reduce_scatter", out, whole, len(whole) == self.size * len(out))
        return self._start("reduce_scatter", out, out, whole)

    def start_all_reduce(self, x: Tensor, op: str = "sum", *, what: str = "") -> Work:
        """Reduce `x` over the ranks in place by an `op`, "sum", "max" or "min"; all ranks get the same bits.

        `what` it is for, unless that is what the axis is used for, is shown by `fds.messages`.
        Raises `FdsError` for another `op`.
        """
        if op not in COMBINE:
            raise FdsError("no such reduction", got=repr(op), want=", ".join(COMBINE))
        if self._link is None or _now.alone:
            return DONE
        self._check("all_reduce", x, x, True)
        return self._start("all_reduce", x, x, x, how=op, what=what)

    def start_broadcast(self, x: Tensor, source: int) -> Work:
        """Copy the `x` of the rank with coordinate `source` to the `x` of all ranks."""
        self._check_coordinate(source)
        if self._link is None or _now.alone:
            return DONE
        self._check("broadcast", x, x, True)
        return self._start("broadcast", x, x, x, peer=source)

    def start_all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Send piece i of `x` (equal pieces of dim 0) to rank i; `out` receives the pieces in rank order."""
        if self._link is None or _now.alone:
            return _alone(out, x)
        self._check("all_to_all", out, x, out.shape == x.shape and x.dim() > 0 and len(x) % self.size == 0)
        return self._start("all_to_all", x, out, x)

    def start_send(self, x: Tensor, to: int) -> Work:
        """Send `x` to the rank with coordinate `to`, which calls `start_recv`."""
        self._check_coordinate(to, others=True)
        self._check("send", x, x, True)
        return self._start("send", x, x, x, peer=to)

    def start_recv(self, x: Tensor, source: int) -> Work:
        """Receive the tensor that the rank with coordinate `source` sends into `x`."""
        self._check_coordinate(source, others=True)
        self._check("recv", x, x, True)
        return self._start("recv", x, x, x, peer=source)

    def all_reduce(self, x: Tensor, *, what: str = "") -> Tensor:
        """Return the sum of `x` over the ranks in new memory; `x` itself on an axis of one rank. No gradient."""
        if self._link is None or _now.alone:
            return x
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.start_all_reduce(total, what=what).wait()
        return total

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self._link is not None and not _now.alone:
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._start("barrier", token, token, token).wait()

    def exchange(self, obj: Any, what: str = "") -> list[Any]:
        """Return the JSON values of all ranks, in order. It runs on the host, for ranks to agree on structure.

        `what` names the purpose. Raises `RankError` if the ranks exchange values for different purposes.
        """
        if self._link is None or _now.alone:
            return [obj]
        link, text = self._link, json.dumps(obj)
        sent = Collective("exchange", self.name, (len(text),), how=what, what=what or self.purpose)
        alike = attrs.evolve(sent, shape=())  # lengths differ between ranks
        return self._exchange(sent, Exchange(alike, lambda: list(map(json.loads, link.exchange(alike, text)))), obj)

    def exchange_numbers(self, numbers: Sequence[int], what: str = "") -> list[list[int]]:
        """Return the numbers of all ranks, as many on each and of 64 bits, in order: `exchange` in one small message.

        It runs on the host and waits for no device. Raises `RankError` as `exchange` does.
        """
        if self._link is None or _now.alone:
            return [list(numbers)]
        link, shape = self._link, (self.size, len(numbers))
        sent = Collective("all_gather", self.name, shape[1:], torch.int64, what, what=what or self.purpose)

        def send() -> list[list[int]]:
            mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            everyones = torch.empty(shape, dtype=torch.int64, device="cpu")
            link.start(sent, everyones.view(-1), mine).wait()
            return tree.values_of(everyones)

        return self._exchange(sent, Exchange(sent, send), list(numbers))

    def _exchange(self, sent: Collective, exchange: Exchange, mine: Any) -> list[Any]:
        if (heard := dry.get()) is not None:
            self._rehearsed(sent, DONE).wait()
            return replay(heard, exchange.collective, [mine] * self.size)
        self._count(sent)
        self._watch(sent, exchange).wait()
        return exchange.replies

    def _start(
        self, op: str, like: Tensor, out: Tensor, x: Tensor, *, how: str = "", peer: int = -1, what: str = ""
    ) -> Work:
        """Start a collective that is known by the shape and dtype of `like`."""
        assert self._link is not None
        kind, on_gpu = what or self.purpose, x.is_cuda
        collective = Collective(op, self.name, tuple(like.shape), like.dtype, how, peer, kind, on_gpu)
        flat = lambda t: t.detach().view(-1)
        a = flat(out)
        b = a if x is out else flat(x)
        if dry.get() is not None:
            return self._rehearsed(collective, self._link.rehearse(collective, a, b))
        self._count(collective)
        return self._watch(collective, self._link.start(collective, a, b))

    def _watch(self, collective: Collective, work: Work) -> Work:
        for traffic in self.world.counters:
            work = traffic.watched(collective, work)
        return work

    def _rehearsed(self, collective: Collective, work: Work) -> Work:
        for traffic in self.world.counters:
            work = traffic.rehearsed(collective, self, work)
        return work

    def _count(self, collective: Collective) -> None:
        for traffic in self.world.counters:
            traffic.add(collective, self)

    def _check(self, op: str, out: Tensor, x: Tensor, fits: bool) -> None:
        """Raise `FdsError` for tensors that cannot be sent or do not fit."""
        flat = op in ("all_gather", "reduce_scatter")
        if fits and x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype and not (flat and x.dim() != 1):
            return
        got = f"{tuple(x.shape)} {x.dtype} into {tuple(out.shape)} {out.dtype}"
        strided = [t for t in (x, out) if not t.is_contiguous()]
        raise FdsError(
            f"these tensors cannot take part in {op}",
            where=f"axis {self.name!r}, {self.size} ranks",
            got=got + (f", strides {strided[0].stride()}" if strided else ""),
            want={
                "all_gather": f"(n,) into ({self.size} * n,)",
                "reduce_scatter": f"({self.size} * n,) into (n,)",
                "all_to_all": f"({self.size} * n, ...) into the same shape",
            }.get(op, "a tensor")
            + ", contiguous, of one dtype",
        )

    def _check_coordinate(self, at: int, others: bool = False) -> None:
        if not 0 <= at < self.size or (others and at == self._index):
            raise FdsError(
                "no such rank to communicate with",
                where=f"axis {self.name!r}",
                got=f"coordinate {at}",
                want=f"0 to {self.size - 1}" + (f", not {self.index} itself" if others else ""),
            )


def of_handle(handle: int) -> Axis:
    """Return the axis with this handle."""
    return _by_handle[handle]


def _alone(out: Tensor, x: Tensor) -> Work:
    if out.data_ptr() != x.data_ptr():
        out.detach().copy_(x.detach())
    return DONE
