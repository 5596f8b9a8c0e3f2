"""`draw_curve`: a log's metric by step, as a picture."""

from __future__ import annotations

from pathlib import Path

from fds.display.jsonl import read_log
from fds.display.smoothing import smoothed
from fds.errors import FdsError


def draw_curve(log: str | Path, path: str | Path, *, metric: str = "loss", note: str | None = None) -> None:
    """Draw a metric by step, as it is and smoothed, and a note such as "held_out", into a PNG.

    Needs matplotlib, which the extra `plot` brings. Raises `FdsError` where it is missing, and for a log that lacks the
    metric.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FdsError("a PNG needs matplotlib", where="draw_curve", hint="pip install matplotlib") from error
    lines = read_log(log)
    steps, values = _column(lines, metric)
    if not values:
        known = ", ".join(dict.fromkeys(name for line in lines for name in line))
        raise FdsError(
            "the log has no such metric", where=str(log), got=metric, want=known, hint="metric= names another"
        )
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, color="tab:blue", alpha=0.2, linewidth=0.7)
    axes.plot(steps, smoothed(values), color="tab:blue", label=f"{metric}, smoothed")
    if note is not None:
        at, noted = _column(lines, note)
        label = f"{note}: {noted[-1]:.3f}" if noted else note
        axes.plot(at, noted, "o-", color="tab:orange", markersize=3.5, label=label)
    axes.set(xlabel="step", ylabel=metric)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _column(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]
