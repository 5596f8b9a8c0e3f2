"""A log of a run: a file of JSON lines, one per step and per note; read again, and drawn as a smoothed curve."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fds.errors import FdsError, expanded

_BEGINNING = b'{"step": '  # of every line
BLOCKS = "▁▂▃▄▅▆▇█"
MOST = 2048  # points that a curve keeps


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
        line = {"step": step, **values} | {"step": step, "seconds": round(self.seconds, 3)}
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


class Curve:
    """The running mean of a number, weighted by powers of `decay`, and its history, thinned out as it grows."""

    def __init__(self, *, decay: float = 0.97):
        self.decay = decay
        self.points: list[float] = []
        self._total = self._weight = 0.0
        self._interval, self._seen = 1, 0

    @property
    def value(self) -> float:
        """The running mean; NaN before the first finite number."""
        return self._total / self._weight if self._weight else math.nan

    def add(self, number: float) -> float:
        """Add a number, and return the running mean; numbers that are not finite are passed over."""
        if math.isfinite(number):
            self._total = self.decay * self._total + number
            self._weight = self.decay * self._weight + 1
        if self._weight and self._seen % self._interval == 0:
            self.points.append(self.value)
            if len(self.points) > MOST:
                self.points, self._interval = self.points[::2], 2 * self._interval
        self._seen += 1
        return self.value


def smooth(numbers: Iterable[float], *, decay: float = 0.97) -> list[float]:
    """Return the running means of numbers.

    >>> smooth([2.0, float("nan"), 2.0])
    [2.0, 2.0, 2.0]
    """
    curve = Curve(decay=decay)
    return [curve.add(number) for number in numbers]


def spark(points: Sequence[float], *, width: int) -> str:
    """Draw points as a line of at most `width` blocks.

    >>> spark([3.0, 2.0, 1.0], width=3)
    '█▅▁'
    """
    picked = [points[i * len(points) // width] for i in range(width)] if len(points) > width else points
    low, high = min(picked, default=0.0), max(picked, default=0.0)
    return "".join(BLOCKS[round(7 * (x - low) / (high - low)) if high > low else 0] for x in picked)


def draw_curve(log: str | Path, path: str | Path, *, metric: str = "loss", note: str | None = None) -> None:
    """Draw a metric by step, as it is and smoothed, and a note such as "held_out", into a PNG.

    Needs matplotlib, which the extra `plot` brings. Raises `FdsError` where it is missing, and for a log that lacks the
    metric.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FdsError("a PNG needs matplotlib", where="draw_curve", hint="pip install matplotlib") from error
    lines = read_log(log)
    points = lambda name: [(line["step"], line[name]) for line in lines if name in line]
    if not (drawn := points(metric)):
        names = ", ".join(dict.fromkeys(name for line in lines for name in line))
        raise FdsError(
            "the log has no such metric", where=str(log), got=metric, want=names, hint="metric= names another"
        )
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps, values = zip(*drawn, strict=True)
    axes.plot(steps, values, color="tab:blue", alpha=0.2, linewidth=0.7)
    axes.plot(steps, smooth(values), color="tab:blue", label=f"{metric}, smoothed")
    if note is not None:
        steps, values = zip(*noted, strict=True) if (noted := points(note)) else ((), ())
        label = f"{note}: {values[-1]:.3f}" if values else note
        axes.plot(steps, values, "o-", color="tab:orange", markersize=3.5, label=label)
    axes.set(xlabel="step", ylabel=metric)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
