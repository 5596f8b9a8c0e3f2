"""`JSONL`: a file of JSON lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fds.display import Log
from fds.errors import FdsError, checked_call
from fds.monitors.sink import Event, checked_every, checked_path, writable_directory


class JSONL:
    """Write a line for each call: `{"step": 512, "Train/Samples/train_loss": 2.5, ..., "seconds": 3.2}`.

    `step` is `x`, and `seconds` the time that the run has taken. The file is a log of `fds.display`: `read_log` reads
    it and `draw_curve` draws it. A line is in the file when the call that writes it returns. A run that goes on, or
    back to an earlier state, keeps the lines before the first that it writes; later and incomplete ones go. A file
    that is no such log is refused, and stays as it is.

    Args:
        path: of the file; its directory is made.
        every: calls between two lines.

    Raises `FdsError` for arguments of another kind, and where nothing can be written.
    """

    @checked_call
    def __init__(self, path: str | Path, *, every: int = 1):
        self.path, self.every = Path(checked_path(path, "JSONL")), checked_every(every, "JSONL")
        if self.path.is_dir():
            raise FdsError(
                "this is a directory, not a file", where="JSONL", got=str(self.path), want=f"{self.path / 'log.jsonl'}"
            )
        writable_directory(self.path.parent, "JSONL")
        self._log: Log | None = None
        self._last = math.inf  # `x` of the last line

    def __repr__(self) -> str:
        return f"JSONL({str(self.path)!r})"

    def write(self, events: Sequence[Event]) -> None:
        """Append a line."""
        x = events[0].x
        if self._log is None or x < self._last:
            self.close()
            self._log = Log(self.path, upto=math.nextafter(x, -math.inf))
        self._last = x
        self._log.write(x, {event.tag: event.value for event in events})

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.__exit__()
