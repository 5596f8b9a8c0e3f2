"""Pictures of timelines, simulated or recorded: text for a terminal, a PNG, a trace for Perfetto."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fds.errors import PlanError
from fds.plans.plan import COLORS, COMPUTE, LABELS, SENDS, Action, Op, color
from fds.plans.timeline import Event, Timeline, check_timeline, computing, stages_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LETTER = 3  # index of the shortest name
WIDEST = 2000  # columns, if no width is given
_STYLES = {
    Op.FORWARD: "black on bright_blue",
    Op.BACKWARD_INPUT: "black on bright_cyan",
    Op.BACKWARD_WEIGHT: "black on bright_green",
    Op.BACKWARD: "black on bright_yellow",
}


def draw_text(timeline: Timeline, *, width: int | None = None, color: bool | None = None) -> str:
    """Return one line per rank: a computation as its operation and microbatch, then `-` for as long as it lasts.

    If a rank has several stages, names begin with the stage, as in `2F0`. If names do not fit, all names of a rank drop
    the stage, then are shortened to the first letter of the operation and the microbatch; an operation too short for
    that is only its letter. The last line shows time 0 and the end. Raises `PlanError` for a plan that was not
    simulated.

    Args:
        timeline: simulated or measured.
        width: columns of the drawing; None is as many as the names need.
        color: whether to use terminal colours; None does if standard output is a terminal.

    >>> from fds.plans.simulator import simulate
    >>> print(draw_text(simulate([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]), color=False))
    0 |F0 F1       BW0--    BW1--
    1 |   F0 BW0-- F1 BW1--
       0                        9
    """
    check_timeline(timeline, "draw_text")
    rows = [computing(row) for row in timeline.rows]
    margin = len(str(max(len(rows) - 1, 0))) + 2
    columns = _natural_width(timeline, rows) if width is None else max(width - margin, 1)
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    color = sys.stdout.isatty() if color is None else color
    several = _several(rows)
    lines = []
    for rank, row in enumerate(rows):
        line = Text(f"{rank:>{margin - 2}} |", no_wrap=True, end="")
        line.append_text(_line(row, scale, several))
        if not color:
            line.rstrip()
        lines.append(line)
    end = f"{timeline.makespan:.4g}"
    lines.append(Text(f"{' ' * margin}0{end:>{max(columns - 2, len(end) + 1)}}", end=""))
    return _rendered(lines) if color else "\n".join(line.plain for line in lines)


def _natural_width(timeline: Timeline, rows: list[list[Event]]) -> int:
    """Return the columns at which every name fits with a blank after it, at most `WIDEST`."""
    several = _several(rows)
    needed = [
        (len(_names(event.action, several)[0]) + 1) / (event.end - event.start)
        for row in rows
        for event in row
        if event.end > event.start
    ]
    return min(math.ceil(max(needed, default=0.0) * timeline.makespan - 1e-9), WIDEST)


def _line(row: list[Event], scale: float, several: bool) -> Text:
    line, levels = Text(), _levels(row, scale, several)
    for event in row:
        begin, end = round(event.start * scale), round(event.end * scale)
        if end > max(begin, len(line)):
            begin = max(begin, len(line))
            line.append(" " * (begin - len(line)))
            name = _names(event.action, several)[levels[event.action.op]]
            line.append(_cell(name, end - begin), _STYLES[event.action.op])
    return line


def _several(rows: list[list[Event]]) -> bool:
    return any(len({event.action.stage for event in row}) > 1 for row in rows)


def _levels(row: list[Event], scale: float, several: bool) -> dict[Op, int]:
    """Return the level of shortening of each operation: the same in a row, except for operations shown as a letter."""
    levels = dict.fromkeys(_STYLES, 0)
    for event in row:
        names, op = _names(event.action, several), event.action.op
        columns = round(event.end * scale) - round(event.start * scale)
        room = max(columns, (event.end - event.start) * scale + 1e-6)
        if several and room < len(names[0]) + 1:  # a blank separates names with stages: no 0F01F0
            levels[op] = max(levels[op], 1)
        while 0 < columns < len(names[levels[op]]) and levels[op] < _LETTER:
            levels[op] += 1
    shared = min(max(levels.values()), _LETTER - 1)
    return {op: _LETTER if level == _LETTER else shared for op, level in levels.items()}


def _names(action: Action, several: bool) -> tuple[str, ...]:
    """Return the possible names of a computation, from long to short."""
    short = f"{action.op.value}{action.microbatch}"
    letter = action.op.value[0]
    return (f"{action.stage}{short}" if several else short, short, f"{letter}{action.microbatch}", letter)


def _cell(name: str, columns: int) -> str:
    """Return the text of a computation, which ends in a blank if there is room."""
    filled = f"{name:-<{max(columns - 1, len(name))}}"
    return f"{filled:<{columns}}"[:columns]


def _rendered(lines: list[Text]) -> str:
    widest = max(len(line) for line in lines)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=widest + 1)
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False)
    return capture.get().removesuffix("\n")


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


# colour names that both viewers know
_CHROME_COLORS = {
    Op.FORWARD: "thread_state_running",
    Op.BACKWARD_INPUT: "thread_state_runnable",
    Op.BACKWARD_WEIGHT: "good",
    Op.BACKWARD: "thread_state_iowait",
}
_COMPUTE, _MESSAGES = 0, 1  # threads, since messages overlap computations


def to_chrome(timeline: Timeline, path: str | Path | None = None) -> dict[str, Any]:
    """Return the trace, and write it to `path` as JSON if there is one.

    A rank is a process; its computations are one thread, messages and the other lowered actions another. A unit of the
    timeline is shown as a second. Raises `PlanError` for a plan that was not simulated, and if the file cannot be
    written.

    Source: "Trace Event Format", complete events (ph X, ts and dur in microseconds)
    """
    check_timeline(timeline, "to_chrome")
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.rows):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        names = ["compute"] if all(e.action.op in COMPUTE for e in row) else ["compute", "messages"]
        for thread, name in enumerate(names):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
        events += [_complete(rank, event) for event in row]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    if path is not None:
        try:
            Path(path).write_text(json.dumps(trace))
        except OSError as error:
            raise PlanError("the trace cannot be written", where=str(path), got=str(error)) from error
    return trace


def _complete(rank: int, event: Event) -> dict[str, Any]:
    action = event.action
    computes = action.op in COMPUTE
    numbers = {"stage": action.stage, "microbatch": action.microbatch, "buffer": action.buffer}
    trace_event: dict[str, Any] = {
        "ph": "X",
        "name": str(action),
        "cat": "compute" if computes else "send" if action.op in SENDS else "other",
        "pid": rank,
        "tid": _COMPUTE if computes else _MESSAGES,
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": {name: value for name, value in numbers.items() if value is not None},
    }
    return {**trace_event, "cname": _CHROME_COLORS[action.op]} if computes else trace_event
