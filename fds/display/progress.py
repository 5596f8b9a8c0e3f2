"""`Progress`: how a run goes, while it runs; `Interrupt`: Ctrl-C and SIGTERM end it after a step of all ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from rich.console import Console

from fds.collectives import Axis, mesh
from fds.display.log import Curve, Log
from fds.display.readings import read
from fds.display.screens import Screen, View, screen_for, short
from fds.errors import FdsError, is_int, is_number

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the loop to end after its step, a second one ends the program at once.

    `with Interrupt(axis) as interrupt:` puts the earlier handlers back at the end. Python hands signals to the main
    thread alone: elsewhere, as on simulated ranks, nothing is handled and `asked` stays False.

    Args:
        axis: the ranks that end together; None for one rank.
    """

    asked = False  # whether this rank was interrupted

    def __init__(self, axis: Axis | None = None):
        self._axis = axis
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Return whether any rank was interrupted, the same on all ranks: one message of 4 bytes between hosts."""
        if self._axis is None or self._axis.size == 1:
            return self.asked
        return bool(self._axis.all_reduce(torch.tensor(float(self.asked))))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Progress:
    """Show how a run goes: a panel in a terminal, lines in a log, an output that is replaced in a notebook.

        with fds.display.Progress(1000, start=int(state.calls)) as progress:
            for i in progress:                           # 0 ... 999; Ctrl-C ends it after the step that runs
                state, metrics = step(state, batch(i))
                progress(metrics, tokens=8192)
        fds.save("run", state, step)                     # of an interrupted run too

    `for i, rows in zip(progress, loader)` takes rows from a loader; another loop asks `if progress.ends: break`, for
    Ctrl-C does not end it by itself.

    Metrics stay on the device until they are shown: then those of all steps since are copied at once, and in between
    nothing waits. The numbers of a run are the same with it and without it. All ranks make it and call it; the first
    one shows, and if one is interrupted all end after the same step (a message of 4 bytes a step, between hosts).

    Args:
        total_steps: of the whole run.
        start: steps that were done before.
        title: shown above.
        names: the metrics to show, in order; None for all but `step`. Booleans are counted.
        curve: the metric that is smoothed, and drawn as a curve.
        interval: seconds between two readings; None for half a second, and ten where lines are printed. The first
            step and a note are shown at once, the last step at the end of the block.
        log: a file of JSON lines, one per step with all its metrics; a run that starts at `start` continues it.
        axis: the ranks that end together; None for all that run.
        show: whether this rank shows and writes the log; None for the first rank alone.
        console: where to print.

    Attributes:
        done: steps done, earlier ones included.
        interrupted: whether Ctrl-C or SIGTERM came, on any rank.

    Raises `FdsError` for sizes that are none, and for a log that cannot be written.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start: int = 0,
        title: str = "",
        names: Sequence[str] | None = None,
        curve: str = "loss",
        interval: float | None = None,
        log: str | Path | None = None,
        axis: Axis | None = None,
        show: bool | None = None,
        console: Console | None = None,
    ):
        for name, value in (("total_steps", total_steps), ("start", start)):
            if not is_int(value, 0):
                raise FdsError("not a number of steps", where=f"Progress, {name}", got=repr(value), want="0 or more")
        if interval is not None and not (is_number(interval) and interval >= 0):
            where, want = "Progress, interval", "0.0 or more"
            raise FdsError("not a number of seconds", where=where, got=repr(interval), want=want)
        axis = mesh(ranks=-1)["ranks"] if axis is None else axis
        self.total_steps, self.done, self.title, self.interrupted = total_steps, start, title, False
        self.shows = axis.index == 0 if show is None else show
        self._interrupt = Interrupt(axis)
        self._names, self._curve_of, self._interval = names, curve, interval
        self._console, self._log_path = console, log
        self._log: Log | None = None
        self._screen: Screen | None = None
        self._curve, self._counts = Curve(), dict[str, int]()
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        self._numbers: dict[str, float] = {}  # of the last step that was read
        self._notes: dict[str, float] = {}
        self._work = {"tokens": 0, "samples": 0}  # since the last reading
        self._speeds: dict[str, float] = {}
        self._first = start

    def __enter__(self) -> Self:
        self._began = self._read_at = time.perf_counter()
        self._shown_at: float | None = None
        if self.shows:
            if self._log_path is not None:
                self._log = Log(self._log_path, upto=self.done)
                for line in self._log.kept:
                    if self._curve_of in line:
                        self._curve.add(line[self._curve_of])
            self._screen = screen_for(self._console or Console())
        self._interrupt.__enter__()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._interrupt.__exit__()
        try:
            if error is None and self._waiting:
                self.show()
        finally:
            if self._screen is not None:
                self._screen.close()
            if self._log is not None:
                self._log.__exit__()

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the steps that are left, until one is interrupted.

        Raises `FdsError` if a turn ends without `progress(metrics)`.
        """
        while not self.ends:
            number = self.done
            yield number
            if self.done == number:
                want = "progress(metrics) in each turn"
                raise FdsError("the step was not reported", where=f"step {number}", want=want)

    def __call__(self, metrics: Mapping[str, Any], *, tokens: int = 0, samples: int = 0) -> None:
        """Report a step: its metrics, and how many tokens and samples it took, on all ranks together."""
        self.done += 1
        self.interrupted = self._interrupt.agreed()
        if self._screen is None:
            return
        self._waiting.append((self.done, metrics))
        self._work["tokens"] += tokens
        self._work["samples"] += samples
        interval = self._screen.interval if self._interval is None else self._interval
        if self._shown_at is None or time.perf_counter() - self._shown_at >= interval:
            self.show()

    @property
    def ends(self) -> bool:
        """Whether the step that was reported last is the last one: all are done, or it was interrupted."""
        return self.interrupted or self.done >= self.total_steps

    def show(self) -> None:
        """Read the metrics that were reported, which waits for the device, and show them."""
        if self._screen is None:
            return
        self._read()
        self._screen.show(View(self.title, self.done, self.total_steps, self._texts(), tuple(self._curve.points)))
        self._shown_at = time.perf_counter()

    def note(self, values: Mapping[str, Any]) -> None:
        """Show numbers beside the metrics from now on, such as a held-out loss, and write them to the log."""
        if self._screen is None:
            return
        self._read()
        [numbers] = read([values])
        self._notes |= numbers
        if self._log is not None:
            self._log.write(self.done, numbers)
        self.show()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of this block, an evaluation or a save, as training; reads the metrics first."""
        if self._screen is not None:
            self._read()
        yield
        self._read_at = time.perf_counter()

    def _read(self) -> None:
        if not self._waiting:
            return
        rows = read([metrics for _, metrics in self._waiting])
        now = time.perf_counter()
        self._speeds = {name: n / max(now - self._read_at, 1e-9) for name, n in self._work.items() if n}
        speeds = {f"{name}_per_s": round(speed, 1) for name, speed in self._speeds.items()}
        for (number, _), row in zip(self._waiting, rows, strict=True):
            for name, value in row.items():
                if isinstance(value, bool):
                    self._counts[name] = self._counts.get(name, 0) + value
            if self._curve_of in row:
                self._curve.add(row[self._curve_of])
            if self._log is not None:
                values = {name: value for name, value in row.items() if name != "step"}
                self._log.write(number, {**values, **speeds})
        self._numbers = rows[-1]
        self._waiting, self._work, self._read_at = [], dict.fromkeys(self._work, 0), now

    def _texts(self) -> dict[str, str]:
        names = [name for name in self._numbers if name != "step"] if self._names is None else self._names
        if self._names is None and "lr" in self._numbers:
            names = [name for name in names if not name.startswith("lr/")]  # of the groups: all are equal
        texts: dict[str, str] = {}
        for name in names:
            if name in self._counts:
                texts |= {name: f"{self._counts[name]:,}"} if self._counts[name] else {}
            elif name in self._numbers:
                texts[name] = short(self._curve.value if name == self._curve_of else self._numbers[name])
        texts |= {name: short(value) for name, value in self._notes.items()}
        texts |= {f"{name}/s": f"{speed:,.0f}" for name, speed in self._speeds.items()}
        if self.interrupted and self.done < self.total_steps:
            return {**texts, "interrupted": f"after step {self.done}"}
        a_step = (time.perf_counter() - self._began) / max(1, self.done - self._first)
        seconds = int(a_step * (self.total_steps - self.done))
        hours, minutes = divmod(seconds // 60, 60)
        left = f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
        return {**texts, "time left": left}
