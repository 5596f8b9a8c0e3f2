"""`Series`: a metric of a run along its x axis, read from what sinks wrote; and what its name says of it."""

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

CURVES, SPEED, TIME, MEMORY, MESSAGES = "curves", "speed", "time", "memory", "messages"
STEPS, SAMPLES = "steps", "samples"
TIMES = "elapsed_time_ms_"  # before the names of what fds.timed measures
_DEEPSPEEDS = re.compile(r"Train/(Samples|Steps)/")  # before the names of metrics, where a monitor has no other tags
_NAMES = {"train_loss": "loss"}
EVALUATED = ("eval_", "val_", "test_", "held_out_")  # before the name of a metric: it is drawn beside that


@attrs.frozen
class Kind:
    """What metrics of some name are.

    Attributes:
        section: where they are shown.
        unit: of their values: "ms", "/s", "B", "%" of what is a share of 1, or none.
        smooth: whether their values are noisy.
        rank: of the section's metrics, smaller ones come first.
    """

    section: str
    unit: str = ""
    smooth: bool = True
    rank: int = 50


_KINDS = {  # a name that matches is of that kind; the first counts
    r"messages.*_bytes_sent": Kind(MESSAGES, "B"),
    r"messages.*_ms": Kind(MESSAGES, "ms"),
    r"messages(_.*)?": Kind(MESSAGES),
    rf"{TIMES}.*": Kind(TIME, "ms"),
    r"tokens_per_s": Kind(SPEED, "/s", rank=10),
    r"samples_per_s": Kind(SPEED, "/s", rank=20),
    r".*_per_s": Kind(SPEED, "/s", rank=30),
    r"mfu": Kind(SPEED, "%", rank=5),
    r".*(bytes|memory).*": Kind(MEMORY, "B"),
    r"loss": Kind(CURVES, rank=0),
    r"(eval|val|test|held_out).*": Kind(CURVES, smooth=False, rank=10),
    r"grad_norm": Kind(CURVES, rank=60),
    r"lr(/.*)?": Kind(CURVES, smooth=False, rank=70),
    r"loss_scale|skipped|at_minimum_scale|rolled_back": Kind(CURVES, smooth=False, rank=80),
    r".*": Kind(CURVES),
}


def kind_of(name: str) -> Kind:
    """Return what a metric is.

    >>> kind_of("elapsed_time_ms_wait").unit, kind_of("lr/*norm*").smooth, kind_of("accuracy").section
    ('ms', False, 'curves')
    """
    return next(kind for pattern, kind in _KINDS.items() if re.fullmatch(pattern, name, re.DOTALL))


def evaluates(name: str) -> str:
    """Return the metric beside which this one is drawn; empty where it is not of an evaluation.

    >>> evaluates("eval_loss"), evaluates("loss")
    ('loss', '')
    """
    return next((name.removeprefix(word) for word in EVALUATED if name.startswith(word)), "")


PARTS = {  # part of a call -> what fds.timed measures of it, less what else is in that; and its colour
    "gather": (("gather",), "#8c6d31"),
    "forward": (("forward",), "#56b4e9"),
    "backward": (("backward_inner",), "#cc79a7"),
    "reduce": (("backward_allreduce", "wait"), "#e69f00"),
    "wait": (("wait",), "#d55e00"),
    "optimizer": (("step",), "#009e73"),
    "other": (("other",), "#999999"),
}


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
    metrics: dict[str, Points] = {}
    for line in read_log(path):
        x, seconds = (math.nan if (n := _number(line.get(name))) is None else n for name in ("step", "seconds"))
        for tag, value in line.items() if math.isfinite(x) else ():
            if tag not in ("step", "seconds") and (y := _number(value)) is not None:
                name, axis = name_of(tag)
                metrics.setdefault(name, Points(axis)).add(x, y, seconds)
    return {name: points.series() for name, points in metrics.items()}


def read_table(path: Path) -> tuple[str, Series]:
    """Return the name and the points of a file that a `CSV` sink wrote; a row that is not complete is left out.

    Raises `FdsError` for a file that is none, and `OSError`.
    """
    try:
        text = path.read_bytes().decode()
        rows = csv.reader(text[: text.rfind("\n") + 1].splitlines())
        head = next(rows, [])
        if len(head) != 2 or head[0] != "step":
            raise ValueError(",".join(head)[:80])
        name, axis = name_of(_tag(path.stem, head[1]))
        points = Points(axis)
        for row in rows:
            x, y = map(float, row)
            if math.isfinite(x):
                points.add(x, y, math.nan)
    except (ValueError, csv.Error) as error:  # one of which says that this is not Unicode
        what, want = "this is not a table of a monitor", "step,loss and rows of numbers"
        raise FdsError(what, where=str(path), got=str(error), want=want) from None
    return name, points.series()


def _tag(stem: str, last: str) -> str:
    """Return the tag of a file's name, as far as it says: slashes and spaces are underscores there.

    >>> _tag("Train_Samples_train_loss", "train_loss"), _tag("gpt_loss", "loss"), _tag("a_loss", "a loss")
    ('Train/Samples/train_loss', 'gpt/loss', 'a loss')
    """
    before = stem.removesuffix(last.replace(" ", "_"))
    before = re.sub("^Train_(Samples|Steps)_", r"Train/\1/", before)
    return re.sub("_$", "/", before) + last


def name_of(tag: str) -> tuple[str, str]:
    """Return the name of a metric whose tag is given, and what its x axis counts.

    >>> name_of("Train/Samples/train_loss"), name_of("gpt/loss")
    (('loss', 'samples'), ('gpt/loss', 'steps'))
    """
    group = _DEEPSPEEDS.match(tag)
    name = tag[group.end() :] if group else tag
    return _NAMES.get(name, name) if group else name, SAMPLES if group and group[1] == "Samples" else STEPS


def finite(series: Series) -> Series:
    """Return the points of a series whose values are finite."""
    return series.part(np.isfinite(series.y))


def typical(series: Series | None) -> float:
    """Return the median of a metric in the second half of a run; NaN where there is none."""
    if series is None or not len(points := finite(series)):
        return math.nan
    return float(np.median(points.y[len(points) // 2 :]))


def thin(series: Series, most: int) -> dict[str, list[float | None]]:
    """Return at most `most` points for a page: `x`, `y`, `t`, and where several are one, `lo` and `hi` as well.

    Points that are one have the mean of their finite values as `y`, their last `x` and `t`; None where none is finite.
    """
    if len(series) <= most:
        return {"x": _short(series.x), "y": _short(series.y), "t": _short(series.seconds)}
    ends = np.linspace(0, len(series), most + 1).astype(int)
    y = np.where(np.isfinite(series.y), series.y, np.nan)
    starts, last, is_finite = ends[:-1], ends[1:] - 1, np.isfinite(y)
    count = np.add.reduceat(is_finite, starts, dtype=np.float64)
    with np.errstate(all="ignore"):
        mean = np.add.reduceat(np.where(is_finite, y, 0.0), starts) / count
        low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    x, t = series.x[last], series.seconds[last]
    return {"x": _short(x), "y": _short(mean), "t": _short(t), "lo": _short(low), "hi": _short(high)}


def _number(value: Any) -> float | None:
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(numbers: np.ndarray) -> list[float | None]:
    """Return numbers with six digits, as few characters as JSON needs, None for those that are not finite."""
    shorten = lambda x: int(x) if x.is_integer() and abs(x) < 1e15 else float(f"{x:.6g}")
    return [shorten(float(x)) if math.isfinite(x) else None for x in numbers]
