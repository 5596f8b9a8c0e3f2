"""`CSV`: a file for each tag, in DeepSpeed's layout."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from fds.errors import FdsError, checked_call
from fds.monitors.sink import Event, checked_every, checked_path, writable_directory


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
        self.every = checked_every(every, "CSV")
        self.directory = writable_directory(checked_path(directory, "CSV"), "CSV")
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

    def _open(self, tag: str, x: float) -> None:
        """Open the file of a tag, without what lies at `x` and behind it."""
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
    return FdsError(
        "this is not a line that CSV writes",
        where=f"{path}, line {number}",
        got=repr(line[:80])[1:],
        want=repr(want)[1:],
        hint="name another directory, or remove this file",
    )
