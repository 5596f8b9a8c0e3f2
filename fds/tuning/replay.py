"""The seconds of a call, from what each rank computes between its messages and what each message takes by itself.

A rank's course is what it does in a call: it computes, starts a message, computes, waits for it. The courses of all
ranks are replayed together. A message is on its way once all who take part have started it and the links are free; it
arrives after the seconds that it takes by itself. For some of these a rank's own core is busy, copying between the
network and memory: who computes meanwhile loses them. So between ranks that share cores no message hides behind
arithmetic, and over a cable nearly all of it may. Where ranks are more than the cores of their machine, they share them
evenly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs


@attrs.frozen
class Message:
    """A message of a rank: a collective, or what one coordinate of an axis sends another.

    Attributes:
        op: the operation, "send" for one between two.
        axis: its name; of several, flattened, "a,b".
        num_bytes: of the tensor that is sent; of the whole one in all_gather and reduce_scatter.
        ranks: those that take part; of a send the one that sends, and the other.
        pair: of a send, their coordinates.
        sent: bytes that leave a rank.
    """

    op: str
    axis: str
    num_bytes: int
    ranks: tuple[int, ...]
    pair: tuple[int, ...] = ()
    sent: int = 0


@attrs.frozen
class Cost:
    """What a message takes by itself, in seconds.

    Attributes:
        seconds: from its start until it has arrived, after a rest.
        busy: for how many of these the core of a rank is.
        line: each of many that follow each other, by the rate of the line.
        credit: how far a line that has rested is ahead of its rate, as one whose rate is that of a token bucket.
    """

    seconds: float = 0.0
    busy: float = 0.0
    line: float = 0.0
    credit: float = 0.0


@attrs.frozen
class Course:
    """What a rank does in a call.

    Attributes:
        messages: in the order in which it starts them.
        events: the number of a message, at its start, and again where the rank waits for it.
        seconds: that it computes before each event, and after the last.
    """

    messages: tuple[Message, ...]
    events: tuple[int, ...]
    seconds: tuple[float, ...]


def replay(
    courses: Sequence[Course], costs: Mapping[Message, Cost], *, cores: int = 1, ranks_of_machine: int = 1
) -> float:
    """Return the seconds of a call: when the last rank has come to the end of its course.

    Args:
        courses: of all ranks, in their order.
        costs: of their messages; what is missing costs nothing.
        cores: of each machine.
        ranks_of_machine: how many ranks, which follow each other, share them.

    Where a rank never starts its part of a message, as one that only tells the news of a first call, the others do not
    wait for it.

    >>> total = Message("all_reduce", "dp", 4000, (0, 1))
    >>> ranks = [Course((total,), (0, 0), (before, 1.0, 0.0)) for before in (1.0, 2.0)]
    >>> replay(ranks, {total: Cost(4.0)})  # on its way from 2.0 to 6.0
    6.0
    >>> [replay(ranks, {total: Cost(1.0, busy)}) for busy in (0.0, 1.0)]  # behind arithmetic, or beside it
    [3.0, 4.0]
    """
    names = [_names(course) for course in courses]
    links, now = _Links(costs, Counter(name for course in names for name in course)), 0.0
    steps = [_steps(course, named, links) for course, named in zip(courses, names, strict=True)]
    lefts = dict.fromkeys(range(len(courses)), 0.0)  # of those that compute: seconds
    waits = dict[int, Name]()  # of the others: for what
    while lefts or waits:
        for rank in [rank for rank, left in lefts.items() if left <= _NOTHING]:
            del lefts[rank]
            links.now = now
            match next(steps[rank], None):
                case float(seconds):
                    lefts[rank] = seconds
                case (message, number):
                    waits[rank] = message, number
        for rank in [rank for rank, name in waits.items() if links.arrivals.get(name, math.inf) <= now]:
            del waits[rank]
            lefts[rank] = 0.0
        if any(left <= _NOTHING for left in lefts.values()):
            continue
        busy = Counter(rank // ranks_of_machine for rank in lefts)
        rates = {rank: min(1.0, cores / busy[rank // ranks_of_machine]) for rank in lefts}
        ends = [now + left / rates[rank] for rank, left in lefts.items()]
        ends += [links.arrivals[name] for name in waits.values() if name in links.arrivals]
        if not ends:  # of ranks that rehearsed, and so wait in another order than they would
            links.arrivals |= dict.fromkeys(waits.values(), now)
            continue
        passed, now = min(ends) - now, min(ends)
        lefts = {rank: left - passed * rates[rank] for rank, left in lefts.items()}
    return now


_NOTHING = 1e-12  # seconds
Name = tuple[Message, int]  # a message, and how many like it came before: the same on all that take part


@attrs.define
class _Links:
    """Messages that were started, and when they arrive."""

    costs: Mapping[Message, Cost]
    left: Counter[Name]  # parts that were not started yet
    now: float = 0.0
    arrivals: dict[Name, float] = attrs.field(factory=dict)
    free: dict[tuple[int, str], float] = attrs.field(factory=dict)  # from when on: what leaves a rank, what comes to it
    over: dict[tuple[int, str], float] = attrs.field(factory=dict)  # until when the rate of the line is used up

    def start(self, name: Name) -> None:
        """Start a rank's part; with the last of them the message is on its way, once what was sent before is there."""
        message = name[0]
        self.left[name] -= 1
        if self.left[name]:
            return
        ends = [(rank, way) for rank in message.ranks for way in ("out", "in")]
        if message.op == "send":
            ends = [*zip(message.ranks, ("out", "in"), strict=True)]
        cost = self.cost(message)
        begin = max(self.now, *(self.free.get(end, 0.0) for end in ends))
        over = max(self.now - cost.credit, *(self.over.get(end, 0.0) for end in ends)) + cost.line
        self.arrivals[name] = max(begin + cost.seconds, over)
        self.free |= dict.fromkeys(ends, self.arrivals[name])
        self.over |= dict.fromkeys(ends, over)

    def cost(self, message: Message) -> Cost:
        return self.costs.get(message, Cost())


def _names(course: Course) -> list[Name]:
    counts = Counter[Message]()
    names = list[Name]()
    for message in course.messages:
        names.append((message, counts[message]))
        counts[message] += 1
    return names


def _steps(course: Course, names: Sequence[Name], links: _Links) -> Iterator[float | Name]:
    """Yield what a rank does, one after the other: seconds that it computes, and messages that it waits for."""
    started = 0
    for number, seconds in zip(course.events, course.seconds, strict=False):
        yield seconds
        if number == started:
            links.start(names[number])
            started += 1
        else:
            yield links.cost(names[number][0]).busy
            yield names[number]
    yield course.seconds[-1]
