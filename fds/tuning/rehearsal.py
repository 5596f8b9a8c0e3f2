"""A rank's course through a call of a candidate, recorded without the others; and the seconds that come of all of them.

The rank is planned: the others do not exist, and a collective returns as if all had this one's values. Arithmetic is
done on the values of a real state, since zeros, or what memory happens to hold, may be slower (denormal numbers) or
refused. All ranks of a machine rehearse the same candidate at a time, as they will share its memory. Where they are
more than its cores, seconds are those of a core: `replay` shares cores out.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from fds import tree
from fds.collectives import Axis, Mesh, mesh, worlds
from fds.collectives.links import ALIKE, Collective, Work, bytes_sent, dry
from fds.collectives.measuring import Rate, Timed, time_collective, time_line, time_link
from fds.collectives.meshes import planned
from fds.collectives.traffic import MessageKind, Traffic, counting
from fds.profiling.peaks import of_dry_run
from fds.profiling.planned import tell_headers, untouched
from fds.tuning.problem import Problem
from fds.tuning.replay import Cost, Course, Message, replay
from fds.tuning.spaces import Candidate

WARM = 3  # calls that learn, and fill caches
CALLS = (7, 200)  # that are recorded: at least, and at most
_OF_MESSAGES = 0.1  # of the seconds of a candidate, for each kind
_OF_LINES = 0.25  # seconds of messages that say the rate of a line
_SMALL = 2**14  # bytes: of fewer the rate of a line does not matter


def rehearse(tell: Callable[[Any], None], problem: Problem, candidates: tuple[Candidate, ...], seconds: float) -> None:
    """Tell for each candidate the seconds of a call without messages and those that they add, or the text of an error.

    What a kind of message takes is measured once, where it first occurs.
    """
    together, links = mesh(ranks=-1)["ranks"], Links(torch.device(problem.device), seconds)
    for candidate in candidates:
        answers = record(problem, candidate, together, seconds)
        if errors := [answer for answer in answers if isinstance(answer, str)]:
            tell(errors[0])
        else:
            courses = [answer for answer in answers if isinstance(answer, Course)]
            tell(predict(courses, candidate, links))


def record(problem: Problem, candidate: Candidate, together: Axis, seconds: float) -> list[Course | str]:
    """Return the courses of all ranks through a call, or the texts of what they raised; all ranks call it."""
    with planned(candidate.axes, together.index) as ranks:
        call, error = _attempt(lambda: _prepared(problem, candidate, ranks))
        if any(errors := together.exchange(error)):  # else all compute from here on
            return [error for error in errors if error]
        course, error = _attempt(lambda: _recorded(call, problem.device, seconds))
        return [_course(x) for x in together.exchange(error or attrs.asdict(course))]


def _attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return function(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".split("\n")[0]


def _prepared(problem: Problem, candidate: Candidate, ranks: Mesh) -> Callable[[], None]:
    """Return a call of this rank's part of a candidate's step; what it computes first is behind it."""
    make = functools.partial(problem.step, candidate)
    step, share = make(ranks), problem.share(candidate, ranks)
    tell_headers(step, make, candidate.axes, lambda step: of_dry_run(step, untouched(step, problem.params), share))
    with alone():
        state = problem.init(step)

    def call() -> None:
        nonlocal state
        state, metrics = step(state, share)
        tree.values_of(metrics["loss"])  # which waits for the device

    with alone():
        call()
    return call


def _recorded(call: Callable[[], None], device: str, seconds: float) -> Course:
    """Return the course of a call: of the seconds between events, the medians over calls that do the same."""
    cores, ranks_here = machine()
    shared = device == "cpu" and ranks_here > cores
    recorder = Recorder(device=device, clock=time.process_time if shared else time.perf_counter)
    with alone(), counting(recorder):
        for _ in range(WARM):
            begin = time.perf_counter()
            recorder.record(call)
        once = time.perf_counter() - begin
        courses = [recorder.record(call) for _ in range(min(max(CALLS[0], math.ceil(3 * seconds / once)), CALLS[1]))]
    last = courses[-1]
    alike = [c.seconds for c in courses if (c.messages, c.events) == (last.messages, last.events)]
    return attrs.evolve(last, seconds=tuple(map(statistics.median, zip(*alike, strict=True))))


def _course(answer: Any) -> Course | str:
    if isinstance(answer, str):
        return answer
    messages = (Message(**{**m, "ranks": tuple(m["ranks"]), "pair": tuple(m["pair"])}) for m in answer["messages"])
    return Course(tuple(messages), tuple(answer["events"]), tuple(map(float, answer["seconds"])))


def machine() -> tuple[int, int]:
    """Return how many cores this machine has for ranks, and how many ranks."""
    return len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", worlds.current().size))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let a rank take what others would tell it for what it says itself."""
    token = dry.set(ALIKE)
    try:
        yield
    finally:
        dry.reset(token)


