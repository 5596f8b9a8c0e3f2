"""What the page draws: charts of lines, one for each metric, and of the parts of a call, stacked."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from fds.reporting.findings import Finding
from fds.reporting.metrics import PARTS, TIME, TIMES, Kind, evaluates, kind_of
from fds.reporting.run import Run
from fds.reporting.series import Series, finite, thinned

MOST_CHARTS = 300
MOST_POINTS = 600  # of a line
_NUMBERS = 100_000  # of all lines together, some 10 bytes each


@attrs.frozen(eq=False)
class Line:
    """A line of a chart."""

    run: int
    label: str
    series: Series
    color: str = ""  # of the part that it is; empty for the run's


@attrs.frozen(eq=False)
class Chart:
    """Lines over one x axis.

    Attributes:
        title: the metric, or the run whose calls are shown.
        kind: of the metric.
        lines: those of all runs.
        stacked: whether they add up.
        marks: (run, x, what) of findings.
    """

    title: str
    kind: Kind
    lines: tuple[Line, ...]
    stacked: bool = False
    marks: tuple[tuple[int, float, str], ...] = ()

    @property
    def group(self) -> str:
        """What charts of one folded group have in common: `lr/*` of `lr/norm`; empty for a chart of its own."""
        if self.title.startswith(TIMES):
            return f"{TIMES}*"
        return self.title.partition("/")[0] + "/*" if "/" in self.title else ""

    @property
    def axis(self) -> str:
        """What the x axis counts."""
        return " or ".join(dict.fromkeys(line.series.axis for line in self.lines))

    def summary(self, runs: Sequence[Run]) -> str:
        """Return the chart as a sentence, for those who do not see it."""
        told = []
        for line in self.lines:
            known = finite(line.series)
            of = ", ".join([line.label] * (line.label != self.title) + [runs[line.run].name] * (len(runs) > 1))
            ends = f"{known.y[0]:.4g} to {known.y[-1]:.4g}" if len(known) else "no finite value"
            told.append(f"{of}: {ends}" if of else ends)
        return f"{self.title} by {self.axis}; {'; '.join(told[:8])}"


def charts(runs: Sequence[Run], found: Sequence[Sequence[Finding]]) -> list[Chart]:
    """Return a chart for each metric of any run, in the order of the page, and the stacked parts of calls first."""
    names = dict.fromkeys(name for run in runs for name in run.series)
    drawn = [_chart(name, names, runs, found) for name in names if evaluates(name) not in names]
    drawn.sort(key=lambda chart: (chart.kind.rank, "/" in chart.title))
    return [*filter(None, (_stacked(index, run) for index, run in enumerate(runs))), *drawn]


def _chart(name: str, names: Mapping[str, None], runs: Sequence[Run], found: Sequence[Sequence[Finding]]) -> Chart:
    shown = [name, *(other for other in names if evaluates(other) == name)]
    lines = [Line(index, one, run.series[one]) for index, run in enumerate(runs) for one in shown if one in run.series]
    marks = [(i, x, one.what) for i, some in enumerate(found) for one in some if one.metric in shown for x in one.at]
    return Chart(name, kind_of(name), tuple(lines), marks=tuple(marks))


def parts(run: Run) -> dict[str, Series]:
    """Return part of a call -> its milliseconds, at every x that all parts have; empty without times."""
    known = {name.removeprefix(TIMES): one for name, one in run.series.items() if name.startswith(TIMES)}
    made = {part: of for part, (of, _) in PARTS.items() if set(of) <= known.keys()}
    if not made:
        return {}
    used = {name: known[name] for of in made.values() for name in of}
    x = functools.reduce(np.intersect1d, (one.x for one in used.values()))
    at = {name: np.isin(one.x, x) for name, one in used.items()}
    y = {name: one.y[at[name]] for name, one in used.items()}
    found: dict[str, Series] = {}
    for part, (name, *inside) in made.items():
        ms = np.maximum(y[name] - sum(y[other] for other in inside), 0.0)
        found[part] = Series(used[name].axis, x, ms, used[name].seconds[at[name]])
    return found


def _stacked(index: int, run: Run) -> Chart | None:
    lines = tuple(Line(index, part, series, PARTS[part][1]) for part, series in parts(run).items())
    return Chart("parts of a call", Kind(TIME, "ms"), lines, stacked=True) if lines else None


def data(runs: Sequence[Run], drawn: Sequence[Chart]) -> dict[str, Any]:
    """Return what the page's program draws, as JSON has it: arrays that lines share, and the lines of each chart."""
    num_lines = sum(len(chart.lines) for chart in drawn)
    most = max(8, min(MOST_POINTS, _NUMBERS // max(num_lines, 1)))
    arrays: dict[tuple[float | None, ...], int] = {}
    keep = lambda numbers: arrays.setdefault(tuple(numbers), len(arrays))
    made = []
    for chart in drawn:
        lines = []
        for line in chart.lines:
            points = thinned(line.series, most)
            if all(t is None for t in points["t"]):
                del points["t"]
            one = {"run": line.run, "label": line.label} | {name: keep(some) for name, some in points.items()}
            if not chart.kind.smooth or not kind_of(line.label).smooth:
                one["exact"] = True
            lines.append(one | {"color": line.color} if line.color else one)
        made.append(
            {"title": chart.title, "unit": chart.kind.unit, "axis": chart.axis}
            | {"stacked": chart.stacked, "lines": lines, "marks": [list(mark) for mark in chart.marks]}
        )
    return {"runs": [run.name for run in runs], "charts": made, "arrays": list(map(list, arrays))}


def typical(series: Series | None) -> float:
    """Return the median of a metric in the second half of a run; NaN where there is none."""
    known = None if series is None else finite(series)
    return float(np.median(known.y[len(known) // 2 :])) if known is not None and len(known) else math.nan
