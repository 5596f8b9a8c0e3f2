"""`watch_ranks`: which rank is slower than the others call after call, and whether in computing or between calls."""

from __future__ import annotations

import contextlib
import socket
import statistics
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter

import attrs
import torch

from fds.collectives import Axis, mesh
from fds.collectives.traffic import counting
from fds.errors import FdsError, checked_call, is_a, is_int, is_number
from fds.state import State
from fds.step.ranges import Clock, clocked
from fds.timing._timed import Times, is_over, times_of
from fds.timing.clocks import OTHER, WAIT, Waits

_SAMPLES = 16  # calls that are timed from one comparison to the next, about
_SHARE = 0.05  # of a call that a rank must be slower by: less is noise


@attrs.frozen
class RankPace:
    """What a call of a rank takes: the medians of the calls that were timed since the last comparison.

    Attributes:
        rank: its number among all that run.
        host: the machine.
        between_ms: from the end of a call to the beginning of the next: the loader, logs, saves.
        parts: milliseconds of each part of a call, as those of `fds.Times`; `wait` is for messages.
    """

    rank: int
    host: str
    between_ms: float
    parts: dict[str, float]

    @property
    def busy_ms(self) -> float:
        """Milliseconds of a call without those in which it waits for messages."""
        return sum(ms for part, ms in self.parts.items() if part != WAIT)


@attrs.frozen
class Straggler:
    """A rank that is slower than the others; `str()` of it is a sentence.

    Attributes:
        rank: its number among all that run.
        host: its machine.
        where: "between" for what it does between calls, or the part of a call in which most of the extra time goes.
        ms: what that takes: between calls, or in all parts of a call without waits.
        others_ms: the median of the others.
        extra_ms: of what it takes longer than they do, what goes there.
    """

    rank: int
    host: str
    where: str
    ms: float
    others_ms: float
    extra_ms: float

    @property
    def ratio(self) -> float:
        """How many times as long as the others it takes."""
        return self.ms / self.others_ms if self.others_ms else float("inf")

    def __str__(self) -> str:
        who = f"rank {self.rank} on {self.host}"
        if self.where == "between":
            times = f"{self.ms:.1f} ms between two calls, the others {self.others_ms:.1f}"
            return f"{who} comes late to each call: {times}: its loader, logs or saves"
        times = f"{self.ms:.1f} ms a call, the others {self.others_ms:.1f}"
        return (
            f"{who} computes {self.ratio:.2f} times as long: {times}; {self.extra_ms:.1f} of the extra are {self.where}"
        )


def stragglers(paces: Sequence[RankPace], ratio: float) -> tuple[Straggler, ...]:
    """Return the ranks that take `ratio` times as long as the median of the others, and longer by 5% of a call."""
    late: list[Straggler] = []
    whole = statistics.median([sum(pace.parts.values()) + pace.between_ms for pace in paces])
    for pace in paces if len(paces) > 1 else ():
        others = [other for other in paces if other.rank != pace.rank]
        between = statistics.median([other.between_ms for other in others])
        busy = statistics.median([other.busy_ms for other in others])
        extra = {
            part: ms - statistics.median([other.parts[part] for other in others])
            for part, ms in pace.parts.items()
            if part != WAIT
        }
        part = max(extra, key=extra.__getitem__)
        for where, ms, theirs, more in (
            ("between", pace.between_ms, between, pace.between_ms - between),
            (part, pace.busy_ms, busy, extra[part]),
        ):
            if ms >= ratio * theirs and ms - theirs >= _SHARE * whole:
                late.append(Straggler(pace.rank, pace.host, where, ms, theirs, more))
    return tuple(late)


