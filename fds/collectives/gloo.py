"""Links over gloo: collectives composed of messages between pairs of ranks, and what is said of ranks that are lost.

The process group is torch.distributed's; sums are taken locally, in rank order. gloo's own reduce-scatter and
all-gather of 64 MB took 99 and 74 ms on two ranks, messages and a local sum 30 and 24 (64 KB: 0.77 and 0.57 against
0.27 and 0.19). All messages use one process group; an axis needs no group of its own, only tags.
`ProcessGroup.send` and `dist.isend` take the same time; the former has a tag argument. Splitting a message into 2 to 16
parts gained nothing at any size.
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

from fds.collectives.links import (
    DONE,
    Collective,
    Work,
    bounds,
    different,
    is_exchanged,
    reduce_in_rank_order,
    same_memory,
)
from fds.collectives.places import SILENT
from fds.collectives.waits import Interruptible, Label, Origin, Wait, everywhere, kind_of, origin, was_closed
from fds.errors import FdsError, RankError

# The kind of message in a tag: of a collective, of its second phase, of a send, of an exchange.
COLLECTIVE, SECOND, DIRECT, EXCHANGE = 0, 1, 2, 3


class GlooLink:
    """The link of one axis over a gloo group of all ranks."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int, channel: str = ""):
        self.group, self.ranks, self.index, self.size = group, ranks, index, len(ranks)
        self.count = 0  # collectives started
        # Counted separately, so that ranks interrupted at different collectives can still exchange texts about it.
        self.exchanges = 0
        self.sent, self.received = [0] * self.size, [0] * self.size  # sends and recvs started, by peer
        # Equal on all ranks of the axis, whichever other axes they have. Axes with the same number match by order.
        self.number = 1 + _digest((ranks, channel) if channel else ranks, 2**13 - 1)
        self.last: dict[int, tuple[str, str]] = {}  # what was sent to each rank last, beside collectives
        self.name = f"{_digest((ranks, channel), 2**60):x}"
        self.scratch = Scratch()
        self.alike: AlikeLink | None = None

    def rehearse(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Do on this rank what `start` does, in as much memory, without the others: see `Link`."""
        if self.alike is None:
            self.alike = AlikeLink(self.ranks, self.index)
        return self.alike.start(collective, out, x)

    def start(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Start a collective. Raises `FdsError` for tensors that are not on the CPU."""
        if x.device.type != "cpu":
            raise FdsError(
                "gloo carries tensors of the CPU",
                where=str(collective),
                got=f"a tensor on {x.device}",
                want="x.cpu()",
                hint='or fds.init_distributed("nccl")',
            )
        if collective.op in ("send", "recv"):
            counts = self.sent if collective.op == "send" else self.received
            counts[collective.peer] += 1
            messages, tag = self._messages(collective, x), self._tag(collective, counts[collective.peer], DIRECT)
            if collective.op == "send":
                return messages.send(collective.peer, x, tag)
            return messages.receive(collective.peer, out, tag)
        self.count += 1
        tag = self._tag(collective, self.count, COLLECTIVE)
        match collective.op:
            case "all_gather":
                return self._all_gather(collective, out.chunk(self.size), x, tag)
            case "reduce_scatter":
                return self._reduce_scatter(collective, out, list(x.chunk(self.size)), "sum", tag)
            case "all_reduce" if is_exchanged(collective, self.size):
                return self._exchange(collective, x, tag)
            case "all_reduce":
                pieces = [x[slice(*bounds(len(x), self.size, i))] for i in range(self.size)]
                first = self._reduce_scatter(collective, pieces[self.index], pieces, collective.how, tag)
                second = self._tag(collective, self.count, SECOND)
                return _Chain(first, lambda: self._spread(collective, pieces, second))
            case "all_to_all":
                return self._all_to_all(collective, out.chunk(self.size), x.chunk(self.size), tag)
            case "broadcast":
                return self._broadcast(collective, x, tag)
        assert collective.op == "barrier", collective
        return self._all_gather(collective, x.new_empty(self.size).chunk(self.size), x, tag)

    def _spread(self, collective: Collective, pieces: list[Tensor], tag: Label) -> Work:
        """Send this rank's piece of a sum to all, and receive theirs."""
        return self._all_gather(collective, pieces, pieces[self.index], tag)

    def _messages(self, collective: Collective, mine: Tensor) -> Messages:
        """Return messages to be started; `mine` is what this rank would be sent by one that has what it has."""
        return Messages(self, collective)

    def exchange(self, collective: Collective, text: str) -> list[str]:
        """Return the texts of all ranks; lengths are sent first. Raises `RankError` if their purposes differ."""
        mine = torch.frombuffer(bytearray(f"{collective.how}\0{text}".encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        self.exchanges += 1
        length, first = torch.tensor([len(mine)], device="cpu"), 2 * self.exchanges
        self._all_gather(collective, lengths.chunk(self.size), length, self._tag(collective, first, EXCHANGE)).wait()
        texts = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths.tolist()]
        self._all_gather(collective, texts, mine, self._tag(collective, first + 1, EXCHANGE)).wait()
        replies = [x.numpy().tobytes().decode().split("\0", 1) for x in texts]
        if any(how != collective.how for how, _ in replies):
            started = zip(self.ranks, (str(attrs.evolve(collective, how=how)) for how, _ in replies), strict=True)
            raise different(f"rank {self.ranks[self.index]}, axis {collective.axis!r}", dict(started))
        return [reply for _, reply in replies]

    def _tag(self, collective: Collective, count: int, part: int) -> Label:
        """Return a tag of 31 bits: 13 for the axis, 11 for the collective, 5 for its number, 2 for the kind of message.

        Different collectives, also of other shapes, get different tags, so that they do not receive each other's bytes:
        gloo ends a process that is sent more than it expects, and does not notice less. `waits` finds them out.
        """
        if part == EXCHANGE:  # sends its purpose in the text, and lengths first
            alike = (collective.op,)
        else:
            op = "direct" if part == DIRECT else collective.op
            alike = (op, collective.how, str(collective.dtype), collective.shape)
        tag = self.number << 18 | _digest(alike, 2**11) << 7 | (count % 2**5) << 2 | part
        return Label(tag, f"{part} {count} of {self.name}")

    def _others(self) -> list[int]:
        """Return the other ranks, starting with the successor, so that not all ranks send to the same one first."""
        return [(self.index + i) % self.size for i in range(1, self.size)]

    def _all_gather(self, collective: Collective, outs: Any, part: Tensor, tag: Label) -> Messages:
        messages = self._messages(collective, part)
        for i in self._others():
            messages.swap(i, outs[i], part, tag)
        if not same_memory(outs[self.index], part):
            outs[self.index].copy_(part)
        return messages

    def _reduce_scatter(
        self, collective: Collective, out: Tensor, pieces: list[Tensor], how: str, tag: Label
    ) -> Messages:
        mine = pieces[self.index]
        messages = self._messages(collective, mine)
        # On two ranks the piece received is added in place; `out` receives it unless it is this rank's own piece.
        direct = self.size == 2 and not same_memory(out, mine)
        received = {i: out if direct else messages.scratch(mine) for i in self._others()}
        for i in self._others():
            messages.swap(i, received[i], pieces[i], tag)
        parts = [received.get(i, mine) for i in range(self.size)]
        messages.finish = lambda: reduce_in_rank_order(parts, out, how, spare=received.get(0))
        return messages

    def _exchange(self, collective: Collective, x: Tensor, tag: Label) -> Messages:
        messages = self._messages(collective, x)
        received = {i: messages.scratch(x) for i in self._others()}
        for i in self._others():
            messages.swap(i, received[i], x, tag)
        parts = [received.get(i, x) for i in range(self.size)]
        messages.finish = lambda: reduce_in_rank_order(parts, x, collective.how, spare=received.get(0))
        return messages

    def _all_to_all(self, collective: Collective, outs: Any, pieces: Any, tag: Label) -> Messages:
        messages = self._messages(collective, pieces[self.index])
        for i in self._others():
            messages.swap(i, outs[i], pieces[i], tag)
        outs[self.index].copy_(pieces[self.index])
        return messages

    def _broadcast(self, collective: Collective, x: Tensor, tag: Label) -> Messages:
        messages = self._messages(collective, x)
        if self.index != collective.peer:
            return messages.receive(collective.peer, x, tag)
        for i in self._others():
            messages.send(i, x, tag)
        return messages


class Scratch:
    """A pool of receive buffers, since the page faults of new memory take longer than the messages."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []  # uint8

    def take(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest buffer that fits, and a tensor in it of the shape and dtype of `like`."""
        need = like.numel() * like.element_size()
        self.free.sort(key=Tensor.numel)
        fits = [i for i, memory in enumerate(self.free) if memory.numel() >= need]
        if fits:
            memory = self.free.pop(fits[0])
        else:  # the largest is replaced, so there are never more buffers than were in use at once
            del self.free[-1:]
            memory = torch.empty(need, dtype=torch.uint8, device="cpu")
        return memory, memory[:need].view(like.dtype).view(like.shape)


@attrs.define(eq=False)
class Messages:
    """Messages that were started, and what to do when all have arrived."""

    link: GlooLink
    collective: Collective
    finish: Callable[[], None] | None = None
    under_way: list[tuple[int, Any]] = attrs.field(factory=list)  # (other rank, torch's work, which keeps the tensor)
    borrowed: list[Tensor] = attrs.field(factory=list)
    over: bool = False
    label: Label = Label(0, "")  # of what is received

    @property
    def one_way(self) -> bool:
        """Whether this rank either sends or receives."""
        return self.collective.op in ("send", "recv", "broadcast")

    def send(self, to: int, x: Tensor, tag: Label) -> Messages:
        """Send a tensor to the rank with coordinate `to`."""
        if self.one_way:
            self.link.last[self.link.ranks[to]] = tag.key, kind_of(self.collective)
        else:
            self.label = tag
        if x.numel():
            with self._named(to):
                self.under_way.append((to, self.link.group.send([x], self.link.ranks[to], tag.tag)))
        return self

    def receive(self, source: int, out: Tensor, tag: Label) -> Messages:
        """Receive a tensor from the rank with coordinate `source`."""
        self.label = tag
        if out.numel():
            with self._named(source):
                self.under_way.append((source, self.link.group.recv([out], self.link.ranks[source], tag.tag)))
        return self

    def swap(self, peer: int, out: Tensor, x: Tensor, tag: Label) -> None:
        """Receive from a rank, and send to it: of two ranks one begins with the one, the other with the other.

        512 KB took 0.65 and 0.58 ms where both received first, 0.34 and 0.39 so; 4 MB 3.2 and 4.1, and 3.4 and 3.7.
        """
        if self.link.index < peer:
            self.receive(peer, out, tag).send(peer, x, tag)
        else:
            self.send(peer, x, tag).receive(peer, out, tag)

    def scratch(self, like: Tensor) -> Tensor:
        """Return a buffer that is returned to the pool after `wait`."""
        memory, x = self.link.scratch.take(like)
        self.borrowed.append(memory)
        return x

    def wait(self) -> None:
        """Wait for all messages, then call `finish`. Raises `RankError`."""
        if self.over:
            return
        if self.under_way:
            self._arrive()
        if self.finish is not None:
            with torch.no_grad():
                self.finish()
        self.over, self.finish = True, None
        self.under_way.clear()
        self.link.scratch.free += self.borrowed
        self.borrowed.clear()

    def _arrive(self) -> None:
        ranks, collective = self.link.ranks, self.collective
        wait = Wait(self.link.group, ranks[self.link.index], collective, self.label.key, self.link.last, self.one_way)
        with Interruptible(wait):
            for peer, work in self.under_way:
                wait.peer = ranks[peer]
                with self._named(peer):
                    work.wait()

    def done(self) -> bool:
        """Return whether `wait` has returned; gloo does not report completion earlier."""
        return self.over

    def _named(self, peer: int) -> contextlib.AbstractContextManager:
        return naming(self.link, self.collective, self.link.ranks[peer])


class AlikeLink(GlooLink):
    """A link to ranks that are not there, and are taken to have what this one has: nothing is sent.

    It takes the memory that gloo's does, for as long.
    """

    def __init__(self, ranks: tuple[int, ...], index: int):
        super().__init__(None, ranks, index)  # pyright: ignore[reportArgumentType]

    def _messages(self, collective: Collective, mine: Tensor) -> Messages:
        return Echoes(self, collective, mine=mine)

    def _spread(self, collective: Collective, pieces: list[Tensor], tag: Label) -> Work:
        for i in self._others() if collective.how == "sum" else ():
            pieces[i].mul_(self.size)
        return DONE


@attrs.define(eq=False)
class Echoes(Messages):
    """Messages of ranks that all send what this one would: copied, as soon as they are started."""

    mine: Tensor = attrs.field(kw_only=True)

    def send(self, to: int, x: Tensor, tag: Label) -> Messages:
        """Keep a tensor until `wait`, as a message does."""
        self.under_way.append((to, x))
        return self

    def receive(self, source: int, out: Tensor, tag: Label) -> Messages:
        """Copy what this rank has."""
        numel = min(out.numel(), self.mine.numel())  # pieces of an all_reduce differ by one
        if not same_memory(out, self.mine):
            out[:numel].copy_(self.mine[:numel])
        self.under_way.append((source, out))
        return self

    def _arrive(self) -> None:
        pass


@attrs.define(eq=False)
class _Chain:
    """Two collectives in sequence: the second starts in `wait`, after the first."""

    first: Work
    then: Callable[[], Work] | None

    def wait(self) -> None:
        if self.then is not None:
            self.first.wait()
            self.then().wait()
            self.then = None

    def done(self) -> bool:
        return self.then is None


@functools.lru_cache(maxsize=4096)
def _digest(data: tuple, modulus: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(data).encode(), digest_size=8).digest(), "little") % modulus


@contextlib.contextmanager
def naming(link: GlooLink, collective: Collective, peer: int | None = None) -> Iterator[None]:
    """Raise `RankError` in place of torch's error when another rank failed, or Ctrl-C closed gloo's connections."""
    try:
        yield
    except RuntimeError as error:
        if not _from_torch(error):
            raise
        if peer is not None and was_closed(link.group):
            raise RankError(
                "Ctrl-C was pressed while this rank waited for others, which closed its connections to them",
                where=f"rank {link.ranks[link.index]}, in {collective}",
                want="all ranks to end",
                hint="go on from the last save",
            ) from error
        raise lost(collective, link.ranks, link.index, peer, error) from error


def _from_torch(error: BaseException) -> bool:
    """Return whether the collective raised this, and not a signal handler that ran while it waited.

    A `DataLoader` raises a RuntimeError from a signal handler when one of its workers dies. An error raised in C++ has
    a line of this package as its last frame.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is None or last.tb_frame.f_globals.get("__package__") == __package__


def lost(
    collective: Collective, ranks: tuple[int, ...], index: int, peer: int | None, error: BaseException
) -> RankError:
    """Return the error for a collective that failed because of another rank."""
    message = re.sub(r"\[/\S+\] ", "", str(error).strip().partition("\n")[0])  # without gloo's source path
    late = "imed out" in message or "imeout" in message
    where, began = f"rank {ranks[index]}, in {collective}", Origin()
    if peer is not None:
        began = origin(ranks[index], peer, str(collective), late=late)
    if began.different is not None:
        return different(where, began.different)
    peer, late = (peer, late) if began.rank is None else (began.rank, began.late)
    lost_rank = f"rank {peer}" if peer is not None else "a rank"
    others = tuple(rank for rank in ranks if rank != ranks[index])
    seen = began.stack or (everywhere(others) if peer is None and late else ())
    hint = "look at the output of the rank that ended first"
    if late:
        hint = "fds.init_distributed(check=True) reports what each rank does"
    if began.place == SILENT:
        hint = "look at it on its machine: `ps` has state T for a process that is stopped, and gdb -p shows C code"
    elif began.place:
        hint = "if it may take so long there: fds.init_distributed(timeout=), in seconds"
    return RankError(
        (f"{lost_rank} did not answer in time" if late else f"{lost_rank} was lost")
        + (f": it {began.place}" if began.place else ""),
        where=where,
        got="\n".join(filter(None, (message[:300], began.trail, *seen))),
        want=f"ranks {', '.join(map(str, ranks))} to take part",
        hint=hint,
    )
