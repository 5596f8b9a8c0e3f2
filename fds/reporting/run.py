"""`Run`: what lies in a run's directory, as far as it can be read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from fds.errors import FdsError
from fds.reporting.messages import NAME as MESSAGES, Table, read_messages
from fds.reporting.record import FORMAT, NAME, Record, read_record
from fds.reporting.series import STEPS, Series, read_lines, read_table
from fds.storage.disk.folders import find, tags
from fds.storage.format.manifest import read_manifest

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
        traces: file -> events of Chrome's format.
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
    traces: dict[str, list[Any]] = attrs.field(factory=dict)
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
        x = np.concatenate([one.x for one in self.series.values() if one.axis == axis])
        if not (x == np.floor(x)).all() or not (x > 0).all():
            return None
        calls = max(one.calls for one in (*self.record.starts, *self.saves))
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
        raise FdsError("nothing here is of a run", where=str(path), got=_listed(entries), want=want, hint=hint)
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


def _read_lines(run: Run, path: Path) -> bool:
    for name, series in read_lines(path).items():
        _keep(run, name, series)
    return _note_cut(run, path)


def _read_table(run: Run, path: Path) -> bool:
    _keep(run, *read_table(path))
    return _note_cut(run, path)


def _note_cut(run: Run, path: Path) -> bool:
    if not path.read_bytes().endswith(b"\n"):
        run.cut.append(path.name)
    return True


def _keep(run: Run, name: str, series: Series) -> None:
    """Keep a metric; of one that several files have, the one with more points. Tables have other tags for slashes."""
    known = next((one for one in run.series if one.replace("/", "_") == name.replace("/", "_")), name)
    if len(series) > len(run.series.get(known, ())):
        run.series[known] = series


def _read_json(run: Run, path: Path) -> bool:
    """Read `run.json`, `messages.json`, or a trace; other files of JSON are not of fds."""
    if path.name == NAME:
        run.record = read_record(path)
        return True
    if path.name == MESSAGES:
        run.messages = read_messages(path)
        return True
    if path.stat().st_size > MOST_TRACE_BYTES or b'"traceEvents"' not in path.read_bytes()[:4096]:
        return False
    try:
        run.traces[path.name] = list(json.loads(path.read_bytes())["traceEvents"])
    except (ValueError, TypeError, KeyError) as error:
        raise FdsError("this is not a trace", where=str(path), got=str(error)) from None
    return True


def _read_save(run: Run, folder: Path, tag: str, shown: str) -> bool:
    manifest = read_manifest(find(folder, tag))
    size = sum(file.bytes for file in manifest.files.values())
    run.saves.append(Save(shown, manifest.calls, manifest.saved, size, manifest.composition))
    return True


_READERS: dict[str, Callable[[Run, Path], bool]] = {".jsonl": _read_lines, ".csv": _read_table, ".json": _read_json}


def _looks_like_a_run(folder: Path) -> bool:
    try:
        return any(entry.suffix in _READERS for entry in folder.iterdir())
    except OSError:
        return False


def _listed(entries: list[Path]) -> str:
    names = [entry.name for entry in entries]
    return ", ".join(names[:8]) + ", ..." * (len(names) > 8) if names else "an empty directory"
