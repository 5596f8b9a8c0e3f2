"""A collective as data, the work that it starts, the link that carries it, and what all ranks compute alike."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import FdsError, RankError


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

    def rehearse(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Do what `start` does on this rank alone, in the memory that it takes, as if all ranks had its values."""
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


COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

# Up to these sizes every rank sends its whole vector to all others, and each reduces all of them. Beyond, each rank
# reduces one piece and then sends it to all: two phases, of which only the first overlaps with the caller's work. Two
# gloo ranks send as much either way: 0.30 against 0.55 ms at 64 KB, 0.46 against 0.61 at 256 KB, 1.02 against 1.18 at
# 1 MB, 7.7 either way at 8 MB and 52 at 64 MB (gloo's own: 0.60, 0.81, 1.3, 7.9, 56); on a busy machine 3.3 against 7.8
# at 1 MB, 7 against 9 at 4 MB, 42 against 43 at 25 MB. Pieces need half the scratch.
EXCHANGED_BYTES = 1 << 18
EXCHANGED_BYTES_OF_TWO = 1 << 25


def is_exchanged(collective: Collective, size: int) -> bool:
    """Return whether an all_reduce between `size` ranks exchanges whole vectors."""
    return collective.num_bytes <= (EXCHANGED_BYTES_OF_TWO if size == 2 else EXCHANGED_BYTES)


def bounds(length: int, size: int, index: int) -> tuple[int, int]:
    """Return the start and end of piece `index` of `length` elements; sizes of pieces differ by at most one."""
    return index * length // size, (index + 1) * length // size


def bytes_sent(collective: Collective, size: int, index: int) -> int:
    """Return the bytes that this rank sends in a collective, by direct messages between ranks as over gloo.

    For an input of n bytes and N ranks: all_gather n (N - 1); reduce_scatter n (N - 1) for an output of n bytes;
    all_to_all n (N - 1) / N; all_reduce 2 n (N - 1) / N, or n (N - 1) up to 256 KiB; broadcast n (N - 1) at the source;
    send n. NCCL's rings send the same, except for small all_reduces, where they send 2 n (N - 1) / N.
    """
    others, n = size - 1, collective.num_bytes
    match collective.op:
        case "all_reduce" if not is_exchanged(collective, size):
            low, high = bounds(math.prod(collective.shape), size, index)
            piece = (high - low) * collective.dtype.itemsize
            return n - piece + piece * others
        case "all_to_all":
            return n // size * others
        case "broadcast":
            return n * others if index == collective.peer else 0
        case "send":
            return n
        case "recv":
            return 0
    return n * others


def reduce_in_rank_order(parts: list[Tensor], out: Tensor, how: str = "sum", spare: Tensor | None = None) -> None:
    """Write ((p0 + p1) + p2) + ... into `out`; 16-bit sums are taken in float32 and rounded once.

    `out` may be one of the parts. If it is p0 or p1, it accumulates the sum; if it is a later one, which must not be
    overwritten before it is read, `spare` does, which may be p0.
    """
    combine = COMBINE[how]
    if len(parts) > 2 and how == "sum" and tree.is_low(out):
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    late = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = out if not late else torch.empty_like(out) if spare is None else spare
    combine(parts[0], parts[1], out=total)
    for part in parts[2:-1]:
        combine(total, part, out=total)
    if len(parts) > 2:
        combine(total, parts[-1], out=out)


def fingerprint(value: object) -> str:
    """Return 16 hexadecimal digits of a hash of `str(value)`: values of other texts have other digits.

    The text must be the same on every rank and in every process, so not the default one, which holds an address.
    """
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()


# In a thread that runs a call dry: what is left of the exchanges that were heard when it last ran in earnest.
# Where none ran, `ALIKE`: all ranks are taken to say what this one does.
dry: ContextVar[Iterator[Exchange] | None] = ContextVar("fds_dry", default=None)
ALIKE: Iterator[Exchange] = iter(())


def replay(heard: Iterator[Exchange], collective: Collective, alike: list[Any]) -> list[Any]:
    """Return what all ranks said in the next exchange that was heard. Raises `FdsError` where that was another."""
    if heard is ALIKE:
        return alike
    exchange = next(heard, None)
    if exchange is None or exchange.collective != collective:
        raise FdsError(
            "a dry run takes another course than the call did",
            got=str(collective),
            want="no exchange" if exchange is None else str(exchange.collective),
        )
    return copy.deepcopy(exchange.replies)


def on_one_rank(collective: Collective, out: Tensor, x: Tensor, index: int, size: int) -> Work:
    """Write what a collective would where all ranks had the values of this one; what is received stays as it is."""
    if collective.op == "all_reduce" and collective.how == "sum":
        out.mul_(size)
    elif collective.op == "reduce_scatter":
        out.copy_(x.chunk(size)[index]).mul_(size)
    elif collective.op in ("all_gather", "all_to_all"):
        for piece in out.chunk(size):
            piece.copy_(x if collective.op == "all_gather" else x.chunk(size)[index])
    return DONE