@attrs.define(eq=False)
class Recorder(Traffic):
    """What a rank does in a call that it rehearses."""

    device: str = "cpu"
    clock: Callable[[], float] = time.perf_counter
    messages: list[Message] = attrs.field(factory=list)
    events: list[int] = attrs.field(factory=list)
    seconds: list[float] = attrs.field(factory=list)
    mark: float = 0.0

    def record(self, call: Callable[[], None]) -> Course:
        """Return the course of a call."""
        self.messages, self.events, self.seconds = [], [], []
        self.mark = self.clock()
        call()
        self.seconds.append(self.clock() - self.mark)
        return Course(tuple(self.messages), tuple(self.events), tuple(self.seconds))

    def note(self, number: int) -> None:
        """Come to an event."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(self.clock() - self.mark)
        self.events.append(number)
        self.mark = self.clock()

    def rehearsed(self, collective: Collective, axis: Axis, work: Work) -> Work:
        """Note the start of a message, and later where it is waited for."""
        ranks, pair = axis.ranks, ()
        if collective.op in ("send", "recv"):
            pair = (axis.index, collective.peer)[:: 1 if collective.op == "send" else -1]
            collective, ranks = attrs.evolve(collective, op="send"), tuple(axis.ranks[i] for i in pair)
        kind, sent = MessageKind.of(collective, axis.size), bytes_sent(collective, axis.size, max(collective.peer, 0))
        self.messages.append(Message(kind.op, kind.axis, kind.num_bytes, ranks, pair, sent))
        number = len(self.messages) - 1
        self.note(number)
        return _Recorded(self, number, work)


@attrs.define(eq=False)
class _Recorded:
    recorder: Recorder
    number: int
    work: Work
    waited: bool = False

    def wait(self) -> None:
        if not self.waited:
            self.recorder.note(self.number)
        self.waited = True
        self.work.wait()

    def done(self) -> bool:
        return self.work.done()


def predict(courses: Sequence[Course], candidate: Candidate, links: Links) -> tuple[float, float]:
    """Return the seconds of a call without messages, and those that they add; all ranks call it.

    Args:
        courses: of all ranks.
        candidate: of which these are.
        links: what is known of messages; what is missing is measured.
    """
    axes = tuple(candidate.axes.items())
    messages = dict.fromkeys(message for course in courses for message in course.messages)
    costs = {message: links.cost(axes, attrs.evolve(message, ranks=())) for message in messages}
    cores, ranks_here = machine()
    places = {"cores": cores if links.device.type == "cpu" else ranks_here, "ranks_of_machine": ranks_here}
    computed = replay(courses, {}, **places)
    return computed, replay(courses, costs, **places) - computed


@attrs.define
class Links:
    """What messages take by themselves on the meshes of candidates, measured once for each kind, by all ranks."""

    device: torch.device
    seconds: float  # of calls in a rehearsal
    costs: dict[Any, Cost] = attrs.field(factory=dict)
    rates: dict[Any, Rate] = attrs.field(factory=dict)

    def cost(self, axes: tuple[tuple[str, int], ...], message: Message) -> Cost:
        """Return what a message takes, sent on all lines of its axis at once.

        What a rank does for it alone, such as adding up what it has received, is not in it: a rehearsal has done that.
        """
        if (axes, message) in self.costs:
            return self.costs[axes, message]
        ranks = mesh(**dict(axes))
        axis, everyone = ranks[tuple(message.axis.split(","))], ranks[tuple(name for name, _ in axes)]
        everyone.barrier()
        both = self._timed(axis, message)
        with alone():
            single = self._timed(axis, message)
        spent = everyone.exchange([max(0.0, both.seconds - single.seconds), max(0.0, both.busy - single.busy)])
        most, busy = (max(values) for values in zip(*spent, strict=True))
        line = (axes, message.axis, message.pair)
        has_line = message.sent > _SMALL and not worlds.current().shares_cores  # which else are all that it takes
        if has_line and line not in self.rates:
            everyone.barrier()
            self.rates[line] = min(Rate(*rate) for rate in everyone.exchange(time_line(axis, message.pair, _OF_LINES)))
        rate = self.rates.get(line, Rate(math.inf, 0.0))
        cost = Cost(most, min(busy, most), message.sent / rate.bytes_per_second, rate.credit)
        self.costs[axes, message] = cost
        return cost

    def _timed(self, axis: Axis, message: Message) -> Timed:
        seconds = _OF_MESSAGES * self.seconds
        if message.op != "send":
            return time_collective(axis, message.op, message.num_bytes, self.device, seconds)
        peers = [at for at in message.pair if at != axis.index]
        return time_link(axis, peers[0], message.num_bytes, seconds) if len(peers) == 1 else Timed(0.0, 0.0)
