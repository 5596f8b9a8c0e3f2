"""A timeline as text: one line per rank, columns are time."""

from __future__ import annotations

import io
import math
import sys

from rich.console import Console
from rich.text import Text

from fds.plans.actions import Action, Op
from fds.plans.timeline import Event, Timeline, computing

WIDEST = 2000  # columns, where nobody says how many there are
_STYLES = {
    Op.FORWARD: "black on bright_blue", Op.BACKWARD_INPUT: "black on bright_cyan",
    Op.BACKWARD_WEIGHT: "black on bright_green", Op.BACKWARD: "black on bright_yellow",
}  # fmt: skip


def draw_text(timeline: Timeline, *, width: int | None = None, color: bool | None = None) -> str:
    """Return one line per rank: a computation as its operation and microbatch, then `-` for as long as it lasts.

    Where a rank has several stages the stage stands before, as in `2F0`. An operation whose names do not fit into
    the line loses the stage, then all but its first letter and the microbatch, then the microbatch. The last line
    shows where time 0 and the end are.

    Args:
        timeline: simulated or measured.
        width: columns of the whole; as many as the names need where None.
        color: whether to use the terminal's colours; where None, if standard output is a terminal.

    >>> from fds.plans.simulator import simulate
    >>> print(draw_text(simulate([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]), color=False))
    0 |F0 F1       BW0--    BW1--
    1 |   F0 BW0-- F1 BW1--
       0                        9
    """
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
    """Return the columns at which every name fits with a blank behind it; no more than `WIDEST`."""
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
    """Return how short the names of each operation must be for all of a row to fit, so that a row has one form."""
    levels = dict.fromkeys(_STYLES, 0)
    for event in row:
        names, op = _names(event.action, several), event.action.op
        columns = round(event.end * scale) - round(event.start * scale)
        while 0 < columns < len(names[levels[op]]) and levels[op] < len(names) - 1:
            levels[op] += 1
    return levels


def _names(action: Action, several: bool) -> tuple[str, ...]:
    """Return what a computation may be called, from long to short."""
    short = f"{action.op.value}{action.microbatch}"
    letter = action.op.value[0]
    return (f"{action.stage}{short}" if several else short, short, f"{letter}{action.microbatch}", letter)


def _cell(name: str, columns: int) -> str:
    """Return the text of a computation: a blank ends it where there is room, so that neighbours stand apart."""
    filled = f"{name:-<{max(columns - 1, len(name))}}"
    return f"{filled:<{columns}}"[:columns]


def _rendered(lines: list[Text]) -> str:
    widest = max(len(line) for line in lines)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=widest + 1)
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False)
    return capture.get().removesuffix("\n")
