"""A collective as data, the work that it starts, and the link that carries it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds.errors import RankError


@attrs.frozen
class Collective:
    """A collective that a rank starts: its operation and arguments, compared between ranks and shown in errors."""

    op: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "recv", ...
    axis: str  # name of the axis
    shape: tuple[int, ...] = ()  # of a rank's input; of its output for reduce_scatter
    dtype: torch.dtype = torch.uint8
    how: str = ""  # for all_reduce "sum", "max" or "min"; for exchange its purpose
    peer: int = -1  # a coordinate: the source of broadcast, the other rank of send and recv
    what: str = attrs.field(default="", eq=False)  # its purpose, as `fds.messages` shows it
    on_gpu: bool = attrs.field(default=False, eq=False)  # whether a stream of a GPU waits for it, not the host

    @property
    def num_bytes(self) -> int:
        """Bytes of a tensor of this shape."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        words = {"send": f" to {self.peer}", "recv": f" from {self.peer}", "broadcast": f" from {self.peer}"}
        how = f" ({self.how})" if self.how else words.get(self.op, "")
        if self.op == "exchange":
            return f"exchange{how} on axis {self.axis!r}"
        return f"{self.op}{how} of {self.shape} {str(self.dtype).removeprefix('torch.')} on axis {self.axis!r}"


class Work(Protocol):
    """A collective that was started; it keeps its tensors alive until `wait`."""

    def wait(self) -> None:
        """Wait for the result. Raises `RankError` if a rank died, hung or started another collective."""

    def done(self) -> bool:
        """Return whether `wait` is known to return at once; with gloo that is known only after `wait`."""
        ...


class Link(Protocol):
    """The transport of one axis: in memory, gloo or NCCL."""

    def start(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Start a collective that reads `x` and writes `out`, contiguous tensors. `x` may be (a part of) `out`."""
        ...

    def exchange(self, collective: Collective, text: str) -> list[str]:
        """Return the texts of all ranks, in the order of the axis."""
        ...


@attrs.define(eq=False)
class Exchange:
    """Values on the host that all ranks send each other while this one waits."""

    collective: Collective
    send: Callable[[], list[Any]]  # returns those of all, in the order of the axis
    replies: list[Any] = attrs.field(factory=list)

    def wait(self) -> None:
        """Exchange the values. Raises `RankError`."""
        self.replies = self.send()

    def done(self) -> bool:
        """Return False: it begins when it is waited for."""
        return False


@attrs.frozen
class Done:
    """The `Work` of a collective on one rank, which has nothing to do."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


DONE = Done()


def different(where: str, calls: dict[int, str]) -> RankError:
    """Return the error for ranks (by number) that started different collectives where they should be the same."""
    return RankError(
        "the ranks started different collectives",
        where=where,
        got="\n".join(f"rank {rank}: {collective}" for rank, collective in calls.items()),
        want="the same collectives, in the same order, with the same shapes and dtypes",
    )


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors are the same memory."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
