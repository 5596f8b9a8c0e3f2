"""Memory: collectives between ranks of one process, done when the last of them has started."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import attrs
import torch

from fds.collectives.calls import Call, Work, different, same_memory
from fds.collectives.reductions import reduce_in_rank_order
from fds.collectives.turns import Turns
from fds.errors import RankError


@attrs.define(eq=False)
class Meeting:
    """One collective, and the ranks that have come to it: coordinate -> (call, what it writes, what it reads)."""

    ranks: tuple[int, ...]
    expected: tuple[int, ...]  # coordinates
    title: str  # its number
    come: dict[int, tuple[Call, Any, Any]] = attrs.field(factory=dict)
    over: bool = False

    def describe(self, call: Call) -> str:
        """Say what a rank waits for here."""
        missing = [str(self.ranks[i]) for i in self.expected if i not in self.come]
        return f"{call}, {self.title}, for rank{'s' * (len(missing) > 1)} {', '.join(missing)}"


class Hub:
    """All meetings that somebody waits at."""

    def __init__(self) -> None:
        self.turns: Turns | None = None  # while ranks run
        self.meetings: dict[tuple, Meeting] = {}

    def join(self, key: tuple, meeting: Meeting, index: int, call: Call, out: Any, x: Any) -> Meeting:
        """Come to a meeting, or open it; the last to come does what it is for. Raises `RankError` on a mismatch."""
        if self.turns is None:
            raise RankError(
                "this simulation is over", where=str(call), want="a mesh made inside the function simulated"
            )
        meeting = self.meetings.setdefault(key, meeting)
        for other, (its, _, _) in meeting.come.items():
            if _compared(its) != _compared(call):
                calls = {meeting.ranks[other]: str(its), meeting.ranks[index]: str(call)}
                raise different(f"axis {call.axis!r}, {meeting.title}", calls)
        meeting.come[index] = (call, out, x)
        if len(meeting.come) == len(meeting.expected):
            del self.meetings[key]
            with torch.no_grad():
                _perform(call, *zip(*(meeting.come[i][1:] for i in meeting.expected), strict=True))
            meeting.over = True
            meeting.come.clear()
        return meeting

    def refuse_unmet(self) -> None:
        """Raise `RankError` for collectives that were started and that others never came to."""
        if self.meetings:
            lines = [f"rank {m.ranks[i]} started {m.describe(call)}"
                     for m in self.meetings.values() for i, (call, _, _) in m.come.items()]  # fmt: skip
            raise RankError("all ranks have ended, and some collectives were not started by all", got="\n".join(lines),
                            want="every rank of an axis to start the same collectives")  # fmt: skip


class MemoryLink:
    """One axis of a simulated rank."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...], index: int, channel: str = ""):
        self.hub, self.ranks, self.index, self.channel = hub, ranks, index, channel
        self.count = 0
        self.direct: defaultdict[tuple[int, int], int] = defaultdict(int)  # messages from one coordinate to another

    def start(self, call: Call, out: Any, x: Any) -> Work:
        """Start a collective."""
        if call.op in ("send", "recv"):
            pair = (self.index, call.peer) if call.op == "send" else (call.peer, self.index)
            self.direct[pair] += 1
            key, expected = (self.channel, self.ranks, pair, self.direct[pair]), pair
            title = f"message {self.direct[pair]} from {pair[0]} to {pair[1]}"
        else:
            self.count += 1
            key, expected = (self.channel, self.ranks, self.count), tuple(range(len(self.ranks)))
            title = f"number {self.count}"
        meeting = self.hub.join(key, Meeting(self.ranks, expected, title), self.index, call, out, x)
        return MemoryWork(self, call, meeting)

    def exchange(self, call: Call, text: str) -> list[str]:
        """Return the texts of all ranks."""
        texts: list[str] = []
        self.start(call, texts, text).wait()
        return texts


@attrs.frozen(eq=False)
class MemoryWork:
    """A meeting that a rank has come to."""

    link: MemoryLink
    call: Call
    meeting: Meeting

    def wait(self) -> None:
        """Let other ranks run until all have come. Raises `RankError` if nobody can."""
        turns = self.link.hub.turns
        assert turns is not None or self.done()
        if turns is not None:
            turns.wait(self.link.ranks[self.link.index], self.done, lambda: self.meeting.describe(self.call))

    def done(self) -> bool:
        """Say whether all have come."""
        return self.meeting.over


def _compared(call: Call) -> Call:
    direct = call.op in ("send", "recv")
    return attrs.evolve(call, op="send and recv", peer=-1) if direct else call


def _perform(call: Call, outs: tuple, xs: tuple) -> None:
    """Do what a collective is for. `outs` and `xs` are in the axis' order."""
    size = len(xs)
    match call.op:
        case "all_gather":
            _copy([list(out.chunk(size)) for out in outs], [list(xs)] * size)
        case "reduce_scatter":
            pieces = [x.chunk(size) for x in xs]
            for i, out in enumerate(outs):
                reduce_in_rank_order([piece[i] for piece in pieces], out)
        case "all_reduce":
            total = torch.empty_like(xs[0])
            reduce_in_rank_order(list(xs), total, call.how)
            _copy([list(xs)], [[total] * size])
        case "all_to_all":
            _copy([list(out.chunk(size)) for out in outs], zip(*(x.chunk(size) for x in xs), strict=True))
        case "broadcast":
            _copy([list(outs)], [[xs[call.peer]] * size])
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
