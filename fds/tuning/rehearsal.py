"""A rank's course through a call of a candidate, recorded without the others; and the seconds that come of all of them.

The rank is planned: the others do not exist, and a collective returns as if all had this one's values. Arithmetic is
done on the values of a real state, since zeros, or what memory happens to hold, may be slower (denormal numbers) or
refused. All ranks of a machine rehearse the same candidate at a time, as they will share its memory. Where they are
more than its cores, seconds are those of a core: `replay` shares cores out.

A machine's speed drifts within seconds, by more than what candidates differ by. So they are rehearsed in rounds, a few
calls of each, and what all of them take in a round says how fast the machine was. What is predicted are the seconds at
its usual speed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from fds import tree
from fds.collectives import Axis, mesh, worlds
from fds.collectives.links import ALIKE, Collective, Work, bytes_sent, dry
from fds.collectives.measuring import Rate, Timed, time_collective, time_delay, time_line, time_link
from fds.collectives.meshes import planned
from fds.collectives.traffic import MessageKind, Traffic, counting
from fds.profiling.planned import tell_headers
from fds.step import Step
from fds.tuning.problem import Problem
from fds.tuning.replay import Cost, Course, Message, replay
from fds.tuning.spaces import Candidate

ROUNDS = 8  # of all candidates, so that each meets the machine at several times
CALLS = (1, 10)  # that are recorded in a round: at least, and at most
_OF_MESSAGES = 0.1  # of the seconds of a candidate, for each kind in each round
_OF_LINES = 0.25  # seconds of a burst of messages that says the rate of a line
_SMALL = 2**14  # bytes: of fewer the rate of a line does not matter


def rehearse(tell: Callable[[Any], None], problem: Problem, candidates: tuple[Candidate, ...], seconds: float) -> None:
    """Tell for each candidate the seconds of a call without messages and those that they add, or the text of an error.

    It is told in the first round, so that it is known which one ends a process, and again after the last.
    """
    rehearsal = Rehearsal(problem, candidates, seconds)
    for turn in range(ROUNDS):
        for i in rehearsal.order(turn):
            rehearsal.visit(i)
            if turn == 0:
                tell(rehearsal.answers()[i])
    for answer in rehearsal.answers():
        tell(answer)


class Rehearsal:
    """Candidates that are rehearsed in rounds, by all ranks, which call the same methods in the same order.

    Args:
        problem: what is tuned.
        candidates: of it.
        seconds: of a candidate's calls that are recorded, three times over in all rounds.
    """

    def __init__(self, problem: Problem, candidates: Sequence[Candidate], seconds: float):
        self.problem, self.candidates, self.seconds = problem, candidates, seconds
        self.together, self.links = mesh(ranks=-1)["ranks"], Links(torch.device(problem.device), seconds)
        self.parts = dict[int, Part]()
        self.errors = dict[int, str]()
        self.rounds: list[list[tuple[float, float]]] = [[] for _ in candidates]

    def order(self, turn: int) -> Sequence[int]:
        """Return the numbers of the candidates in the order of a round: to and fro, so that none is always first."""
        if turn:
            self.links.forget()
        return range(len(self.candidates))[:: -1 if turn % 2 else 1]

    def visit(self, i: int) -> None:
        """Record some calls of a candidate, and add what they say to what is known of it."""
        candidate = self.candidates[i]
        if i not in self.parts and i not in self.errors:
            self.parts[i] = self._do(i, lambda: Part.of(self.problem, candidate, self.together.index))
        once = self._do(i, lambda: self.parts[i].begin())
        if i in self.errors:  # of any rank; else all compute at the same time
            return
        least, most = CALLS
        wanted = math.ceil(3 * self.seconds / ROUNDS / max(self.together.exchange(once)))
        courses = self._do(i, lambda: self.parts[i].record(min(max(least, wanted), most)))
        if i not in self.errors:
            calls = zip(*map(_courses, self.together.exchange(courses)), strict=False)
            computed, added = zip(*(predict(call, candidate, self.links) for call in calls), strict=True)
            self.rounds[i].append((statistics.fmean(computed), statistics.fmean(added)))

    def _do(self, i: int, work: Callable[[], Any]) -> Any:
        """Do what all ranks do for a candidate, unless one of them has failed before."""
        if i in self.errors:
            return None
        value, error = _attempt(work)
        if errors := [text for text in self.together.exchange(error) if text]:
            self.errors[i] = errors[0]
        return value

    def answers(self) -> list[Any]:
        """Return what is known so far, as `rehearse` tells it; None of candidates that were not visited yet."""
        computed = settled([[seconds for seconds, _ in rounds] for rounds in self.rounds])
        answers = list[Any]()
        for i, rounds in enumerate(self.rounds):
            messages = middle([added for _, added in rounds]) if rounds else 0.0
            answers.append(self.errors.get(i, (computed[i], messages) if rounds else None))
        return answers


def settled(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of candidates from those of each round, at the machine's usual speed; nan of no rounds.

    >>> settled([[1.0, 2.0, 1.0], [3.0, 6.0, 3.0]])  # the second round was at half speed
    [1.0, 3.0]
    """
    usual = [statistics.median(of_one) if of_one else math.nan for of_one in rounds]
    num_rounds = max(map(len, rounds), default=0)
    slow = [
        statistics.median(of_one[turn] / usual[i] for i, of_one in enumerate(rounds) if turn < len(of_one))
        for turn in range(num_rounds)
    ]
    return [middle([x / slow[turn] for turn, x in enumerate(of_one)]) if of_one else math.nan for of_one in rounds]


