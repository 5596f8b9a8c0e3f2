"""What was done, one JSON line a case, in OUT/records.jsonl: written at once, so that no kill takes it away.

A part of the benchmark is a module with `cases(setting)`, which returns every `Case` without making a tensor. A case's
`run` does the work and returns figures; what it raises is its failure, and figures that a `Failed` carries are kept:

    def cases(setting: kernel_works.Setting) -> Iterator[Case]:
        yield Case("layer_norm forward 8192x1024 bfloat16", lambda: {"ms": 0.1, "of copy": 0.91}, limit_s=60)

It may also have `tables(records: list[Record]) -> list[report.Rows]`, which `results.md` shows instead of a row a case.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

NAME = "records.jsonl"
BEGUN, PASSED, FAILED, ERROR, NO_TIME = "begun", "passed", "failed", "error", "skipped-no-time"
WRONG = (FAILED, ERROR)
STATUSES = (BEGUN, PASSED, FAILED, ERROR, NO_TIME)
LONGEST_ERROR = 4000  # characters: the files of a whole run stay below a megabyte or two


@attrs.frozen
class Case:
    """One thing to do. Its name is unique in its part and stays the same from call to call."""

    name: str
    run: Callable[[], Mapping[str, Any] | None]  # -> figures, anything that JSON takes
    limit_s: float = 60.0  # after which its process is killed
    again: bool = False  # every process does it: what it makes is not in the folder of results


class Failed(Exception):
    """A case that ran to its end and is wrong: the text says what, the figures are kept."""

    def __init__(self, text: str, figures: Mapping[str, Any] | None = None):
        super().__init__(text)
        self.figures = dict(figures or {})


@attrs.frozen
class Record:
    """What came of a case: passed, failed (what it computes is wrong), error (raised, crashed or hung), or no time."""

    part: str
    case: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = attrs.field(factory=dict)
    error: str = ""
    call: int = 0  # which call of the runner into this folder; filled in by `Records`
    at: float = 0.0  # seconds since 1970; filled in by `Records`


class Records:
    """The records of one folder, of this call and of earlier ones."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self.heads, self.records = read(self.path)
        self.call = len(self.heads)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Begin a call: write a head line of machine, versions and what is asked for."""
        self.call += 1
        head = {"head": dict(facts), "call": self.call, "at": time.time()}
        self.heads.append(head)
        _append(self.path, head)

    def add(self, record: Record) -> Record:
        """Write a record, at once."""
        record = attrs.evolve(record, call=self.call, at=time.time(), error=_shortened(record.error))
        self.records.append(record)
        _append(self.path, attrs.asdict(record))
        return record

    def refresh(self) -> list[Record]:
        """Read what other processes have written since, and return all records."""
        self.heads, self.records = read(self.path)
        return self.records

    def done(self, part: str) -> set[str]:
        """Return the names of the cases of a part that passed, in this call or before: they are not run again."""
        return {name for name, r in self.latest(part).items() if r.status == PASSED}

    def tried(self, part: str) -> set[str]:
        """Return the names of the cases of a part that ended in this call, whatever came of them."""
        return {
            r.case for r in self.records if r.part == part and r.call == self.call and r.status not in (BEGUN, NO_TIME)
        }

    def latest(self, part: str) -> dict[str, Record]:
        """Return by name what came of each case of a part last; one that found no time keeps what it had."""
        last: dict[str, Record] = {}
        for r in self.records:
            if r.part == part and r.status != BEGUN and not (r.status == NO_TIME and r.case in last):
                last[r.case] = r
        return last


def read(path: Path) -> tuple[list[dict[str, Any]], list[Record]]:
    """Return the head lines and the records of a file; a line that a kill broke off is left out."""
    heads, records = [], []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
            if "head" in found:
                heads.append(found)
            else:
                records.append(Record(**found))
        except (ValueError, TypeError):
            continue
    return heads, records


def counted(records: Iterable[Record]) -> dict[str, int]:
    """Return how many records have each status."""
    records = list(records)
    return {status: n for status in STATUSES if (n := sum(r.status == status for r in records))}


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line in one write, so that processes may share the file; a broken line before it is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        broken = file.seek(0, os.SEEK_END) > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        text = json.dumps(line, default=str)  # on one line, in ASCII
        file.write((b"\n" if broken else b"") + text.encode() + b"\n")


def _shortened(text: str) -> str:
    """Return the two ends of a text that is too long."""
    if len(text) <= LONGEST_ERROR:
        return text
    return f"{text[: LONGEST_ERROR // 4]}\n...\n{text[-LONGEST_ERROR * 3 // 4 :]}"
