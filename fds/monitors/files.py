"""Sinks that write files without other packages, and lines of text: `CSV`, `JSONL`, `Console`."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import rich.console

from fds.display import Log
from fds.display.screens import short
from fds.errors import FdsError, checked_call
from fds.monitors._monitor import Event, check_every, check_path, make_directory


class CSV:
    """Write each tag to a file of its own: `Train/Samples/train_loss` to `Train_Samples_train_loss.csv`.

    A file has a header, `step,train_loss`, and a row for each event, its `x` before its value, which is in the file
    when the call that writes it returns. A run that goes on, or back to an earlier state, keeps the rows before the
    first that it writes; later and incomplete ones go, so no `x` is there twice. A file that begins otherwise is
    refused, and stays as it is.

    Args:
        directory: of the files; it is made.
        every: calls between two rows.

    Raises `FdsError` for arguments of another kind, and where nothing can be written.
    """

    @checked_call
    def __init__(self, directory: str | Path, *, every: int = 1):
        self.every = check_every(every, "CSV")
        self.directory = make_directory(check_path(directory, "CSV"), "CSV")
        self._files: dict[str, io.TextIOWrapper] = {}
        self._last: dict[str, float] = {}  # tag -> `x` of its last row

    def __repr__(self) -> str:
        return f"CSV({str(self.directory)!r})"

    def write(self, events: Sequence[Event]) -> None:
        """Append a row to the file of each event's tag."""
        for tag, value, x in events:
            if x <= self._last.get(tag, math.inf):
                self._open(tag, x)
            self._last[tag] = x
            csv.writer(self._files[tag], lineterminator="\n").writerow((x, value))
            self._files[tag].flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _open(self, tag: str, x: float) -> None:  # and leave out what lies at `x` and behind it
        path = self.directory / (tag.replace("/", "_").replace(" ", "_") + ".csv")
        if any(file.name == str(path) for other, file in self._files.items() if other != tag):
            raise FdsError("two tags have the same file", where=str(path), got=tag, want="tags that differ otherwise")
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(("step", tag.rpartition("/")[2]))
        end = _end_of_rows(path, header.getvalue().encode(), x) if path.exists() else 0
        if tag in self._files:
            self._files[tag].close()
        self._files[tag] = file = open(str(path), "a", newline="")  # noqa: SIM115  (close() closes it)
        if file.tell() > end:
            file.truncate(end)  # not written anew: a process may be killed at any time
        if end == 0:
            file.write(header.getvalue())


def _end_of_rows(path: Path, header: bytes, x: float) -> int:
    """Return the number of bytes of a file that hold its header and complete rows before `x`."""
    end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if number == 1:
            keeps = line == header
            if not header.startswith(line):
                raise _no_row(path, number, line, header)
        else:
            try:
                keeps = line.endswith(b"\n") and float(line.split(b",")[0]) < x
            except ValueError as error:
                raise _no_row(path, number, line, b"512,2.5\n") from error
        if not keeps:
            break
        end += len(line)
    return end


def _no_row(path: Path, number: int, line: bytes, want: bytes) -> FdsError:
    where, hint = f"{path}, line {number}", "name another directory, or remove this file"
    what, got = "this is not a line that CSV writes", repr(line[:80])[1:]
    return FdsError(what, where=where, got=got, want=repr(want)[1:], hint=hint)


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
        self.path, self.every = Path(check_path(path, "JSONL")), check_every(every, "JSONL")
        if self.path.is_dir():
            got, want = str(self.path), f"{self.path / 'log.jsonl'}"
            raise FdsError("this is a directory, not a file", where="JSONL", got=got, want=want)
        make_directory(self.path.parent, "JSONL")
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


_PART = "elapsed_time_ms_"  # before the parts of a call


class Console:
    """Print a line: `Train/Samples 5120  train_loss 2.31  lr 0.0003  grad_norm 0.82`.

    What all tags have in common stands before `x`. Of the times of `fds.timed` the whole call is printed; files have
    all of them, and `print(timed.last)` too. For a panel that is redrawn, with speeds and the time that is left,
    there is `fds.display.Progress`.

    Args:
        every: calls between two lines.
        console: where to print; None for the standard output.

    Raises `FdsError` for arguments of another kind.
    """

    @checked_call
    def __init__(self, *, every: int = 10, console: rich.console.Console | None = None):
        self.every = check_every(every, "Console")
        if not isinstance(console, rich.console.Console | None):
            raise FdsError("not a console", where="Console", got=repr(console)[:80], want="a rich.console.Console")
        self._console = console

    def __repr__(self) -> str:
        return f"Console(every={self.every})"

    def write(self, events: Sequence[Event]) -> None:
        """Print a line."""
        events = [event for event in events if _PART not in event.tag or event.tag.endswith(f"{_PART}call")]
        common = _common([event.tag for event in events])
        numbers = [f"{event.tag[len(common) :]} {short(event.value)}" for event in events]
        line = "  ".join([f"{common.rstrip('/')} {short(events[0].x)}".strip(), *numbers])
        console = rich.console.Console() if self._console is None else self._console
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _common(tags: Sequence[str]) -> str:
    """Return what all tags begin with, up to a slash.

    >>> _common(["Train/Samples/lr", "Train/Samples/lr/*norm*"]), _common(["loss", "lr"])
    ('Train/Samples/', '')
    """
    levels = zip(*(tag.split("/")[:-1] for tag in tags), strict=False)
    return "".join(f"{word}/" for word, *_ in itertools.takewhile(lambda level: len({*level}) == 1, levels))
