"""`Run`: what lies in the directory of a run, as far as it can be read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import cattrs
import numpy as np

from fds.errors import FdsError
from fds.reporting.record import FORMAT, NAME, Record, Start, read_record
from fds.reporting.series import STEPS, Series, read_lines, read_table
from fds.storage.disk.folders import find, tags
from fds.storage.format.manifest import read_manifest

WHOLE = "step"  # the range of a whole call, in a trace


@attrs.frozen
class Row:
    """Messages of one kind: those of all calls that were watched, this rank's."""

    op: str
    what: str = ""
    axis: str = ""
    ranks: int = 0
    num_bytes: int = 0  # of one
    count: int = 0
    bytes_sent: int = 0
    predicted_count: int | None = None
    predicted_bytes: int | None = None
    timed: int = 0  # how many of them have times
    latency_ms: float = 0.0  # of all that have
    waited_ms: float = 0.0
    bus_gb_per_s: float | None = None


@attrs.frozen
class RankWait:
    """How long a rank waited for messages, and how long of it other ranks had not come yet, in milliseconds."""

    rank: int
    waited_ms: float = 0.0
    for_others_ms: float = 0.0


@attrs.frozen
class Table:
    """Messages of so many calls."""

    calls: int
    rows: tuple[Row, ...] = ()
    ranks: tuple[RankWait, ...] = ()


@attrs.frozen
class Slice:
    """A range of a rank in a trace, in milliseconds."""

    rank: int
    name: str
    start: float
    ms: float

    @property
    def part(self) -> str:
        """The part of a step that it is: `backward` of `backward/stage1/microbatch0`."""
        return self.name.split("/")[0].removesuffix("_weight")


MOST_TRACE_BYTES = 2**26


@attrs.frozen
class Save:
    """A save of a run."""

    name: str
    calls: int
    saved: str
    num_bytes: int
    composition: tuple[str, ...]


@attrs.define(eq=False)
class Run:
    """What a run left.

    Attributes:
        name: that the page calls it by.
        path: its directory.
        series: name -> metric.
        record: what it says of itself.
        messages: their table, None where none was kept.
        saves: in the order of calls.
        traces: file of `fds.trace` -> its ranges by rank, outer ones before those inside; what is none is left out.
        files: those that were read.
        cut: those whose last line is not complete.
        unreadable: file -> why it was not read, as text.
    """

    name: str
    path: Path
    series: dict[str, Series] = attrs.field(factory=dict)
    record: Record = attrs.field(factory=lambda: Record(FORMAT, ()))
    messages: Table | None = None
    saves: list[Save] = attrs.field(factory=list)
    traces: dict[str, list[Slice]] = attrs.field(factory=dict)
    files: list[str] = attrs.field(factory=list)
    cut: list[str] = attrs.field(factory=list)
    unreadable: dict[str, str] = attrs.field(factory=dict)

    def by_topology(self, series: Series) -> dict[str, Series]:
        """Return the points of a metric by the topology on which they were logged, in the order of its first use.

        A point belongs to the last start before it. All are of one topology where it is not known how many calls, or
        samples, a point is after the beginning.
        """
        starts = self.record.starts
        labels = list(dict.fromkeys(start.topology for start in starts))
        if len(labels) < 2 or (per_call := self._per_call(series.axis)) is None:
            return {labels[-1] if labels else "": series}
        of = np.zeros(len(series), dtype=np.int64)
        for start in starts:
            of[series.x > start.calls * per_call] = labels.index(start.topology)
        return {label: series.part(of == i) for i, label in enumerate(labels) if (of == i).any()}

    def latest(self, name: str) -> Series | None:
        """Return the points of a metric on the last topology, None without any."""
        series = self.series.get(name)
        return None if series is None else [*self.by_topology(series).values()][-1]

    def _per_call(self, axis: str) -> float | None:
        """Return how far a call goes along an axis: 1, or the samples of a call, None where it cannot be known."""
        if axis == STEPS:
            return 1.0
        x = np.concatenate([series.x for series in self.series.values() if series.axis == axis])
        if not (x == np.floor(x)).all() or not (x > 0).all():
            return None
        events: list[Start | Save] = [*self.record.starts, *self.saves]
        calls = max(event.calls for event in events)
        several = int(np.gcd.reduce(x.astype(np.int64)))  # samples of as many calls as lie between two points
        counts = (n for n in range(1, 10_000) if several % n == 0 and x.max() * n >= calls * several)
        return next((several / n for n in counts), None)


