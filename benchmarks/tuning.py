"""What `fds.tune` predicts of compositions beside what they take, all of them tried; and what its own order would find.

    python -m benchmarks.tuning                 # or: make bench-tuning (two ranks, ten minutes)
    python -m benchmarks.tuning --quick         # two compositions, nothing written: does it all run?

Claims: seconds are predicted within 5% in the median and 15% at worst, before any trial; bytes within 3% in the median;
the ranking ends with one within 5% of the best, after a tenth of the trials.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as a module and as a file, from anywhere

import attrs
import torch
from gpt.model import gpt
from rich.console import Console

import fds
from benchmarks import report
from fds.tuning import Budget, Report, Row, Space, standard

RANKS = 2


@attrs.frozen
class Problem:
    """A GPT, and the batch of a step."""

    width: int
    layers: int
    rows: int
    context: int


PROBLEMS = {
    "wide": Problem(width=384, layers=4, rows=16, context=128),
    "deep": Problem(width=192, layers=8, rows=32, context=64),
}
QUICK = {"tiny": Problem(width=32, layers=2, rows=4, context=16)}


def adamw() -> fds.Optimizer:
    """Return the rest of every composition."""
    return fds.adamw(1e-3)


def whole_space() -> Space:
    """Return 32 compositions on two ranks."""
    return standard(adamw, RANKS, microbatches=(1, 4), pipelines=(1, RANKS))


def small_space() -> Space:
    """Return two."""
    return standard(adamw, RANKS, stages=(0, 1), microbatches=(1,), recompute=(False,))


def main() -> int:
    """Run from the command line; the exit code says whether everything ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two compositions, nothing written")
    parser.add_argument("--only", choices=PROBLEMS, help="one problem")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="where the table goes (benchmarks/results)")
    options = parser.parse_args()
    console = Console()
    problems = QUICK if options.quick else {k: v for k, v in PROBLEMS.items() if options.only in (None, k)}
    tables: list[report.Rows] = []
    for name, problem in problems.items():
        tables += measured(name, problem, small_space() if options.quick else whole_space(), console)
    report.show_tables(tables, console)
    if not options.quick:
        facts = {"what ran": f"GPTs of examples/train_gpt.py on {RANKS} ranks of gloo, every composition of a space"}
        console.print(f"written: {report.write_tables(tables, 'tuning', facts, folder=options.out)}")
    return 0


def measured(name: str, problem: Problem, space: Space, console: Console) -> list[report.Rows]:
    """Try all of a space, then let the ranking choose from what is known."""
    loss = gpt(width=problem.width, layers=problem.layers, heads=4)
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (problem.rows, problem.context + 1), generator=draws)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    count = len(space.candidates())
    with tempfile.TemporaryDirectory() as folder:
        search: dict[str, Any] = {"space": space, "journal": Path(folder) / "journal.jsonl"}
        budget = Budget(trials=count, patience=count, measure=0.3)
        say = lambda line: console.print(f"[dim]{line}[/]")
        one = attrs.evolve(budget, trials=1)
        fds.tune(loss, loss.init, batch, budget=one, show=say, **search)  # which weighs and rehearses all
        everything = fds.tune(loss, loss.init, batch, budget=budget, order="grid", show=say, **search)
        # grid has no predictions, and the ranking finds all trials in the journal
        known = fds.tune(loss, loss.init, batch, budget=budget, show=None, **search)
        tenth = Budget(trials=max(1, math.ceil(count / 10)), patience=count)
        chosen = fds.tune(loss, loss.init, batch, budget=tenth, show=None, **search)
    predictions = {row.candidate.key: row for row in known.rows}
    return [_candidates(name, everything, predictions), _summary(name, everything, predictions, chosen)]


def _candidates(name: str, everything: Report, known: Mapping[str, Row]) -> report.Rows:
    head = ["contender", "outcome", "predicted ms", "measured ms", "error", "predicted MB", "measured MB", "error"]
    rows: list[list[str]] = []
    for row in everything.rows:
        seconds, num_bytes = _errors(row, known)
        prediction, footprint = known[row.candidate.key].prediction, row.footprint
        rows.append([
            str(row.candidate),
            row.outcome if row.outcome == "tried" else f"{row.outcome}: {row.why}",
            f"{prediction.seconds() * 1e3:.1f}" if prediction else "",
            f"{row.measured * 1e3:.1f}" if row.measured else "",
            "" if seconds is None else f"{seconds:+.1%}",
            f"{footprint.num_bytes / 1e6:.2f}" if footprint else "",
            f"{row.num_bytes / 1e6:.2f}" if row.num_bytes else "",
            "" if num_bytes is None else f"{num_bytes:+.1%}",
        ])  # fmt: skip
    return f"Every composition of {name}, predicted before any trial", head, rows


def _errors(row: Row, known: Mapping[str, Row]) -> tuple[float | None, float | None]:
    """Return how far predictions of seconds and bytes are from what was measured, relative to it."""
    prediction, footprint = known[row.candidate.key].prediction, row.footprint
    seconds = prediction.seconds() / row.measured - 1 if prediction and row.measured else None
    return seconds, footprint.num_bytes / row.num_bytes - 1 if footprint and row.num_bytes else None


def _summary(name: str, everything: Report, known: Mapping[str, Row], chosen: Report) -> report.Rows:
    errors = [_errors(row, known) for row in everything.rows]
    seconds = [abs(s) for s, _ in errors if s is not None]
    num_bytes = [abs(b) for _, b in errors if b is not None]
    best = everything.best.measured or math.nan
    late = (chosen.best.measured or math.nan) / best - 1
    tried = sum(row.measured is not None for row in chosen.rows)
    verdict = lambda value, most: f"{value:.1%} ({'yes' if value <= most else 'NO'}: at most {most:.0%})"
    rows = [
        [f"{name}: seconds, median of {len(seconds)}", verdict(statistics.median(seconds), 0.05)],
        [f"{name}: seconds, worst", verdict(max(seconds), 0.15)],
        [f"{name}: bytes, median", verdict(statistics.median(num_bytes), 0.03)],
        [f"{name}: the best of the ranking's {tried} trials, beside the best of all", verdict(late, 0.05)],
    ]
    return f"How far off, {name}", ["contender", "off by"], rows


if __name__ == "__main__":
    sys.exit(main())
