"""Calls: one collective as data, what is waited for, and what a link must do."""

from __future__ import annotations

import math
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fds.errors import RankError


@attrs.frozen
class Call:
    """One collective as every rank of the axis must see it; what is compared between ranks and shown in errors."""

    op: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "recv", ...
    axis: str  # name of the axis
    shape: tuple[int, ...] = ()  # of what a rank gives; of reduce_scatter, of what it gets
    dtype: torch.dtype = torch.uint8
    how: str = ""  # of all_reduce: "sum", "max", "min"; of exchange: what for
    peer: int = -1  # coordinate: of broadcast the source, of send and recv the other rank

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
    """A collective that was started; it keeps the tensors that it was given alive until it is waited for."""

    def wait(self) -> None:
        """Wait until the results are there. Raises `RankError` if a rank died, hung or does something else."""

    def done(self) -> bool:
        """Say whether `wait` is known to return at once; over gloo that is known only after it has."""
        ...


class Link(Protocol):
    """What carries the messages of one axis: in memory, over gloo, over NCCL."""

    def start(self, call: Call, out: Tensor, x: Tensor) -> Work:
        """Start a collective that reads `x` and writes `out`, contiguous tensors. `x` may be (a part of) `out`."""
        ...

    def exchange(self, call: Call, text: str) -> list[str]:
        """Return the texts of all ranks, in the axis' order."""
        ...


@attrs.frozen
class Done:
    """The work of an axis of one rank: there is none."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


DONE = Done()


def different(where: str, calls: dict[int, str]) -> RankError:
    """Return the error for ranks, by number, that started these different calls and met in them."""
    return RankError(
        "the ranks do different things", where=where,
        got="\n".join(f"rank {rank}: {call}" for rank, call in calls.items()),
        want="the same collectives, in the same order, with the same shapes and dtypes",
    )  # fmt: skip


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Say whether two contiguous tensors of one size are the same elements."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
