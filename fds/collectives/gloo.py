"""Gloo: every collective composed of messages between pairs of ranks, sums taken here, in rank order.

gloo's own reduce-scatter and all-gather of 64 MB took 99 and 74 ms on two ranks, messages and a local sum 30 and 24
(64 KB: 0.77 and 0.57 against 0.27 and 0.19). Messages travel over the one group of all ranks: an axis needs no group of
its own, only tags. `ProcessGroup.send` and `dist.isend` cost the same within noise; the former names its tag. Splitting
a message into 2 to 16 gained nothing at any size.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from fds.collectives.calls import Call, Work, different, same_memory
from fds.collectives.interrupts import Interruptible, was_closed
from fds.collectives.reductions import bounds, is_exchanged, reduce_in_rank_order
from fds.errors import FdsError, RankError

# parts of one running number: a collective, its second phase, a message, a phase of an exchange
COLLECTIVE, SECOND, DIRECT, EXCHANGE = 0, 1, 2, 3


class GlooLink:
    """One axis over a group of all ranks whose CPU tensors go through gloo."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int, channel: str = ""):
        self.group, self.ranks, self.index, self.size = group, ranks, index, len(ranks)
        self.count = 0  # collectives started
        # Exchanges are counted apart: ranks that are interrupted at different collectives can still say so.
        self.exchanges = 0
        self.sent, self.received = [0] * self.size, [0] * self.size  # sends and recvs started, by other rank
        # The same on all ranks of the axis whatever else each of them has made. Axes that share one match by order.
        self.number = 1 + _digest((ranks, channel) if channel else ranks, 2**13 - 1)
        self.scratch = Scratch()

    def start(self, call: Call, out: Tensor, x: Tensor) -> Work:
        """Start a collective. Raises `FdsError` for tensors that are not on the CPU."""
        if x.device.type != "cpu":
            raise FdsError("gloo carries tensors of the CPU", where=str(call), got=f"a tensor on {x.device}",
                           want="x.cpu()", hint='or fds.init_distributed("nccl")')  # fmt: skip
        if call.op in ("send", "recv"):
            counts = self.sent if call.op == "send" else self.received
            counts[call.peer] += 1
            messages, tag = Messages(self, call), self._tag(call, counts[call.peer], DIRECT)
            return messages.send(call.peer, x, tag) if call.op == "send" else messages.receive(call.peer, out, tag)
        self.count += 1
        tag = self._tag(call, self.count, COLLECTIVE)
        match call.op:
            case "all_gather":
                return self._all_gather(call, out.chunk(self.size), x, tag)
            case "reduce_scatter":
                return self._reduce_scatter(call, out, list(x.chunk(self.size)), "sum", tag)
            case "all_reduce" if is_exchanged(call, self.size):
                return self._exchange(call, x, tag)
            case "all_reduce":
                pieces = [x[slice(*bounds(len(x), self.size, i))] for i in range(self.size)]
                first = self._reduce_scatter(call, pieces[self.index], pieces, call.how, tag)
                second = self._tag(call, self.count, SECOND)
                return Chain(first, lambda: self._all_gather(call, pieces, pieces[self.index], second))
            case "all_to_all":
                return self._all_to_all(call, out.chunk(self.size), x.chunk(self.size), tag)
            case "broadcast":
                return self._broadcast(call, x, tag)
        assert call.op == "barrier", call
        return self._all_gather(call, x.new_empty(self.size).chunk(self.size), x, tag)

    def exchange(self, call: Call, text: str) -> list[str]:
        """Send a text to every rank, its length first. Raises `RankError` where the calls are different ones."""
        own = torch.frombuffer(bytearray(f"{call.how}\0{text}".encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        self.exchanges += 1
        length, first = torch.tensor([len(own)], device="cpu"), 2 * self.exchanges
        self._all_gather(call, lengths.chunk(self.size), length, self._tag(call, first, EXCHANGE)).wait()
        texts = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths.tolist()]
        self._all_gather(call, texts, own, self._tag(call, first + 1, EXCHANGE)).wait()
        heard = [x.numpy().tobytes().decode().split("\0", 1) for x in texts]
        if any(what != call.how for what, _ in heard):
            calls = {rank: str(attrs.evolve(call, how=what)) for rank, (what, _) in zip(self.ranks, heard, strict=True)}
            raise different(f"rank {self.ranks[self.index]}, axis {call.axis!r}", calls)
        return [said for _, said in heard]

    def _tag(self, call: Call, count: int, part: int) -> int:
        """Return 31 bits: 13 of the axis, 7 of what is called, 9 of its number, 2 of its part.

        Different calls get different tags, lest they take each other's bytes: their ranks end by timeout. Of calls that
        go both ways the size stays out, since gloo ends a process that is sent too much; too little it takes silently.
        """
        one_way = part == DIRECT or call.op == "broadcast"
        how = "" if part == EXCHANGE else call.how  # which exchange it is, its text says
        alike = ("direct" if part == DIRECT else call.op, how, str(call.dtype), call.shape if one_way else ())
        return self.number << 18 | _digest(alike, 2**7) << 11 | (count % 2**9) << 2 | part

    def _others(self) -> list[int]:
        """List the other ranks, each beginning with its successor, so that not all send to one."""
        return [(self.index + i) % self.size for i in range(1, self.size)]

    def _all_gather(self, call: Call, outs: Any, part: Tensor, tag: int) -> Messages:
        messages = Messages(self, call)
        for i in self._others():
            messages.receive(i, outs[i], tag).send(i, part, tag)
        if not same_memory(outs[self.index], part):
            outs[self.index].copy_(part)
        return messages

    def _reduce_scatter(self, call: Call, out: Tensor, pieces: list[Tensor], how: str, tag: int) -> Messages:
        messages, own = Messages(self, call), pieces[self.index]
        # Two ranks add in place what arrives; out serves as the memory for it unless it is the own piece.
        direct = self.size == 2 and not same_memory(out, own)
        received = {i: out if direct else messages.scratch(own) for i in self._others()}
        for i in self._others():
            messages.receive(i, received[i], tag).send(i, pieces[i], tag)
        parts = [received.get(i, own) for i in range(self.size)]
        messages.finish = lambda: reduce_in_rank_order(parts, out, how, spare=received.get(0))
        return messages

    def _exchange(self, call: Call, x: Tensor, tag: int) -> Messages:
        messages = Messages(self, call)
        received = {i: messages.scratch(x) for i in self._others()}
        for i in self._others():
            messages.receive(i, received[i], tag).send(i, x, tag)
        parts = [received.get(i, x) for i in range(self.size)]
        messages.finish = lambda: reduce_in_rank_order(parts, x, call.how, spare=received.get(0))
        return messages

    def _all_to_all(self, call: Call, outs: Any, pieces: Any, tag: int) -> Messages:
        messages = Messages(self, call)
        for i in self._others():
            messages.receive(i, outs[i], tag).send(i, pieces[i], tag)
        outs[self.index].copy_(pieces[self.index])
        return messages

    def _broadcast(self, call: Call, x: Tensor, tag: int) -> Messages:
        messages = Messages(self, call)
        if self.index != call.peer:
            return messages.receive(call.peer, x, tag)
        for i in self._others():
            messages.send(i, x, tag)
        return messages


class Scratch:
    """Memory for what arrives, kept from call to call: the first touch of fresh pages costs more than the messages."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []  # uint8

    def take(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory, and a tensor in it of the shape and dtype of `like`; the smallest that fits."""
        need = like.numel() * like.element_size()
        self.free.sort(key=Tensor.numel)
        fits = [i for i, memory in enumerate(self.free) if memory.numel() >= need]
        if fits:
            memory = self.free.pop(fits[0])
        else:  # so that there are never more than were in use at once
            del self.free[-1:]
            memory = torch.empty(need, dtype=torch.uint8, device="cpu")
        return memory, memory[:need].view(like.dtype).view(like.shape)


@attrs.define(eq=False)
class Messages:
    """Messages under way, and what is to be done when all have come."""

    link: GlooLink
    call: Call
    finish: Callable[[], None] | None = None
    under_way: list[tuple[int, Any]] = attrs.field(factory=list)  # (other rank, torch's work, which keeps the tensor)
    borrowed: list[Tensor] = attrs.field(factory=list)
    over: bool = False

    def send(self, to: int, x: Tensor, tag: int) -> Messages:
        """Send a tensor to a coordinate."""
        if x.numel():
            with self._named(to):
                self.under_way.append((to, self.link.group.send([x], self.link.ranks[to], tag)))
        return self

    def receive(self, source: int, out: Tensor, tag: int) -> Messages:
        """Receive a tensor from a coordinate."""
        if out.numel():
            with self._named(source):
                self.under_way.append((source, self.link.group.recv([out], self.link.ranks[source], tag)))
        return self

    def scratch(self, like: Tensor) -> Tensor:
        """Borrow memory until all is over."""
        memory, x = self.link.scratch.take(like)
        self.borrowed.append(memory)
        return x

    def wait(self) -> None:
        """Wait for every message, then finish. Raises `RankError`."""
        if self.over:
            return
        if self.under_way:
            with Interruptible(self.link.group, self.link.ranks[self.under_way[0][0]]):
                for peer, work in self.under_way:
                    with self._named(peer):
                        work.wait()
        if self.finish is not None:
            with torch.no_grad():
                self.finish()
        self.over, self.finish = True, None
        self.under_way.clear()
        self.link.scratch.free += self.borrowed
        self.borrowed.clear()

    def done(self) -> bool:
        """Say whether `wait` has returned: gloo's messages do not tell before."""
        return self.over

    def _named(self, peer: int) -> contextlib.AbstractContextManager:
        closed = functools.partial(was_closed, self.link.group)
        return naming(self.call, self.link.ranks, self.link.index, self.link.ranks[peer], closed)


@attrs.define(eq=False)
class Chain:
    """One collective after another: the second starts when the first is waited for."""

    first: Work
    then: Callable[[], Work] | None

    def wait(self) -> None:
        """Wait for both. Raises `RankError`."""
        if self.then is not None:
            self.first.wait()
            self.then().wait()
            self.then = None

    def done(self) -> bool:
        """Say whether `wait` has returned."""
        return self.then is None


@functools.lru_cache(maxsize=4096)
def _digest(data: tuple, modulus: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(data).encode(), digest_size=8).digest(), "little") % modulus