def middle(values: Sequence[float]) -> float:
    """Return the mean of all but the least and the greatest, which of a drifting speed says more than the median.

    >>> middle([1.0, 2.0, 4.0, 900.0])
    3.0
    """
    return statistics.fmean(sorted(values)[1:-1] if len(values) > 2 else values)


def _attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return function(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".split("\n")[0]


@attrs.define(eq=False)
class Part:
    """This rank's part of a candidate's step, planned; it has a state only in the rounds that record it."""

    problem: Problem
    step: Step
    share: Any
    world: worlds.World
    call: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, problem: Problem, candidate: Candidate, rank: int) -> Part:
        """Compose it, and find what others of a pipeline send it."""
        make = functools.partial(problem.step, candidate)
        with planned(candidate.axes, rank) as ranks:
            step, share = make(ranks), problem.share(candidate, ranks)
            with alone():  # a call takes a tenth of a dry run's seconds
                tell_headers(step, make, candidate.axes, lambda stage: stage(problem.init(stage), share))
            return cls(problem, step, share, ranks.world)

    def begin(self) -> float:
        """Make a state and call the step, after which its caches are warm; return the seconds of the call."""
        with worlds.among(self.world), alone():
            state = self.problem.init(self.step)

            def call() -> None:
                nonlocal state
                state, metrics = self.step(state, self.share)
                tree.values_of(metrics["loss"])  # which waits for the device

            begin = time.perf_counter()
            call()
        self.call = call
        return time.perf_counter() - begin

    def record(self, count: int) -> list[Any]:
        """Return the courses of so many calls, of those that do what the last one does; JSON. The state is dropped."""
        shared = self.problem.device == "cpu" and operator.lt(*machine())
        recorder = Recorder(device=self.problem.device, clock=time.process_time if shared else time.perf_counter)
        with worlds.among(self.world), alone(), counting(recorder):
            courses = [recorder.record(self.call) for _ in range(count)]
        self.call = lambda: None
        last = courses[-1]
        alike = [c.seconds for c in courses if (c.messages, c.events) == (last.messages, last.events)]
        return [[attrs.asdict(message) for message in last.messages], last.events, alike]


def _courses(answer: Any) -> list[Course]:
    sent, events, calls = answer
    messages = tuple(Message(**{**m, "ranks": tuple(m["ranks"]), "pair": tuple(m["pair"])}) for m in sent)
    return [Course(messages, tuple(events), tuple(map(float, seconds))) for seconds in calls]


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
    """What messages take by themselves on the meshes of candidates, measured once a round for each kind, by all ranks.

    Of those whose seconds are the line's, which does not drift, once in all.
    """

    device: torch.device
    seconds: float  # of calls in a rehearsal
    costs: dict[Any, Cost] = attrs.field(factory=dict)
    rates: dict[Any, Rate] = attrs.field(factory=dict)
    delays: dict[Any, float] = attrs.field(factory=dict)

    def forget(self) -> None:
        """Measure again what depends on how fast the machine is."""
        self.costs = {key: cost for key, cost in self.costs.items() if cost.line > cost.seconds / 2}

    def cost(self, axes: tuple[tuple[str, int], ...], message: Message) -> Cost:
        """Return what a message takes, sent on all lines of its axis at once, after a rest.

        What a rank does for it alone, such as adding up what it has received, is not in it: a rehearsal has done that.
        """
        if (axes, message) in self.costs:
            return self.costs[axes, message]
        ranks = mesh(**dict(axes))
        axis, everyone = ranks[tuple(message.axis.split(","))], ranks[tuple(name for name, _ in axes)]
        if axes not in self.delays:
            everyone.barrier()
            late = time_delay(everyone) if self.device.type == "cpu" else 0.0
            self.delays[axes] = max(everyone.exchange(late))
        line, rate = (axes, message.axis, message.pair), Rate(math.inf, 0.0)
        if message.sent > _SMALL and not worlds.current().shares_cores:
            if line not in self.rates:
                everyone.barrier()
                rates = everyone.exchange(time_line(axis, message.pair, _OF_LINES))
                self.rates[line] = Rate(*(min(values) for values in zip(*rates, strict=True)))
            rate = self.rates[line]
        of_line = message.sent / rate.bytes_per_second
        rest = min(of_line, rate.credit)  # in which the line saves again what the message before it has used up
        everyone.barrier()
        both = self._timed(axis, message, rest)
        with alone():
            single = self._timed(axis, message, 0.0)
        seconds = both.seconds if message.op == "send" else min(axis.exchange(both.seconds))  # of the last to start
        spent = everyone.exchange([max(0.0, seconds - single.seconds), max(0.0, both.busy - single.busy)])
        most, busy = (max(values) for values in zip(*spent, strict=True))
        cost = self.costs[axes, message] = Cost(
            most, min(busy, most), of_line, rate.credit, rate.buffered, self.delays[axes]
        )
        return cost

    def _timed(self, axis: Axis, message: Message, rest: float) -> Timed:
        seconds, how = _OF_MESSAGES * self.seconds, {"blocks": 1, "rest": rest}
        if message.op != "send":
            return time_collective(axis, message.op, message.num_bytes, self.device, seconds, **how)
        peers = [at for at in message.pair if at != axis.index]
        return time_link(axis, peers[0], message.num_bytes, seconds, **how) if len(peers) == 1 else Timed(0.0, 0.0)
