"""`Log`: a file of one JSON line per step and per note, which a resumed run cuts and continues."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from fds.errors import FdsError


class Log:
    """A file of JSON lines, each with the number of its step and the seconds that the run has taken so far.

    Args:
        path: the file; a run that continues keeps its lines up to the step `upto`, later and incomplete ones go.
        upto: the step after which the run continues; 0 begins anew.
    """

    def __init__(self, path: str | Path, *, upto: int = 0):
        self.path = Path(path)
        self.kept = [line for line in read_log(path) if line["step"] <= upto] if self.path.exists() else []
        self._seconds = self.kept[-1]["seconds"] if self.kept else 0.0
        self._start = time.perf_counter()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(json.dumps(line) + "\n" for line in self.kept))
            self._file = self.path.open("a")
        except OSError as error:
            raise FdsError("the log cannot be written", where=str(path), got=str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, without interruptions."""
        return self._seconds + time.perf_counter() - self._start

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line; it is in the file when this returns."""
        line = {"step": step, **values, "seconds": round(self.seconds, 3)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a log. What follows an incomplete line, of a process that was killed, is left out."""
    return list(_lines(Path(path).read_text()))


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
