"""`View`: what is to be seen of a run at one moment, as a line, as a panel of a terminal, as HTML."""

from __future__ import annotations

import attrs
from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fds import _html
from fds.display.smoothing import spark


@attrs.frozen
class View:
    """A run at one moment: its title, steps done of all, numbers by name, and the points of its curve."""

    title: str
    done: int
    total: int
    numbers: dict[str, str]
    points: tuple[float, ...] = ()

    def line(self) -> str:
        """Return it as a line of text."""
        return "  ".join([f"step {self.done}/{self.total}", *(f"{name} {text}" for name, text in self.numbers.items())])

    def panel(self, width: int) -> Panel:
        """Return it as a panel for a terminal of `width` columns."""
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(ratio=1)
        progress.add_row(
            ProgressBar(total=max(self.total, 1), completed=self.done), f"[bold]{self.done}[/]/{self.total}"
        )
        numbers = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for name in self.numbers:
            numbers.add_column(Text(name), justify="right", no_wrap=True)
        numbers.add_row(*map(Text, self.numbers.values()), style="bold")
        curve = Text(spark(self.points, width=max(10, width - 4)), style="cyan", no_wrap=True)
        return Panel(Group(progress, numbers, curve), title=Text(self.title), border_style="dim")

    def __repr__(self) -> str:
        return self.line()

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
