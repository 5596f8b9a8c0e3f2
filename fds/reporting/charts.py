"""What the page draws: charts of metrics and of the parts of a call, and what ranks did when."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from fds import _html
from fds.reporting.findings import Finding
from fds.reporting.run import WHOLE, Run, Slice
from fds.reporting.series import PARTS, TIME, TIMES, Kind, Series, evaluates, finite, kind_of, thin

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
        texts = []
        for line in self.lines:
            points = finite(line.series)
            of = ", ".join([line.label] * (line.label != self.title) + [runs[line.run].name] * (len(runs) > 1))
            ends = f"{points.y[0]:.4g} to {points.y[-1]:.4g}" if len(points) else "no finite value"
            texts.append(f"{of}: {ends}" if of else ends)
        return f"{self.title} by {self.axis}; {'; '.join(texts[:8])}"


def charts(runs: Sequence[Run], findings: Sequence[Sequence[Finding]]) -> list[Chart]:
    """Return a chart for each metric of any run, in the order of the page, and the stacked parts of calls first."""
    names, drawn, stacked = dict.fromkeys(name for run in runs for name in run.series), [], []
    for title in names:
        if evaluates(title) not in names:
            shown = [title, *(name for name in names if evaluates(name) == title)]
            lines = [Line(i, x, run.series[x]) for i, run in enumerate(runs) for x in shown if x in run.series]
            remarks = [
                (i, finding) for i, of_run in enumerate(findings) for finding in of_run if finding.metric in shown
            ]
            marks = tuple((i, x, finding.what) for i, finding in remarks for x in finding.at)
            drawn.append(Chart(title, kind_of(title), tuple(lines), marks=marks))
    for i, run in enumerate(runs):
        if lines := tuple(Line(i, part, series, PARTS[part][1]) for part, series in parts(run).items()):
            stacked.append(Chart("parts of a call", Kind(TIME, "ms"), lines, stacked=True))
    return [*stacked, *sorted(drawn, key=lambda chart: (chart.kind.rank, "/" in chart.title))]


def parts(run: Run) -> dict[str, Series]:
    """Return part of a call -> its milliseconds, at every x that all parts have; empty without times."""
    times = {name.removeprefix(TIMES): series for name, series in run.series.items() if name.startswith(TIMES)}
    measured = {part: names for part, (names, _) in PARTS.items() if set(names) <= times.keys()}
    if not measured:
        return {}
    used = {name: times[name] for names in measured.values() for name in names}
    x = functools.reduce(np.intersect1d, (series.x for series in used.values()))
    used = {name: series.part(np.isin(series.x, x)) for name, series in used.items()}
    alone: dict[str, Series] = {}
    for part, (name, *inside) in measured.items():
        ms = np.maximum(used[name].y - sum(used[other].y for other in inside), 0.0)
        alone[part] = attrs.evolve(used[name], y=ms)
    return alone


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
            points = thin(line.series, most)
            if all(t is None for t in points["t"]):
                del points["t"]
            shown = {"run": line.run, "label": line.label} | {name: keep(numbers) for name, numbers in points.items()}
            if not chart.kind.smooth or not kind_of(line.label).smooth:
                shown["exact"] = True
            lines.append(shown | {"color": line.color} if line.color else shown)
        made.append(
            {"title": chart.title, "unit": chart.kind.unit, "axis": chart.axis}
            | {"stacked": chart.stacked, "lines": lines, "marks": [list(mark) for mark in chart.marks]}
        )
    return {"runs": [run.name for run in runs], "charts": made, "arrays": list(map(list, arrays))}


def picture(slices: Sequence[Slice]) -> str:
    """Return a trace as HTML: a lane for each rank, a bar for each part, and what the colours mean."""
    lanes: dict[int, list[_html.Bar]] = {}
    inside = [slice for slice in slices if slice.part != WHOLE]
    for slice in inside:
        color = PARTS.get(slice.part, PARTS["other"])[1][1:]
        title = f"{slice.name}: {slice.ms:.3f} ms from {slice.start:.3f} ms"
        lanes.setdefault(slice.rank, []).append(_html.Bar(slice.start, slice.start + slice.ms, color, "", title))
    end = max((slice.start + slice.ms for slice in inside), default=0.0)
    shown = {slice.part for slice in inside}
    colors = _html.legend((PARTS[part][1][1:], part) for part in PARTS if part in shown)
    return _html.lanes([*lanes.values()], end) + colors + _html.text(f"{end:,.1f} ms from left to right")
