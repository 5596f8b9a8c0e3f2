"""`Log`: a file of one JSON line per step and per note, which a resumed run cuts and continues."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fds.errors import FdsError, expanded

_BEGINNING = b'{"step": '  # of every line


class Log:
    """A file of JSON lines, each with the number of its step and the seconds that the run has taken so far.

    Args:
        path: the file; a run that continues keeps its lines up to the step `upto`, later and incomplete ones go.
        upto: the step after which the run continues; 0 begins anew.

    Raises `FdsError` for a file that is no log, which stays as it is, and for one that cannot be written.
    """

    def __init__(self, path: str | Path, *, upto: float = 0):
        self.path = Path(expanded(path))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.kept, end = _lines_upto(self.path, upto) if self.path.exists() else ([], 0)
            self._file = self.path.open("a")
            if self._file.tell() > end:
                self._file.truncate(end)  # not written anew: a rank may be killed at any time
        except OSError as error:
            raise FdsError("the log cannot be written", where=str(path), got=str(error)) from error
        self._seconds = self.kept[-1]["seconds"] if self.kept else 0.0
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, without interruptions."""
        return self._seconds + time.perf_counter() - self._start

    def write(self, step: float, values: Mapping[str, Any]) -> None:
        """Add a line; it is in the file when this returns. Values named `step` and `seconds` are left out."""
        own = {"step": step, "seconds": round(self.seconds, 3)}
        line = {"step": step, **values, **own}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a log. What follows an incomplete line, of a process that was killed, is left out.

    Raises `FdsError` for a file that is no log, or that cannot be read.
    """
    try:
        return _lines_upto(Path(expanded(path)), None)[0]
    except OSError as error:
        raise FdsError("the log cannot be read", where=str(path), got=str(error)) from error


def _lines_upto(path: Path, upto: float | None) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a log up to a step, and the number of bytes that they take."""
    kept: list[dict[str, Any]] = []
    end = 0
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not text.startswith(_BEGINNING[: len(text)]):
            raise _no_log(path, number, text)
        if not text.endswith(b"\n"):
            break  # the process was killed while writing
        try:
            line = json.loads(text)
        except ValueError as error:
            raise _no_log(path, number, text) from error
        if upto is not None and line["step"] > upto:
            break
        kept.append(line)
        end += len(text)
    return kept, end


def _no_log(path: Path, number: int, text: bytes) -> FdsError:
    return FdsError(
        "this is not a line of a log",
        where=f"{path}, line {number}",
        got=repr(text[:80])[1:],
        want='{"step": 1, ...}',
        hint="name another file, or remove this one",
    )
