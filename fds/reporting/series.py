"""`Series`: a metric of a run along its x axis, read from what sinks wrote, and thinned out for a page."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from fds.display import read_log
from fds.errors import FdsError

STEPS, SAMPLES = "steps", "samples"
_DEEPSPEEDS = re.compile(r"Train/(Samples|Steps)/")  # before the names of metrics, where a monitor has no other tags
_NAMES = {"train_loss": "loss"}


@attrs.frozen(eq=False)
class Series:
    """A metric of a run.

    Attributes:
        axis: what `x` counts: "steps" or "samples".
        x: (N,) float64, increasing.
        y: (N,) float64, NaN and infinities among them.
        seconds: (N,) float64, that the run had taken, NaN where nothing says so.
    """

    axis: str
    x: np.ndarray
    y: np.ndarray
    seconds: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def part(self, of: np.ndarray) -> Series:
        """Return the points for which `of`, (N,) bool, is true."""
        return Series(self.axis, self.x[of], self.y[of], self.seconds[of])


@attrs.define(eq=False)
class Points:
    """The points of a series, as they are read: a run that goes back writes points again, and the last ones count."""

    axis: str
    rows: list[tuple[float, float, float]] = attrs.field(factory=list)

    def add(self, x: float, y: float, seconds: float) -> None:
        """Add a point, in the place of those at `x` and behind it."""
        while self.rows and self.rows[-1][0] >= x:
            self.rows.pop()
        self.rows.append((x, y, seconds))

    def series(self) -> Series:
        """Return the series."""
        return Series(self.axis, *np.array(self.rows, dtype=np.float64).reshape(-1, 3).T)


def read_lines(path: Path) -> dict[str, Series]:
    """Return the metrics of a file of JSON lines: a `JSONL` sink's, or the log of `Progress`.

    Raises `FdsError` for a file that is none, and `OSError`.
    """
    found: dict[str, Points] = {}
    for line in read_log(path):
        x, seconds = number(line.get("step")), number(line.get("seconds"))
        for tag, value in line.items() if math.isfinite(x) else ():
            if tag not in ("step", "seconds") and (y := _value(value)) is not None:
                name, axis = named(tag)
                found.setdefault(name, Points(axis)).add(x, y, seconds)
    return {name: points.series() for name, points in found.items()}


def read_table(path: Path) -> tuple[str, Series]:
    """Return the name and the points of a file that a `CSV` sink wrote; a row that is not complete is left out.

    Raises `FdsError` for a file that is none, and `OSError`.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise _no_table(path, str(error)) from None
    rows = csv.reader(text[: text.rfind("\n") + 1].splitlines())
    try:
        head = next(rows, [])
        if len(head) != 2 or head[0] != "step":
            raise _no_table(path, ",".join(head)[:80])
        name, axis = named(_tag(path.stem, head[1]))
        points = Points(axis)
        for row in rows:
            x, y = map(float, row)
            if math.isfinite(x):
                points.add(x, y, math.nan)
    except FdsError:
        raise
    except (ValueError, csv.Error) as error:
        raise _no_table(path, str(error)) from None
    return name, points.series()


def _tag(stem: str, last: str) -> str:
    """Return the tag of a file's name, as far as it says: slashes and spaces are underscores there.

    >>> _tag("Train_Samples_train_loss", "train_loss"), _tag("gpt_loss", "loss"), _tag("a_loss", "a loss")
    ('Train/Samples/train_loss', 'gpt/loss', 'a loss')
    """
    before = stem.removesuffix(last.replace(" ", "_"))
    before = re.sub("^Train_(Samples|Steps)_", r"Train/\1/", before)
    return re.sub("_$", "/", before) + last


def named(tag: str) -> tuple[str, str]:
    """Return the name of a metric whose tag is given, and what its x axis counts.

    >>> named("Train/Samples/train_loss"), named("gpt/loss")
    (('loss', 'samples'), ('gpt/loss', 'steps'))
    """
    group = _DEEPSPEEDS.match(tag)
    name = tag[group.end() :] if group else tag
    return _NAMES.get(name, name) if group else name, SAMPLES if group and group[1] == "Samples" else STEPS


def number(value: Any) -> float:
    """Return a value of JSON as a number, NaN for what is none."""
    return math.nan if (read := _value(value)) is None else read


def finite(series: Series) -> Series:
    """Return the points of a series whose values are finite."""
    kept = np.isfinite(series.y)
    return Series(series.axis, series.x[kept], series.y[kept], series.seconds[kept])


def thinned(series: Series, most: int) -> dict[str, list[float | None]]:
    """Return at most `most` points for a page: `x`, `y`, `t`, and where several are one, `lo` and `hi` as well.

    Points that are one have the mean of their finite values as `y`, their last `x` and `t`; None where none is finite.
    """
    if len(series) <= most:
        return {"x": _short(series.x), "y": _short(series.y), "t": _short(series.seconds)}
    ends = np.linspace(0, len(series), most + 1).astype(int)
    y = np.where(np.isfinite(series.y), series.y, np.nan)
    starts, last, known = ends[:-1], ends[1:] - 1, np.isfinite(y)
    count = np.add.reduceat(known, starts, dtype=np.float64)
    with np.errstate(all="ignore"):
        mean = np.add.reduceat(np.where(known, y, 0.0), starts) / count
        low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    x, t = series.x[last], series.seconds[last]
    return {"x": _short(x), "y": _short(mean), "t": _short(t), "lo": _short(low), "hi": _short(high)}


def _value(value: Any) -> float | None:
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _no_table(path: Path, got: str) -> FdsError:
    return FdsError("this is not a table of a monitor", where=str(path), got=got, want="step,loss and rows of numbers")


def _short(numbers: np.ndarray) -> list[float | None]:
    """Return numbers with six digits, as few characters as JSON needs, None for those that are not finite."""
    return [_rounded(float(x)) if math.isfinite(x) else None for x in numbers]


def _rounded(x: float) -> float:
    return int(x) if x.is_integer() and abs(x) < 1e15 else float(f"{x:.6g}")
