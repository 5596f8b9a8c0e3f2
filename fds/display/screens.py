"""Where a run is shown: a panel in a terminal, lines in a log, an output of its own in a notebook."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from fds.display.view import View


class Screen(Protocol):
    """Something that shows views, one after the other."""

    interval: float  # seconds between two views, unless the user says otherwise

    def show(self, view: View) -> None:
        """Show a view in the place of the last one, or after it."""
        ...

    def close(self) -> None:
        """Leave the last view as it is."""
        ...


class Terminal:
    """A panel that is redrawn; what the program prints appears above it."""

    interval = 0.5

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


class Lines:
    """A line for every view, for files and pipes."""

    interval = 10.0

    def __init__(self, console: Console):
        self.console = console
        self._titled = False

    def show(self, view: View) -> None:
        """Print a line; before the first, the title."""
        lines = [view.title] * bool(view.title and not self._titled) + [view.line()]
        self._titled = True
        for line in lines:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing."""


class Notebook:
    """An output of the cell that is replaced."""

    interval = 0.5

    def __init__(self, display: Any = None):
        self._display = display or importlib.import_module("IPython.display").display
        self._handle: Any = None

    def show(self, view: View) -> None:
        """Show the view in the place of the last one."""
        if self._handle is None:
            self._handle = self._display(view, display_id=True)
        else:
            self._handle.update(view)

    def close(self) -> None:
        """Do nothing: the last view stays."""


def screen_for(console: Console) -> Screen:
    """Return the screen that fits: a notebook's, a terminal's, or lines."""
    if console.is_jupyter:
        return Notebook()
    redraws = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")  # for blocks
    return Terminal(console) if redraws else Lines(console)
