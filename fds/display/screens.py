"""What is to be seen of a run at one moment, and where: in a terminal, as lines in a log, in a notebook."""

from __future__ import annotations

import importlib
from typing import Any

import attrs
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fds import _html
from fds.display.log import spark


@attrs.frozen
class View:
    """A run at one moment: its title, steps done of all, numbers by name, and the points of its curve."""

    title: str
    done: int
    total: int
    numbers: dict[str, str]
    points: tuple[float, ...] = ()

    def panel(self, width: int) -> Panel:
        """Return it as a panel for a terminal of `width` columns."""
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(ratio=1)
        bar = ProgressBar(total=max(self.total, 1), completed=self.done)
        progress.add_row(bar, f"[bold]{self.done}[/]/{self.total}")
        numbers = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for name in self.numbers:
            numbers.add_column(Text(name), justify="right", no_wrap=True)
        numbers.add_row(*map(Text, self.numbers.values()), style="bold")
        curve = Text(spark(self.points, width=max(10, width - 4)), style="cyan", no_wrap=True)
        return Panel(Group(progress, numbers, curve), title=Text(self.title), border_style="dim")

    def __repr__(self) -> str:
        return "  ".join([f"step {self.done}/{self.total}", *(f"{name} {text}" for name, text in self.numbers.items())])

    def _repr_html_(self) -> str:
        bar = _html.filled(self.done / max(self.total, 1))
        names, texts = zip(*self.numbers.items(), strict=True) if self.numbers else ((), ())
        numbers = _html.table([texts], head=names, right=range(len(names))) if names else ""
        curve = _html.code(spark(self.points, width=80))
        title = self.title or "Progress"
        return _html.box(title, _html.text(f"step {self.done:,} of {self.total:,}"), bar, numbers, curve)


def short(number: float) -> str:
    """Return a number with four digits, or whole.

    >>> short(65536.0), short(0.00012345)
    ('65536', '0.0001234')
    """
    return f"{number:.0f}" if abs(number) < 1e9 and number == round(number) else f"{number:.4g}"


class Screen:
    """Something that shows views, one after the other; this one nowhere."""

    interval = 0.5  # seconds between two views, unless the user says otherwise

    def show(self, view: View) -> None:
        """Show a view in the place of the last one, or after it."""

    def close(self) -> None:
        """Leave the last view as it is."""


class Terminal(Screen):
    """A panel that is redrawn; what the program prints appears above it."""

    def __init__(self, console: Console):
        self.console = console
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, view: View) -> None:
        """Redraw the panel."""
        self._live.update(view.panel(self.console.width), refresh=True)

    def close(self) -> None:
        """Leave the panel."""
        self._live.stop()


class Lines(Screen):
    """A line for every view, for files and pipes."""

    interval = 10.0

    def __init__(self, console: Console):
        self.console = console
        self._titled = False

    def show(self, view: View) -> None:
        """Print a line; before the first, the title."""
        lines = [view.title] * bool(view.title and not self._titled) + [repr(view)]
        self._titled = True
        for line in lines:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class Notebook(Screen):
    """An output of the cell that is replaced."""

    def __init__(self, display: Any = None):
        self._display = display or importlib.import_module("IPython.display").display
        self._handle: Any = None

    def show(self, view: View) -> None:
        """Show the view in the place of the last one."""
        if self._handle is None:
            self._handle = self._display(view, display_id=True)
        else:
            self._handle.update(view)


def screen_for(console: Console) -> Screen:
    """Return the screen that fits: a notebook's, a terminal's, or lines."""
    if console.is_jupyter:
        return Notebook()
    redraws = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")  # for blocks
    return Terminal(console) if redraws else Lines(console)
