"""What watching a run costs: a step with monitors, and one whose time or memory is read, beside the step without.

    python -m benchmarks.watching             # or: make bench-watching
    python -m benchmarks.watching --quick     # a tiny model, nothing written: does it all run?

Claims: with CSV, a console and TensorBoard, every call written, at most 1.01 of the step's time; every call timed, at
most 1.02. Off, a step has no more calls of functions than it had: tests/unit/step/test_host_work.py counts them.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as a module and as a file, from anywhere

import torch
from gpt.model import gpt
from rich.console import Console
from torch import Tensor

import fds
from benchmarks import report
from benchmarks.harness import Call, Contender, Row, compare
from fds.monitors import CSV, TensorBoard


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="timings of each pair (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 pairs, nothing written")
    parser.add_argument("--out", default=report.RESULTS, help="where the table goes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = 2 if options.quick else options.pairs
    console = Console()
    progress = lambda text: console.print(f"[dim]{text}[/]")
    comparison = compare(contenders(options.quick), pairs=pairs, most=pairs, progress=progress)
    report.show(comparison, console)
    if options.quick:
        return 0  # a tiny model is all overhead, and claims nothing
    console.print(f"written: {report.write(comparison, 'watching', facts(), folder=Path(options.out))}")
    return 0 if comparison.met else 1


def contenders(quick: bool) -> list[Row]:
    """Return who stands beside the step that nobody watches."""
    plain = Contender("unwatched", lambda: run(quick))
    return [
        Row(Contender("monitored", lambda: run(quick, monitored=True)), plain, time_at_most=1.01),
        Row(Contender("timed", lambda: run(quick, gauge=fds.timed())), plain, time_at_most=1.02),
        Row(Contender("timed by layer", lambda: run(quick, gauge=fds.timed(layers=True))), plain),
        Row(Contender("memory by part", lambda: run(quick, gauge=fds.memory_breakdown())), plain),
        Row(Contender("monitored and timed", lambda: run(quick, monitored=True, gauge=fds.timed())), plain),
    ]


def run(quick: bool, *, monitored: bool = False, gauge: Any = None) -> Call:
    """Return a call of the step, and of what watches it."""
    width, layers, rows, context = (16, 1, 2, 8) if quick else (128, 4, 8, 128)
    loss = gpt(width=width, layers=layers, heads=4, dropout=0.0)
    step = fds.compose(fds.skip_nonfinite(), fds.clip_by_global_norm(1.0), fds.adamw(1e-3), fds.donate())(loss)
    states = [step.init(loss.init, key=0)]
    text = torch.randint(256, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    folder, lines = tempfile.mkdtemp(), Console(file=io.StringIO())
    sinks = CSV(folder), TensorBoard(folder), fds.monitors.Console(every=1, console=lines)
    monitor = fds.monitor(*sinks, batch_size=rows)

    def call() -> Tensor:
        batch, before = (text[:, :-1], text[:, 1:]), states.pop()
        with contextlib.nullcontext() if gauge is None else gauge(before):
            state, metrics = step(before, batch)
        states.append(state)
        seen = {} if gauge is None else gauge.metrics()
        if monitored:
            monitor(state, {**metrics, **seen})
        return metrics["loss"]

    return call


def facts() -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": "a training step of a GPT 128 wide, 4 layers, 8 rows of 128 bytes, float32, one thread of the CPU",
        "fds": "compose(skip_nonfinite(), clip_by_global_norm(1.0), adamw(1e-3), donate())",
        "monitored": "every call is written by CSV (5 files, flushed), TensorBoard and a console into memory",
        "timed": "every call is timed, and its times are read; also those of every layer",
        "memory by part": "every call's memory in use is read as parts begin and end",
    }


if __name__ == "__main__":
    sys.exit(main())
