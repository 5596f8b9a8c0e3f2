"""`Display`: a live panel of numbers, or plain lines without a terminal."""

from __future__ import annotations

import time
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpt.log import Log, smooth

BLOCKS = "▁▂▃▄▅▆▇█"


class Display:
    """Shows a log: `with Display(console, title, total=steps) as display: display.show(log)`."""

    def __init__(self, console: Console, title: str, *, total: int, done: int = 0):
        self.console, self.title, self.total = console, title, total
        self._first, self._start = done, time.perf_counter()
        redraws = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if redraws else None

    def __enter__(self) -> Self:
        if self._live is None:
            self.console.print(self.title, soft_wrap=True)
        else:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, log: Log) -> None:
        """Redraw the panel."""
        if self._live is not None and log.steps:
            self._live.update(self._panel(log), refresh=True)

    def tell(self, log: Log) -> None:
        """Print a line if there is no panel."""
        if self._live is None and log.steps:
            words = (f"{name} {value}" for name, value in self._numbers(log).items())
            self.console.print(
                f"step {log.steps[-1]['step']}/{self.total}", *words, sep="  ", highlight=False, soft_wrap=True
            )

    def _numbers(self, log: Log) -> dict[str, str]:
        line = log.steps[-1]
        numbers = {"loss": f"{smooth([x['bits_per_byte'] for x in log.steps[-200:]])[-1]:.3f} bits/byte"}
        if log.evaluations:
            numbers["held out"] = f"{log.evaluations[-1]['held_out']:.3f} bits/byte"
        numbers |= {
            "tokens/s": f"{line['tokens_per_s']:,.0f}",
            "gradient norm": f"{line['grad_norm']:.3f}",
            "learning rate": f"{line['lr']:.2e}",
        }
        if "loss_scale" in line:
            skipped = int(sum(x["skipped"] for x in log.steps))
            numbers["loss scale"] = f"{line['loss_scale']:g}" + (f" ({skipped} skipped)" if skipped else "")
        return {**numbers, "time left": self._time_left(line["step"])}

    def _time_left(self, step: int) -> str:
        a_step = (time.perf_counter() - self._start) / max(1, step - self._first)
        minutes, seconds = divmod(int(a_step * (self.total - step)), 60)
        return f"{minutes}:{seconds:02}"

    def _panel(self, log: Log) -> Panel:
        done = log.steps[-1]["step"]
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(ratio=1)
        progress.add_row(ProgressBar(total=self.total, completed=done), f"[bold]{done}[/]/{self.total}")
        numbers = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for name in (shown := self._numbers(log)):
            numbers.add_column(name, justify="right", no_wrap=True)
        numbers.add_row(*shown.values(), style="bold")
        width = max(10, self.console.width - 4)
        curve = Text(spark([x["bits_per_byte"] for x in log.steps], width=width), style="cyan", no_wrap=True)
        return Panel(Group(progress, numbers, curve), title=self.title, border_style="dim")


def spark(values: list[float], *, width: int) -> str:
    """Draw values as a line of `width` blocks.

    >>> spark([3.0, 2.0, 1.0], width=3)
    '█▅▁'
    """
    smoothed = smooth(values, decay=0.9)
    picked = [smoothed[i * len(values) // width] for i in range(width)] if len(values) > width else smoothed
    low, high = min(picked, default=0.0), max(picked, default=0.0)
    return "".join(BLOCKS[round(7 * (x - low) / (high - low)) if high > low else 0] for x in picked)
