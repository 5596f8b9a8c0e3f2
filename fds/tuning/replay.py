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
        buffered: of a send, how long before it arrives the rank that sends it may be done, after `seconds` at least.
        late: by how much it starts later where the rank that sends it computes meanwhile, at most as long as it does.
    """

    seconds: float = 0.0
    busy: float = 0.0
    line: float = 0.0
    credit: float = 0.0
    buffered: float = 0.0
    late: float = 0.0


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
    """Return the seconds of a call, from its start until the last rank has come to the end of its course.

    It is one of many: what the call before it has left of the lines' rates is what it finds.

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
    places = {"cores": cores, "ranks_of_machine": ranks_of_machine}
    seconds, over = _replay(courses, costs, {}, **places)  # of a call that finds nothing saved
    if over:
        seconds, _ = _replay(courses, costs, {end: until - seconds for end, until in over.items()}, **places)
    return seconds


def _replay(
    courses: Sequence[Course],
    costs: Mapping[Message, Cost],
    over: Mapping[tuple[int, str], float],
    *,
    cores: int,
    ranks_of_machine: int,
) -> tuple[float, Mapping[tuple[int, str], float]]:
    """Return the seconds of a call, and until when the rates of lines are used up then, as at its start."""
    names = [_names(course) for course in courses]
    links, now = _Links(costs, Counter(name for course in names for name in course), over=dict(over)), 0.0
    steps = [
        _steps(rank, course, named, links) for rank, (course, named) in enumerate(zip(courses, names, strict=True))
    ]
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
        for rank in [rank for rank, name in waits.items() if links.end(name, rank) <= now]:
            del waits[rank]
            lefts[rank] = 0.0
        if any(left <= _NOTHING for left in lefts.values()):
            continue
        busy = Counter(rank // ranks_of_machine for rank in lefts)
        rates = {rank: min(1.0, cores / busy[rank // ranks_of_machine]) for rank in lefts}
        ends = [now + left / rates[rank] for rank, left in lefts.items()]
        ends += [links.end(name, rank) for rank, name in waits.items() if name in links.arrivals]
        if not ends:  # of ranks that rehearsed, and so wait in another order than they would
            links.arrivals |= dict.fromkeys(waits.values(), now)
            links.sent |= dict.fromkeys(waits.values(), now)
            continue
        passed, now = min(ends) - now, min(ends)
        lefts = {rank: left - passed * rates[rank] for rank, left in lefts.items()}
    return now, links.over


_NOTHING = 1e-12  # seconds
Name = tuple[Message, int]  # a message, and how many like it came before: the same on all that take part


@attrs.define
class _Links:
    """Messages that were started, and when they arrive."""

    costs: Mapping[Message, Cost]
    left: Counter[Name]  # parts that were not started yet
    over: dict[tuple[int, str], float]  # until when the rate of the line is used up
    now: float = 0.0
    ready: dict[Name, float] = attrs.field(factory=dict)  # when the parts are that were started
    arrivals: dict[Name, float] = attrs.field(factory=dict)
    sent: dict[Name, float] = attrs.field(factory=dict)  # when the rank is done that sends it to another
    free: dict[tuple[int, str], float] = attrs.field(factory=dict)  # from when on: what leaves a rank, what comes to it

    def start(self, name: Name, rank: int, computes: float) -> None:
        """Start the part of a rank that computes meanwhile; with the last part the message is on its way.

        Once what was sent before is there.
        """
        message = name[0]
        sends = message.op != "send" or rank == message.ranks[0]
        delay = min(computes, self.cost(message).late) if sends else 0.0
        self.ready[name] = max(self.ready.get(name, 0.0), self.now + delay)
        self.left[name] -= 1
        if self.left[name]:
            return
        ends = [(rank, way) for rank in message.ranks for way in ("out", "in")]
        if message.op == "send":
            ends = [*zip(message.ranks, ("out", "in"), strict=True)]
        cost = self.cost(message)
        begin = max(self.ready[name], *(self.free.get(end, 0.0) for end in ends))
        over = max(self.over.get(end, 0.0) for end in ends)
        if cost.line:  # a message whose line does not matter leaves it what it has saved
            over = max(self.ready[name] - cost.credit, over) + cost.line
            self.over |= dict.fromkeys(ends, over)
        self.arrivals[name] = max(begin + cost.seconds, over)
        self.sent[name] = max(begin + cost.seconds, self.arrivals[name] - cost.buffered)
        self.free |= dict.fromkeys(ends, self.arrivals[name])

    def end(self, name: Name, rank: int) -> float:
        """Return when a rank has waited for a message; infinity where it is not on its way yet."""
        of_sender = name[0].op == "send" and rank == name[0].ranks[0]
        return (self.sent if of_sender else self.arrivals).get(name, math.inf)

    def cost(self, message: Message) -> Cost:
        return self.costs.get(message, Cost())


def _names(course: Course) -> list[Name]:
    counts = Counter[Message]()
    names = list[Name]()
    for message in course.messages:
        names.append((message, counts[message]))
        counts[message] += 1
    return names


def _steps(rank: int, course: Course, names: Sequence[Name], links: _Links) -> Iterator[float | Name]:
    """Yield what a rank does, one after the other: seconds that it computes, and messages that it waits for."""
    started, waits = 0, [i for i, number in enumerate(course.events) if number in course.events[:i]]
    for i, (number, seconds) in enumerate(zip(course.events, course.seconds, strict=False)):
        yield seconds
        if number == started:
            until = next((wait for wait in waits if wait > i), len(course.events))
            links.start(names[number], rank, sum(course.seconds[i + 1 : until + 1]))
            started += 1
        else:
            yield links.cost(names[number][0]).busy
            yield names[number]
    yield course.seconds[-1]
