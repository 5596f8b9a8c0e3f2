"""Record when a rank runs each action of a plan, and join the recordings of all ranks to a timeline."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterable, Iterator

from fds.errors import PlanError
from fds.plans.actions import COMPUTE, Action, Op
from fds.plans.timeline import Event, Timeline, peaks

_CURRENT: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("fds.plans.recording", default=None)


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
    held = [peaks(row, lambda stage: 1.0, trains=trains) for row in events]
    return Timeline(events, tuple(b for b, _ in held), tuple(n for _, n in held))


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
