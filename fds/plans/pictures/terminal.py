"""`draw_text`: a timeline as text, one line per rank, columns are time."""

from __future__ import annotations

import io
import math
import sys

from rich.console import Console
from rich.text import Text

from fds.plans.actions import Action, Op
from fds.plans.timeline import Event, Timeline, check_timeline, computing

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
