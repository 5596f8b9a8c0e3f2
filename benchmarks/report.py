"""What a comparison comes to: a table on the terminal, a dated Markdown file, a picture."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import fds
from benchmarks.harness import Comparison, Series

RESULTS = Path(__file__).parent / "results"

Rows = tuple[str, list[str], list[list[str]]]  # a title, a header, and rows of as many cells


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables of a comparison."""
    show_tables(_tables(comparison), console)


def show_tables(tables: Sequence[Rows], console: Console) -> None:
    """Print tables, the one beside in grey below its contender; a row whose last cell says NO in red."""
    for title, header, rows in tables:
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in header:
            if not name.endswith("beside"):
                table.add_column(name, justify="left" if name == "contender" else "right", no_wrap=True)
        for row in rows:
            cells: list[str] = []
            for name, cell in zip(header, row, strict=True):  # what is beside stands below
                if name.endswith("beside"):
                    cells[-1] += f"\n[dim]{cell}[/]"
                else:
                    cells.append(cell)
            table.add_row(*cells, style="red" if "NO" in row[-1] else None)
        console.print(table)


def write(comparison: Comparison, name: str, facts: Mapping[str, str], *, folder: Path = RESULTS) -> Path:
    """Write `<today>-<name>.md`, and the picture beside it where matplotlib is installed; return the first's path.

    `facts` say what ran.
    """
    path = write_tables(_tables(comparison), name, facts, folder=folder)
    try:
        draw(comparison, path.with_suffix(".png"))
        picture = f"![paired ratios]({path.stem}.png)"
    except ImportError:
        picture = "No picture: matplotlib is not installed (`pip install matplotlib`)."
    with path.open("a") as file:
        file.write(f"\n{picture}\n")
    return path


def write_tables(tables: Sequence[Rows], name: str, facts: Mapping[str, str], *, folder: Path = RESULTS) -> Path:
    """Write `<today>-<name>.md` with these facts, the machine's and the tables, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today()}-{name}.md"
    lines = [f"# {name}, {datetime.date.today()}", ""]
    lines += [f"- {key}: {value}" for key, value in {**facts, **machine()}.items()]
    for title, header, rows in tables:
        lines += ["", f"## {title}", "", _line(header), _line(["---"] * len(header)), *map(_line, rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def machine() -> dict[str, str]:
    """Return where this runs, and on what versions."""
    return {
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "load": "{:.1f}, {:.1f}, {:.1f} over the last 1, 5, 15 minutes".format(*os.getloadavg()),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, fds {fds.__version__}{_commit()}",
    }


def draw(comparison: Comparison, path: Path) -> None:
    """Draw every ratio of every pair. Raises `ImportError` where matplotlib is missing."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, Series, float | None]] = [
        (f"{r.row.contender.name}\nbeside {r.row.beside.name}", r.time, r.row.time_at_most) for r in comparison.results
    ]
    panels += [(f"A/A: {one.name}\nbeside itself", series, None) for one, series in comparison.itself]
    figure = Figure(figsize=(3 * len(panels), 4), layout="constrained")
    bottom, top = _window(comparison)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (title, series, claim) in zip(grid[0], panels, strict=True):
        low, high = series.interval()
        axes.axhline(1, color="black", linewidth=0.6)
        axes.axhspan(low, high, color="tab:blue", alpha=0.25, label=f"{series.ratio:.4f} [{low:.4f}, {high:.4f}]")
        axes.axhline(series.ratio, color="tab:blue")
        shown = series.ratios.clip(bottom, top)
        axes.plot(range(1, len(shown) + 1), shown, ".", color="tab:gray", markersize=4, clip_on=False)
        if claim is not None:
            axes.axhline(claim, color="tab:red", linestyle="--", label=f"at most {claim:g}")
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("pair")
        axes.legend(fontsize=7, loc="upper right")
        axes.set_ylim(bottom, top)
    figure.axes[0].set_ylabel("time over time")
    figure.savefig(path, dpi=120)


def _window(comparison: Comparison) -> tuple[float, float]:
    """Return the ratios to show: four in five pairs, all intervals and claims; wild pairs go to the edge."""
    series = [*(r.time for r in comparison.results), *(s for _, s in comparison.itself)]
    ends = [x for s in series for x in (*np.percentile(s.ratios, [10, 90]), *s.interval())]
    ends += [r.row.time_at_most for r in comparison.results if r.row.time_at_most is not None]
    low, high = min(ends), max(ends)
    return low - 0.05 * (high - low), high + 0.25 * (high - low)


def _tables(comparison: Comparison) -> list[Rows]:
    pairs = len(comparison.results[0].time.ratios)
    per = "" if comparison.calls == 1 else f", {comparison.calls} calls each"
    time_rows = [
        [r.row.contender.name, r.row.beside.name, *timed(r.time), r.agreement, verdict(r.row.time_at_most, r.time_met)]
        for r in comparison.results
    ]
    time_rows += [[one.name, "itself anew (A/A)", *timed(s), "", ""] for one, s in comparison.itself]
    memory_rows = [
        [
            r.row.contender.name,
            r.row.beside.name,
            *(f"{x.peak_bytes:,}" for x in (r.memory, r.beside_memory)),
            f"{r.memory_ratio:.4f}",
            *(f"{x.held_bytes:,}" for x in (r.memory, r.beside_memory)),
            verdict(r.row.memory_at_most, r.memory_met),
        ]
        for r in comparison.results
    ]
    return [
        (
            f"Time ({pairs} pairs{per})",
            ["contender", "beside", "ms", "ms beside", "ratio", "95% interval", "agree", "claim"],
            time_rows,
        ),
        (
            "Memory (bytes of tensors; held: between calls)",
            ["contender", "beside", "peak", "peak beside", "ratio", "held", "held beside", "claim"],
            memory_rows,
        ),
    ]


def timed(series: Series) -> list[str]:
    """Return the cells of a series: both medians in ms, the ratio, its interval."""
    (mine, other), (low, high) = series.medians_ms(), series.interval()
    return [f"{mine:.4g}", f"{other:.4g}", f"{series.ratio:.4f}", f"{low:.4f} to {high:.4f}"]


def verdict(at_most: float | None, met: bool | None) -> str:
    """Return the cell of a claim."""
    return "" if at_most is None else f"≤ {at_most:g}: {'yes' if met else 'NO'}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    changed = ", changed since" if git("status", "--porcelain", "--", "../fds", "../examples", ".") else ""
    return f" ({commit}{changed})" if commit else ""
