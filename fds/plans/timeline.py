"""`Timeline`: when each action of a plan ran, simulated or recorded, with bubble and memory."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from fds import _html
from fds.errors import PlanError
from fds.plans.plan import COMPUTE, Action, Op, color, digits, legend


@attrs.frozen
class Event:
    """One action, from `start` to `end`, in the unit of the costs; seconds if measured."""

    action: Action
    start: float
    end: float


@attrs.frozen
class Timeline:
    """The events of every rank, in order, and the peaks of memory if known."""

    rows: tuple[tuple[Event, ...], ...]
    peak_bytes: tuple[float, ...] = ()  # per rank
    peak_live: tuple[int, ...] = ()  # per rank: (stage, microbatch)s between their forward and the end of backward

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def makespan(self) -> float:
        """The time at which the last event ends; the first one starts at 0."""
        return max((event.end for row in self.rows for event in row), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(event.end - event.start for event in computing(row)) for row in self.rows)

    @property
    def spans(self) -> tuple[float, ...]:
        """The time of each rank from the start of its own first computation to the end of its own last."""
        computed = [computing(row) for row in self.rows]
        return tuple(max(e.end for e in row) - min(e.start for e in row) if row else 0.0 for row in computed)

    @property
    def bubble_fraction(self) -> float:
        """The bubble of the papers: 1 - (work of the busiest rank) / (longest span of a rank).

        A rank that starts later also ends later, and its next step can begin when its span ends; so a schedule that
        only shifts the ranks against each other, as ZB-H2 does, has no bubble.

        Source: Qi et al. 2024, arXiv:2401.10241, section 5
        """
        longest = max(self.spans, default=0.0)
        return max(0.0, 1 - max(self.busy) / longest) if longest else 0.0

    @property
    def idle_fraction(self) -> float:
        """The fraction of all ranks' time, from 0 to the last end, without computation."""
        whole = self.num_ranks * self.makespan
        return max(0.0, 1 - sum(self.busy) / whole) if whole else 0.0

    def _repr_html_(self) -> str:
        title = f"Timeline: {self.num_ranks} ranks, time {self.makespan:.4g}, bubble {self.bubble_fraction:.1%}"
        live = f"peak live per rank: {' '.join(map(str, self.peak_live))}" if self.peak_live else ""
        picture = _html.lanes([_bars(row) for row in self.rows], self.makespan)
        means = _html.legend(legend(event.action for row in self.rows for event in row))
        return _html.box(title, picture, means, _html.text(live))


def _bars(row: tuple[Event, ...]) -> list[_html.Bar]:
    stages = stages_of(row)
    return [
        _html.Bar(
            event.start,
            event.end,
            digits(color(event.action, stages)),
            f"{event.action.microbatch}",
            f"{event.action}: {event.start:.4g} to {event.end:.4g}",
        )
        for event in computing(row)
    ]


def stages_of(row: Iterable[Event]) -> tuple[int, ...]:
    """Return the stages of a rank, in order."""
    return tuple(sorted({event.action.stage for event in row if event.action.stage is not None}))


def check_timeline(value: object, where: str) -> None:
    """Raise `PlanError` unless this is a timeline."""
    if not isinstance(value, Timeline):
        raise PlanError(
            "not a timeline",
            where=where,
            got=type(value).__name__,
            want="a Timeline",
            hint=f"{where}(plans.simulate(plan), ...)",
        )


def computing(row: Iterable[Event]) -> list[Event]:
    """Return the events of a row that are computations."""
    return [event for event in row if event.action.op in COMPUTE]


def peaks(row: Sequence[Event], activation_bytes: Callable[[int], float], *, trains: bool) -> tuple[float, int]:
    """Return the largest bytes, and the largest number of (stage, microbatch)s, that a rank holds at once.

    A microbatch is held from the start of its forward to the end of W or BW if the plan trains, else to the end of its
    forward. Each stage of the rank counts separately.
    """
    live: Counter[int] = Counter()  # multiplied at the end, since sums of floats would drift
    most_bytes, most_live = 0.0, 0
    for event in row:
        op, stage = event.action.op, event.action.stage
        if stage is None:
            continue
        if op is Op.FORWARD:
            live[stage] += 1
            most_live = max(most_live, sum(live.values()))
            most_bytes = max(most_bytes, sum(n * activation_bytes(s) for s, n in live.items()))
        if op is Op.BACKWARD or op is Op.BACKWARD_WEIGHT or (op is Op.FORWARD and not trains):
            live[stage] -= 1
    return most_bytes, most_live


_CURRENT: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("fds.plans.timeline", default=None)


class Recording:
    """The actions of one rank: a row (action, start, end) each, in seconds of the interpreter's clock.

    The ranks must share a clock; on one machine `time.perf_counter` is shared.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Action, float, float]] = []

    def add(self, action: Action, start_seconds: float, end_seconds: float) -> None:
        """Add an action that was run."""
        self.rows.append((action, start_seconds, end_seconds))

    def json(self) -> str:
        """Return the rows as JSON, to be sent to another rank or kept in a file: `[["0F0", 0.0, 0.5], ...]`."""
        return json.dumps([[str(action), start, end] for action, start, end in self.rows])


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record plans that run inside the block, on this rank and in this thread.

    >>> with record() as recording:
    ...     recorder().add(Action.parse("0F0"), 2.0, 2.5)
    >>> recording.json()
    '[["0F0", 2.0, 2.5]]'
    """
    recording = Recording()
    token = _CURRENT.set(recording)
    try:
        yield recording
    finally:
        _CURRENT.reset(token)


def recorder() -> Recording | None:
    """Return this thread's current recording, to which an interpreter adds, or None."""
    return _CURRENT.get()


def joined(recordings: Iterable[str]) -> Timeline:
    """Return the timeline of the `json()` of every rank's recording, in order; the earliest start is time 0.

    `peak_bytes` counts microbatches too. Raises `PlanError` if a text is not a recording.
    """
    rows = [_read(rank, text) for rank, text in enumerate(recordings)]
    first = min((start for row in rows for _, start, _ in row), default=0.0)
    events = tuple(tuple(Event(action, start - first, end - first) for action, start, end in row) for row in rows)
    trains = any(a.op in COMPUTE and a.op is not Op.FORWARD for row in rows for a, _, _ in row)
    most = [peaks(row, lambda stage: 1.0, trains=trains) for row in events]
    return Timeline(events, tuple(b for b, _ in most), tuple(n for _, n in most))


def _read(rank: int, text: str) -> list[tuple[Action, float, float]]:
    try:
        rows = [(Action.parse(action), float(start), float(end)) for action, start, end in json.loads(text)]
    except PlanError:
        raise
    except (ValueError, TypeError) as error:
        raise PlanError(
            "not a recording",
            where=f"rank {rank}",
            got=f"{str(text)[:60]!r}",
            want='the json() of a recording: [["0F0", 0.0, 0.5], ...]',
        ) from error
    return sorted(rows, key=lambda row: row[1])
