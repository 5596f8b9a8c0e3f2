"""`import fds` beside `import torch`, each in a new interpreter.

    python -m benchmarks.imports                # or: make bench-imports
    python -m benchmarks.imports --quick        # one pair, nothing written: does it all run?

Claims: `import fds` takes at most 1.2 of the time of `import torch`, and so does loading what a plain step needs, which
fds leaves until a name is used.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # as a module and as a file, from anywhere

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import report
from benchmarks.harness import Contender, timed

AT_MOST = 1.2
PLAIN = "functional, compose, accumulate, clip_by_global_norm, adamw, schedules"
WAYS = {
    "import fds": ("import fds", AT_MOST),
    "the names of a plain step": (f"from fds import {PLAIN}", AT_MOST),
    "every public name": ("from fds import *", None),
}


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options, console = parse(), Console()
    beside = Contender("import torch", lambda: running("import torch"))
    contenders = [Contender(name, lambda code=code: running(code)) for name, (code, _) in WAYS.items()]
    duels = [*((one, beside) for one in contenders), (beside, beside)]
    series = timed(
        duels[:1] if options.quick else duels,
        pairs=options.pairs,
        most=options.pairs,
        warm_up=0 if options.quick else 1,
        progress=lambda text: console.print(f"[dim]{text}[/]"),
    )
    claims = [at_most for _, at_most in WAYS.values()]
    rows = [
        [one.name, beside.name, *report.timed(times), report.verdict(claim, times.reaches(claim))]
        for one, times, claim in zip(contenders, series, claims, strict=False)
    ]
    rows += [[beside.name, "itself anew (A/A)", *report.timed(times), ""] for times in series[len(contenders) :]]
    header = ["contender", "beside", "ms", "ms beside", "ratio", "95% interval", "claim"]
    tables: list[report.Rows] = [(f"Time ({options.pairs} pairs)", header, rows)]
    report.show_tables(tables, console)
    if options.quick:
        return 0
    facts = {
        "what ran": "new interpreters, from their start to their end, files in the cache and compiled",
        "the names of a plain step": PLAIN,
    }
    console.print(f"written: {report.write_tables(tables, 'imports', facts)}")
    met = [times.reaches(claim) is not False for times, claim in zip(series, claims, strict=False)]
    return 0 if all(met) else 1


def running(code: str):
    """Return a call that runs `code` in a new interpreter."""

    def call() -> Tensor:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        return torch.ones(())

    return call


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="a multiple of ten (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one pair, nothing written")
    options = parser.parse_args()
    if options.quick:
        options.pairs = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