class RankWatch:
    """What `fds.watch_ranks` returns: call it around each call of the step.

    Attributes:
        every: calls from one comparison to the next.
        paces: of all ranks, at the last comparison; empty before.
        stragglers: ranks that were slower than the others then.
    """

    def __init__(self, every: int, ratio: float, axis: Axis | None):
        self.every, self._ratio, self._axis = every, ratio, axis
        self.paces: tuple[RankPace, ...] = ()
        self.stragglers: tuple[Straggler, ...] = ()
        self._ended: float | None = None  # when the call before did
        self._waiting: deque[tuple[float, Clock]] = deque()
        self._times: list[tuple[float, Times]] = []

    def __repr__(self) -> str:
        return f"watch_ranks(every={self.every}, ratio={self._ratio:g})"

    @contextlib.contextmanager
    def __call__(self, state: State) -> Iterator[None]:
        """Watch the call of the step in the block, and compare ranks after those whose number divides by `every`.

        `state` is what the step is given. Raises `FdsError` for anything else.
        """
        if not is_a(state, State):
            want = "with watching(state):"
            raise FdsError("not a state", where="watch_ranks", got=type(state).__name__, want=want)
        number, ended = int(state.calls) + 1, self._ended
        self._ended = None  # of a call that raises, nothing is known
        if ended is None or number % max(1, self.every // _SAMPLES):
            yield
        else:
            with self._watch(state.step.device, perf_counter() - ended):
                yield
        if number % self.every == 0:
            self._compare()
        self._ended = perf_counter()

    @contextlib.contextmanager
    def _watch(self, device: torch.device, between: float) -> Iterator[None]:
        clock = Clock(device)
        with counting(Waits()), clocked(clock), clock.range(OTHER):
            yield
        self._waiting.append((between * 1e3, clock))

    def _compare(self) -> None:
        """Send this rank's times to all, and warn of those that are slower."""
        while self._waiting and is_over(self._waiting[0][1].marks[-1][1]):
            between, clock = self._waiting.popleft()
            self._times.append((between, times_of(clock)))
        axis = mesh(ranks=-1)["ranks"] if self._axis is None else self._axis
        row, mine = None, [times.parts for _, times in self._times]
        if mine:
            parts = {part: statistics.median([each[part] for each in mine]) for part in mine[0]}
            row = [socket.gethostname(), statistics.median([between for between, _ in self._times]), parts]
        self._times.clear()
        rows = axis.exchange(row, "watch_ranks")
        if None in rows:  # on a GPU the times of a call may be there a call later
            return
        self.paces = tuple(RankPace(rank, *row) for rank, row in zip(axis.ranks, rows, strict=True))
        before = {(late.rank, late.where == "between") for late in self.stragglers}
        self.stragglers = stragglers(self.paces, self._ratio)
        for late in self.stragglers if axis.index == 0 else ():
            if (late.rank, late.where == "between") not in before:  # until it has caught up
                warnings.warn(f"over {self.every} calls {late}", stacklevel=4)


@checked_call
def watch_ranks(*, every: int = 100, ratio: float = 1.25, axis: Axis | None = None) -> RankWatch:
    """Return a watch that warns of ranks which are slower than the others, and says in what.

        watching = fds.watch_ranks()
        for batch in loader:
            with watching(state):
                state, metrics = step(state, batch)

    Some sixteen calls between two comparisons are timed, without a bit of another number, and their medians sent to all
    ranks in one exchange of texts on the host: no GPU is waited for. The first rank warns of a rank that computes
    longer than the others, with the part of the call in which the extra time goes, and of one that comes late from
    what it does between calls; it is silent about it until that rank has caught up and falls behind again. All ranks
    have `watching.stragglers`, and `watching.paces`. A compilation or a save is in no median.

    Args:
        every: calls from one comparison to the next.
        ratio: how many times as long as the median of the others a rank takes that is warned of.
        axis: ranks that do the same work, which are compared: in a pipeline those of the data axis, since its stages
            differ. None for all.

    Raises `FdsError` for arguments of another kind.
    """
    if not is_int(every, 1):
        raise FdsError("not a number of calls", where="watch_ranks, every", got=repr(every)[:80], want="1 or more")
    if not (is_number(ratio) and 1 < ratio < float("inf")):
        raise FdsError("not a ratio of times", where="watch_ranks, ratio", got=repr(ratio)[:80], want="more than 1")
    if axis is not None and not is_a(axis, Axis):
        raise FdsError("not an axis", where="watch_ranks, axis", got=repr(axis)[:80], want='mesh["dp"], or None')
    return RankWatch(every, ratio, axis)
