"""Axis: the ranks along one direction of a mesh, and the collectives among them, in place and asynchronous."""

from __future__ import annotations

import itertools
import json
import weakref
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.collectives import worlds
from fds.collectives.calls import DONE, Call, Link, Work, same_memory
from fds.collectives.reductions import COMBINE
from fds.collectives.worlds import World
from fds.errors import FdsError, MeshError

_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Axis] = weakref.WeakValueDictionary()


@attrs.frozen
class Axis:
    """The ranks that differ from this one along one axis of a mesh (or several, flattened).

    `start_*` writes into the memory that it is given and returns at once; nobody may write to what it reads, or use
    what it writes, before `wait`. Ranks are matched by the order in which they start collectives on an axis, and
    wait for them in that order. On an axis
    of one rank nothing happens. Equal axes are the same ranks under the same name in the same world.
    """

    world: World = attrs.field(repr=False)
    name: str
    ranks: tuple[int, ...]  # of the world, in the axis' order
    index: int  # this rank's coordinate
    mesh: Any = attrs.field(eq=False, repr=False)
    link: Link | None = attrs.field(eq=False, repr=False)  # None on an axis of one rank
    handle: int = attrs.field(eq=False, repr=False, init=False, factory=_handles.__next__)

    def __attrs_post_init__(self) -> None:
        _by_handle[self.handle] = self

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        """The device whose tensors this rank sends: a GPU under NCCL, else the CPU."""
        return self.world.device

    @property
    def timeout(self) -> float:
        """How many seconds a rank waits for another, infinity where that is not limited."""
        return self.world.timeout

    def channel(self, name: str) -> Axis:
        """Return the same ranks with an order of collectives of their own, which others cannot get between.

        Under NCCL that is another group, so all ranks ask for it.
        """
        link = None if self.link is None else self.world.link(self.ranks, None, name)
        return attrs.evolve(self, link=link)

    @property
    def is_current(self) -> bool:
        """Whether the ranks that run now are those that ran when the mesh was made."""
        return self.world is worlds.current()

    def demand_current(self) -> None:
        """Raise `MeshError` if other ranks are running now than when the mesh was made."""
        if not self.is_current:
            raise MeshError(
                "this axis is of other ranks than those that run now", got=f"axis {self.name!r} of {self.size} ranks",
                want="a mesh made here", hint="make it after fds.init_distributed(), or inside the function that "
                "fds.simulate runs",
            )  # fmt: skip

    def start_all_gather(self, out: Tensor, part: Tensor) -> Work:
        """Gather the parts (n,) of all ranks into `out` (size * n,); `part` may be its own place in `out`."""
        if self.link is None:
            return _alone(out, part)
        self._refuse("all_gather", out, part, len(out) == self.size * len(part))
        return self._start(Call("all_gather", self.name, tuple(part.shape), part.dtype), out, part)

    def start_reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        """Sum the pieces number `index` of every rank's `whole` (size * n,) into `out` (n,), which may be that piece.

        Over gloo and simulated the order is the ranks', and 16-bit sums are taken in float32 and rounded once.
        """
        if self.link is None:
            return _alone(out, whole)
        self._refuse("reduce_scatter", out, whole, len(whole) == self.size * len(out))
        return self._start(Call("reduce_scatter", self.name, tuple(out.shape), out.dtype), out, whole)

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Work:
        """Reduce `x` over the ranks in place by "sum", "max" or "min"; the same bits on every rank."""
        if op not in COMBINE:
            raise FdsError("no such reduction", got=repr(op), want=", ".join(COMBINE))
        if self.link is None:
            return DONE
        self._refuse("all_reduce", x, x, True)
        return self._start(Call("all_reduce", self.name, tuple(x.shape), x.dtype, how=op), x, x)

    def start_broadcast(self, x: Tensor, source: int) -> Work:
        """Write the `x` of the rank with coordinate `source` into everybody's `x`."""
        self._refuse_coordinate(source)
        if self.link is None:
            return DONE
        self._refuse("broadcast", x, x, True)
        return self._start(Call("broadcast", self.name, tuple(x.shape), x.dtype, peer=source), x, x)

    def start_all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Send piece i of `x` to rank i: equal pieces of dim 0, which arrive in the order of the ranks in `out`."""
        if self.link is None:
            return _alone(out, x)
        self._refuse("all_to_all", out, x, out.shape == x.shape and x.dim() > 0 and len(x) % self.size == 0)
        return self._start(Call("all_to_all", self.name, tuple(x.shape), x.dtype), out, x)

    def start_send(self, x: Tensor, to: int) -> Work:
        """Send `x` to the rank with coordinate `to`, which receives it by its `start_recv`."""
        self._refuse_coordinate(to, others=True)
        self._refuse("send", x, x, True)
        return self._start(Call("send", self.name, tuple(x.shape), x.dtype, peer=to), x, x)

    def start_recv(self, x: Tensor, source: int) -> Work:
        """Receive into `x` what the rank with coordinate `source` sends."""
        self._refuse_coordinate(source, others=True)
        self._refuse("recv", x, x, True)
        return self._start(Call("recv", self.name, tuple(x.shape), x.dtype, peer=source), x, x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks in new memory; `x` itself on an axis of one rank. No gradient."""
        if self.link is None:
            return x
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.start_all_reduce(total).wait()
        return total

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.link is not None:
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._start(Call("barrier", self.name, (1,)), token, token).wait()

    def exchange(self, obj: Any, what: str = "") -> list[Any]:
        """Return the JSON values that the ranks passed, in order: for agreement on structure, on the host.

        `what` says what for. Raises `RankError` where ranks exchange values for different things.
        """
        if self.link is None:
            return [obj]
        text = json.dumps(obj)
        self._count(Call("exchange", self.name, (len(text),)))
        return [json.loads(other) for other in self.link.exchange(Call("exchange", self.name, how=what), text)]

    def _start(self, call: Call, out: Tensor, x: Tensor) -> Work:
        assert self.link is not None
        self._count(call)
        flat = lambda t: t.detach().view(-1)
        a = flat(out)
        return self.link.start(call, a, a if x is out else flat(x))

    def _count(self, call: Call) -> None:
        for traffic in self.world.counters:
            traffic.add(call, self.size, self.index)

    def _refuse(self, op: str, out: Tensor, x: Tensor, fits: bool) -> None:
        """Raise `FdsError` for tensors that cannot be sent or do not fit."""
        one = op in ("all_gather", "reduce_scatter")
        if fits and x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype and not (one and x.dim() != 1):
            return
        got = f"{tuple(x.shape)} {x.dtype} into {tuple(out.shape)} {out.dtype}"
        strided = [t for t in (x, out) if not t.is_contiguous()]
        raise FdsError(
            f"these tensors cannot take part in {op}", where=f"axis {self.name!r}, {self.size} ranks",
            got=got + (f", strides {strided[0].stride()}" if strided else ""),
            want={"all_gather": f"(n,) into ({self.size} * n,)", "reduce_scatter": f"({self.size} * n,) into (n,)",
                  "all_to_all": f"({self.size} * n, ...) into the same shape"}.get(op, "a tensor")
            + ", contiguous, of one dtype",
        )  # fmt: skip

    def _refuse_coordinate(self, at: int, others: bool = False) -> None:
        if not 0 <= at < self.size or (others and at == self.index):
            raise FdsError("no such rank to talk to", where=f"axis {self.name!r}", got=f"coordinate {at}",
                           want=f"0 to {self.size - 1}" + (f", not {self.index} itself" if others else ""))  # fmt: skip


def of_handle(handle: int) -> Axis:
    """Return the axis that has this number."""
    return _by_handle[handle]


def _alone(out: Tensor, x: Tensor) -> Work:
    if not same_memory(out, x):
        out.detach().copy_(x.detach())
    return DONE
