"""`draw_png`: a timeline as a PNG, one lane of bars per rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fds.errors import PlanError
from fds.plans.colors import COLORS, LABELS, color
from fds.plans.timeline import Event, Timeline, check_timeline, computing, stages_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES, _DIGIT = 14.0, 0.09  # the width of a picture; of a digit of 9 points


def draw_png(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Draw a bar per computation, coloured by its operation, with its microbatch where there is room.

    If a rank has several stages, later ones are paler. Needs matplotlib, the extra `plot`; pyplot's state is not
    changed. Raises `PlanError` if matplotlib is missing, for a plan that was not simulated, and if the file cannot be
    written.
    """
    check_timeline(timeline, "draw_png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("a PNG needs matplotlib", where="draw_png", hint="pip install matplotlib") from error
    rows = [computing(row) for row in timeline.rows]
    figure = Figure(figsize=(_INCHES, 1.4 + 0.34 * len(rows)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, row in enumerate(rows):
        _lane(axes, rank, row, inches_per_unit=0.9 * _INCHES / (timeline.makespan or 1.0))
    axes.set(xlim=(0, timeline.makespan or 1.0), ylim=(len(rows) - 0.5, -0.5), xlabel="time", ylabel="rank")
    axes.set_yticks(range(len(rows)))
    used = [op for op in COLORS if any(event.action.op is op for row in rows for event in row)]
    if used:
        handles = [axes.bar(0, 0, color=COLORS[op], label=LABELS[op]) for op in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(used), frameon=False)
    axes.set_title(title if title is not None else f"bubble {timeline.bubble_fraction:.1%}")
    try:
        canvas.print_png(str(path))
    except OSError as error:
        raise PlanError("the picture cannot be written", where=str(path), got=str(error)) from error


def _lane(axes: Axes, rank: int, row: list[Event], *, inches_per_unit: float) -> None:
    stages = stages_of(row)
    spans = [(event.start, event.end - event.start) for event in row]
    faces = [color(event.action, stages) for event in row]
    axes.broken_barh(spans, (rank - 0.45, 0.9), facecolors=faces, edgecolor="white", linewidth=0.4)
    for event, (start, length) in zip(row, spans, strict=True):
        name = f"{event.action.microbatch}"
        if length * inches_per_unit > _DIGIT * (len(name) + 0.5):
            axes.text(start + length / 2, rank, name, ha="center", va="center", fontsize=9, clip_on=True)
