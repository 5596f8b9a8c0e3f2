"""The order in which ranks meet: collectives that each rank needs at its own time, in one order on all ranks.

A gather at stage 3 happens when the loss uses a parameter, so ranks whose losses take different paths would meet in
different collectives, and hang. Here every rank follows one list of events, the plan, whose events any rank can join
at any time, whether it needs them or not (a reduction: with what it has so far). Who needs an event joins all that
the plan has before it. Who needs one that the plan does not have runs the plan to its end and asks the others there,
in rounds that go on until nobody asks. So nobody waits for anything but an event that all others will come to: of the
ranks that wait, the one that has come least far waits for an event that all others have joined.

The plan is what was asked for in the step before, when there was no plan; it is learned anew when somebody had to ask.

A plan is final, and nobody is asked for another event ever again, where each rank brought the whole of every bucket to
one reduction in every microbatch: each of them has the same events then, whatever the loss does. What is needed before
its turn waits for what comes before it, which comes at the end of the microbatch at the latest. So at stage 2 ranks
exchange nothing on the host but in the first call. Not so where parameters get no gradient or one in several parts, nor
where the stages of a pipeline share a rank: such buckets would be sent more often, or empty. Nor where the ranks are on
a tensor or sequence axis too, or a loss has collectives of its own in backward: a rank that holds a bucket to the end
of its backward is then waited for by others in it.

A slice that lives elsewhere is read before it is sent. To join its gather begins the reading; it is sent, in the order
of the events, before anything else is, and before this rank waits for others.

Where a step is several pieces of work between which ranks also wait for others than these (the actions of a pipeline),
each piece settles: nobody leaves it before all have joined what any of them needed in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import attrs

from fds import tree
from fds.collectives import Axis
from fds.step.sharding.gather import Departures

Event = tuple[str, int]  # ("gather" or "reduce", bucket)
KINDS = ("", "gather", "reduce")  # as numbers; "" asks for nothing


@attrs.frozen
class Want:
    """What a rank tells all others in a round, as integers."""

    kind: int  # of the event that it needs: its place in `KINDS`
    bucket: int
    wasted: int  # 1: it gathered for nothing
    regular: int  # 1: it brought the whole of every bucket to one reduction in every microbatch


@attrs.define
class LearnedOrder:
    """What a step remembers from call to call: a cache, which all ranks keep alike; dropping it costs a slow step."""

    plan: list[Event] | None = None
    ends: list[int] = tree.new(list)  # of its pieces: how many events come before
    final: bool = False  # nobody needs another event, in any call
    used: dict[int, set[int]] | None = None  # on this rank: leaves that got a gradient, by bucket


@functools.cache  # nothing is learned of an order that is final
def order_of_reductions(buckets: tuple[int, ...]) -> LearnedOrder:
    """Return the order in which each bucket is reduced once, known beforehand."""
    return LearnedOrder([("reduce", i) for i in buckets], [len(buckets)], final=True)


@attrs.define(eq=False)
class Order:
    """One pass through the events of a step."""

    axis: Axis
    memory: LearnedOrder
    ahead: int = 1  # gathers to launch before they are needed
    meets_elsewhere: bool = False  # whether its ranks wait for each other in backward for more than these events
    what: str = "step"  # whose events they are
    joins: dict[str, Callable[[int], None]] = tree.new(dict)  # what launches an event of each kind
    at: int = 0  # of the plan, not joined yet
    asked: list[Event] = tree.new(list)
    ends: list[int] = tree.new(list)  # of the pieces that are over, in what was asked
    ready: set[Event] = tree.new(set)  # of a final plan: needed before their turn
    wasted: bool = False  # whether this rank gathered for nothing
    regular: bool = False  # whether it brought the whole of every bucket to one reduction in every microbatch
    departures: Departures = attrs.field(factory=Departures)  # of what was joined and is not sent yet

    def need(self, event: Event) -> None:
        """Join events up to this one; of a final plan, once all before it are needed."""
        plan = self.memory.plan or []
        if self.memory.final:
            self.ready.add(event)
            while self.at < len(plan) and plan[self.at] in self.ready:
                self.ready.remove(plan[self.at])
                self.at += 1
                self._join(plan[self.at - 1])
            return
        try:
            stop = plan.index(event, self.at, self._end())
        except ValueError:
            self._run(self._end())
            self._round(event)
            return
        self._run(stop + 1)

    def look_ahead(self, coming: int) -> None:
        """Join the gathers that come next in the plan, beside those that are `coming`, before they are needed."""
        plan = self.memory.plan or []
        end = min(self.at + self.ahead - coming, self._end())
        while self.at < end and plan[self.at][0] == "gather":
            self._run(self.at + 1)

    def settle(self) -> list[Want]:
        """Join what others may still need in this piece of work, until all have come here; return what they told."""
        self._run(self._end())
        self.ready.clear()
        wants: list[Want] = []
        while not self.memory.final:
            wants = self._round(None)
            if not any(want.kind for want in wants):
                break
        self.ends.append(len(self.asked))
        return wants

    def go_on(self) -> None:
        """Make one piece of what was settled last and what comes next."""
        self.ends.pop()

    def finish(self) -> None:
        """Settle the last piece, and the plan of the next step."""
        wants = self.settle()
        if self.memory.plan is None:
            pieces = [self.asked[a:b] for a, b in itertools.pairwise([0, *self.ends])]
            self.memory.plan = [event for piece in pieces for event in (_sooner(piece) if self.ahead else piece)]
            self.memory.ends = self.ends
            self.memory.final = all(want.regular for want in wants) and not self.meets_elsewhere
        elif self.asked or (wants and all(want.wasted for want in wants)):
            self.memory.plan = None

    def _end(self) -> int:
        """Return where the plan of this piece of work ends."""
        if self.memory.plan is None:
            return 0
        return self.memory.ends[len(self.ends)] if len(self.ends) < len(self.memory.ends) else len(self.memory.plan)

    def _run(self, stop: int) -> None:
        plan = self.memory.plan
        while self.at < stop:
            assert plan is not None
            self.at += 1
            self._join(plan[self.at - 1])

    def _round(self, event: Event | None) -> list[Want]:
        """Tell all others what this rank needs, and join what any of them does."""
        self.departures.send()  # others may wait for it, and this rank does for them
        if self.departures.relays:
            self.departures.go_on()
        kind, bucket = event or ("", 0)
        numbers = [KINDS.index(kind), bucket, int(self.wasted), int(self.regular)]
        wants = [Want(*answer) for answer in self.axis.exchange_numbers(numbers, self.what)]
        for needed in dict.fromkeys((KINDS[want.kind], want.bucket) for want in wants if want.kind):
            self.asked.append(needed)
            self._join(needed)
        return wants

    def _join(self, event: Event) -> None:
        kind, bucket = event
        if kind != "gather":  # messages are sent in the order in which they are joined
            self.departures.send()
            if self.departures.relays:
                self.departures.go_on()
        if kind in self.joins:
            self.joins[kind](bucket)


def _sooner(events: list[Event]) -> list[Event]:
    """Move every gather before the reduction that precedes it: it is under way while that one is computed.

    >>> _sooner([("gather", 1), ("reduce", 2), ("gather", 0), ("reduce", 1)])
    [('gather', 1), ('gather', 0), ('reduce', 2), ('reduce', 1)]
    """
    out = list(events)
    i = 1
    while i < len(out):
        if out[i - 1][0] == "reduce" and out[i][0] == "gather":
            out[i - 1], out[i] = out[i], out[i - 1]
            i += 1
        i += 1
    return out
