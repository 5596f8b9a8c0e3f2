"""What happened to an elastic run: its starts and stops, a line each, and what they cost."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import attrs

from fds.errors import FdsError
from fds.storage.disk.files import write_errors

FILE = "resizes.jsonl"


@attrs.frozen
class Event:
    """Something that happened to a run.

    Attributes:
        kind: "start", when ranks begin to train; "stop", when a rank ends before the last call; "save"; "end".
        time: seconds since 1970, of the clock of the rank that wrote it.
        calls: calls made by then.
        job: the name that torchrun gave to the job, or one that was drawn for it.
        ranks: of a start, how many train; else the rank that wrote it.
        idle: of a start, how many ranks have no part.
        source: of a start, where its state is from: "init", "memory" or "save".
        lost_seconds: of a start that is not the job's first, the time since the state that it goes on from was made.
        reason: of a stop.
    """

    kind: str
    time: float
    calls: int
    job: str = ""
    ranks: int = 0
    idle: int = 0
    source: str = ""
    lost_seconds: float = 0.0
    reason: str = ""


@attrs.frozen
class History:
    """The events of a run, in order."""

    events: tuple[Event, ...]

    @property
    def starts(self) -> tuple[Event, ...]:
        """The starts."""
        return tuple(event for event in self.events if event.kind == "start")

    @property
    def lost_seconds(self) -> float:
        """The time that was lost by all stops: without it, the run would have been as far as it is so much earlier."""
        return sum(event.lost_seconds for event in self.starts)

    @property
    def seconds(self) -> float:
        """The time from each job's first event to its last; what lies between two jobs does not count."""
        spans = dict[str, list[float]]()
        for event in self.events:
            spans.setdefault(event.job, []).append(event.time)
        return sum(max(times) - min(times) for times in spans.values())

    @property
    def goodput(self) -> float:
        """The part of the time that was not lost: 1 for a run that nothing disturbed."""
        return 1.0 - min(1.0, self.lost_seconds / self.seconds) if self.seconds else 1.0

    def __str__(self) -> str:
        lines = [f"{len(self.starts)} starts, {self.lost_seconds:.1f} s lost, goodput {100 * self.goodput:.1f}%"]
        for event in self.events:
            about = f"call {event.calls}"
            if event.kind == "start":
                idle = f" and {event.idle} idle" if event.idle else ""
                about += f", {event.ranks} ranks{idle}, from {event.source}, {event.lost_seconds:.1f} s lost"
            elif event.kind == "stop":
                about += f", rank {event.ranks}: {event.reason}"
            lines.append(f"{event.kind:5} {about}")
        return "\n".join(lines)


def read_history(directory: str | os.PathLike[str]) -> History:
    """Read what happened to the run of `fds.elastic.run` in a directory. Raises `FdsError` if there is none."""
    try:
        rows = read_rows(Path(directory))
    except OSError as error:
        raise FdsError(
            "there is no elastic run here", where=str(directory), got=str(error.strerror), want=f"a folder with {FILE}"
        ) from error
    names = [field.name for field in attrs.fields(Event)]
    return History(tuple(Event(**{k: v for k, v in row.items() if k in names}) for row in rows if "kind" in row))


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, but one that was not written to its end. Raises `OSError`."""
    rows = []
    for line in (directory / FILE).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def write_row(directory: Path, row: dict[str, Any]) -> None:
    """Append a line, in one write: several ranks may append at once. Raises `StorageError`."""
    with write_errors(directory, "line"):
        fd = os.open(directory / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(fd, f"{json.dumps(row)}\n".encode())
        finally:
            os.close(fd)


def write_event(directory: Path, event: Event) -> None:
    """Append an event, without the fields that it leaves out. Raises `StorageError`."""
    write_row(directory, attrs.asdict(event, filter=lambda field, value: field.default != value))


def seconds_of(when: str) -> float:
    """Return a time in ISO 8601 as seconds since 1970."""
    return datetime.datetime.fromisoformat(when).timestamp()


def now() -> str:
    """Return the time in ISO 8601, in UTC, as saves have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