@contextlib.contextmanager
def naming(
    call: Call, ranks: tuple[int, ...], index: int, peer: int | None, closed: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Turn what torch raises in a collective that another rank broke, or Ctrl-C here (`closed`), into `RankError`."""
    try:
        yield
    except RuntimeError as error:
        if not _from_torch(error):
            raise
        if closed():
            raise RankError(
                "Ctrl-C was pressed while this rank waited for others, which ended its connections to them",
                where=f"rank {ranks[index]}, in {call}", want="all ranks to end", hint="go on from the last save",
            ) from error  # fmt: skip
        raise lost(call, ranks, index, peer, error) from error


def _from_torch(error: BaseException) -> bool:
    """Return whether the collective itself raised this, and not a handler of a signal that came while it waited.

    A `DataLoader` raises a RuntimeError in whatever runs when one of its workers dies. What is raised in C++ comes from
    a line of this package.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is None or last.tb_frame.f_globals.get("__package__") == __package__


def lost(call: Call, ranks: tuple[int, ...], index: int, peer: int | None, error: BaseException) -> RankError:
    """Return the error for a collective that failed because of another rank."""
    words = re.sub(r"\[/\S+\] ", "", str(error).strip().partition("\n")[0])  # without the source of gloo
    late = "imed out" in words or "imeout" in words
    who = f"rank {peer}" if peer is not None else "a rank"
    return RankError(
        f"{who} did not answer in time" if late else f"{who} was lost",
        where=f"rank {ranks[index]}, in {call}", got=words[:300],
        want=f"ranks {', '.join(map(str, ranks))} to take part",
        hint="fds.init_distributed(check=True) says which rank does what" if late else
        "look at the output of the rank that ended first",
    )  # fmt: skip