def read_run(path: Path, name: str) -> Run:
    """Read what lies in a directory; what cannot be read is named in `unreadable`.

    Raises `FdsError` for what is no directory, and one that holds nothing of a run.
    """
    want = "a directory that fds.record_run or a monitor has written to"
    try:
        entries = sorted(path.iterdir(), key=lambda entry: (entry.suffix != ".jsonl", entry.name))  # which has times
    except OSError as error:
        hint = f"fds report {path.parent}" if path.is_file() else ""
        raise FdsError("there is no run", where=str(path), got=str(error), want=want, hint=hint) from None
    run = Run(name, path)
    for entry in entries:
        if (reader := _READERS.get(entry.suffix)) and not entry.name.startswith(".") and entry.is_file():
            _try(run, entry.name, lambda entry=entry, reader=reader: reader(run, entry))
    for folder in (path, *(entry for entry in entries if entry.is_dir() and not entry.name.startswith("."))):
        for tag in tags(folder) if os.access(folder, os.R_OK) else ():
            shown = os.path.relpath(folder / tag, path)
            _try(run, shown, lambda folder=folder, tag=tag, shown=shown: _read_save(run, folder, tag, shown))
    run.saves.sort(key=lambda save: save.calls)
    if not run.files and not run.unreadable:
        runs = [str(entry) for entry in entries if entry.is_dir() and _looks_like_a_run(entry)]
        hint = f"its folders are runs: fds report {' '.join(runs[:4])}" if runs else ""
        names = ", ".join(entry.name for entry in entries[:8]) + ", ..." * (len(entries) > 8) or "an empty directory"
        raise FdsError("nothing here is of a run", where=str(path), got=names, want=want, hint=hint)
    if not run.files:
        reasons = "\n".join(f"{file}: {why}" for file, why in run.unreadable.items())
        raise FdsError("no file of this run can be read", where=str(path), got=reasons[:2000], want=want)
    return run


def _try(run: Run, file: str, read: Callable[[], bool]) -> None:
    try:
        if read():
            run.files.append(file)
    except (FdsError, OSError, RecursionError) as error:
        run.unreadable[file] = str(error)


def _read_series(run: Run, path: Path) -> bool:
    for name, series in (dict([read_table(path)]) if path.suffix == ".csv" else read_lines(path)).items():
        # of a metric that several files have, the one with more points; tables have other tags for slashes
        name = next((other for other in run.series if other.replace("/", "_") == name.replace("/", "_")), name)
        if len(series) > len(run.series.get(name, ())):
            run.series[name] = series
    if not path.read_bytes().endswith(b"\n"):
        run.cut.append(path.name)
    return True


def _read_json(run: Run, path: Path) -> bool:
    """Read `run.json`, `messages.json`, or a trace; other files of JSON are not of fds."""
    if path.name == NAME:
        run.record = read_record(path)
    elif path.name == "messages.json":
        try:
            run.messages = cattrs.structure(json.loads(path.read_bytes()), Table)
        except (ValueError, TypeError, cattrs.BaseValidationError) as error:
            raise FdsError("this is not a table of messages", where=str(path), got=str(error).splitlines()[0]) from None
    elif path.stat().st_size > MOST_TRACE_BYTES or b'"traceEvents"' not in path.read_bytes()[:4096]:
        return False
    else:
        try:
            events = list(json.loads(path.read_bytes())["traceEvents"])
        except (ValueError, TypeError, KeyError) as error:
            raise FdsError("this is not a trace", where=str(path), got=str(error)) from None
        run.traces[path.name] = slices_of(events)
    return True


def slices_of(events: list[Any]) -> list[Slice]:
    """Return the ranges in events of Chrome's format."""
    slices: list[Slice] = []
    for event in events:
        match event:
            case {"ph": "X", "pid": int(rank), "name": str(name), "ts": float(at), "dur": float(us)} if (
                math.isfinite(at) and 0 <= us < math.inf
            ):
                slices.append(Slice(rank, name, at / 1e3, us / 1e3))
    return sorted(slices, key=lambda slice: (slice.rank, slice.start, -slice.ms))


def _read_save(run: Run, folder: Path, tag: str, shown: str) -> bool:
    manifest = read_manifest(find(folder, tag))
    size = sum(file.bytes for file in manifest.files.values())
    run.saves.append(Save(shown, manifest.calls, manifest.saved, size, manifest.composition))
    return True


_READERS: dict[str, Callable[[Run, Path], bool]] = {".jsonl": _read_series, ".csv": _read_series, ".json": _read_json}


def _looks_like_a_run(folder: Path) -> bool:
    try:
        return any(entry.suffix in _READERS for entry in folder.iterdir())
    except OSError:
        return False
